"""A sweep's directory: its journal, its checkpoints, its lock, and their damage."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_resume import Crash, crash_after, difference, run, table

from jaxpack import checkpoints, driver, journal, lock, trees
from jaxpack.checkpoints import Checkpoints
from jaxpack.store import Store
from jaxpack.types import LaneState

FLOATS = st.floats(allow_nan=True, allow_infinity=True)


def state(step=3, width=4, dtype=np.float32):
    kernel = np.arange(2 * width, dtype=np.float32).reshape(2, width).astype(dtype)
    return LaneState(
        params={"a.b/c": {"kernel": kernel + step}, "empty": np.zeros((0, 3))},
        model_state={},
        opt_state=((np.int32(step), {"mu": kernel * 2}), ()),
        key=np.arange(2, dtype=np.uint32),
        step=np.int32(step),
        target_step=np.int32(9),
        first_bad_step=np.int32(-1),
        epoch_loss=np.float32(0.5),
        epoch_weight=np.float32(2),
    )


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert (np.shape(x), x.dtype) == (np.shape(y), y.dtype)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


# The journal.


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from("abcdef"), FLOATS | st.text() | st.integers()))
def test_a_line_says_what_it_was_given(record):
    np.testing.assert_equal(journal.decode(journal.encode(record)), record)


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 255))
def test_a_changed_byte_is_found_out(place, change):
    line = bytearray(journal.encode({"trial_id": 3, "score": 0.1 + 0.2}).encode())
    line[place % len(line)] ^= change
    with pytest.raises(ValueError):
        journal.decode(line.decode())


@st.composite
def journals(draw):
    """Records of a sweep's journal, unlike each other, and the file that holds them."""
    scores = draw(st.lists(FLOATS, min_size=1, max_size=4))
    records = [
        {"trial_id": i, "score": score, "reason": draw(st.none() | st.text())}
        for i, score in enumerate(scores)
    ]
    return records, b"".join(journal.encode(r).encode() + b"\n" for r in records)


def reopened(content):
    """What a journal of this content has, and what its file holds afterwards."""
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory) / "journal.jsonl"
        path.write_bytes(content)
        book = journal.Journal(path)
        left = path.read_bytes()
        book.append({"trial_id": 99})
        book.close()
        records = journal.read(path)
    assert records.pop() == {"trial_id": 99}
    np.testing.assert_equal(records, book.records)
    return records, left


@settings(max_examples=50, deadline=None)
@given(journals(), st.data())
def test_cut_off_anywhere_a_journal_has_what_was_whole(kept, data):
    records, content = kept
    cut = data.draw(st.integers(0, len(content)))
    found, left = reopened(content[:cut])
    whole = content[:cut].count(b"\n")
    np.testing.assert_equal(found, records[:whole])
    assert left == b"".join(content.splitlines(keepends=True)[:whole])


@settings(max_examples=50, deadline=None)
@given(journals(), st.integers(1, 3))
def test_a_last_line_repeated_any_times_counts_once(kept, times):
    records, content = kept
    found, _ = reopened(content + content.splitlines(keepends=True)[-1] * times)
    np.testing.assert_equal(found, records)


@settings(
    max_examples=50,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(kept=journals(), data=st.data())
def test_a_changed_byte_anywhere_is_never_taken_for_a_reading(caplog, kept, data):
    records, content = kept
    place = data.draw(st.integers(0, len(content) - 1))
    damaged = bytearray(content)
    damaged[place] ^= data.draw(st.integers(1, 255))
    caplog.clear()
    line = content[:place].count(b"\n")
    if line < len(records) - 1:  # What follows it cannot be trusted.
        with pytest.raises(ValueError, match=rf"line {line + 1} of .* is damaged"):
            reopened(bytes(damaged))
        return
    try:
        found, _ = reopened(bytes(damaged))
    except ValueError as error:  # One line has become two.
        assert damaged[place] == ord("\n") and "is damaged" in str(error)
    else:
        np.testing.assert_equal(found, records[:-1])
        assert "dropped" in caplog.text


def written(path, count=3):
    book = journal.Journal(path)
    for i in range(count):
        book.append({"trial_id": i, "score": i / 7})
    book.close()
    return path.read_bytes()


@pytest.mark.parametrize("cut", [1, 2, 30])
def test_a_cut_off_line_is_dropped(tmp_path, caplog, cut):
    path = tmp_path / "journal.jsonl"
    whole = written(path)
    path.write_bytes(whole[:-cut])
    book = journal.Journal(path)
    assert [record["trial_id"] for record in book.records] == [0, 1]
    assert "is cut off, and dropped" in caplog.text
    book.append({"trial_id": 2, "score": 2 / 7})
    book.close()
    assert path.read_bytes() == whole


def test_a_damaged_last_line_is_dropped(tmp_path, caplog):
    path = tmp_path / "journal.jsonl"
    path.write_bytes(written(path) + b"\0" * 20 + b"\n")
    assert len(journal.read(path)) == 3
    assert "damaged, and dropped" in caplog.text


def test_a_repeated_line_counts_once(tmp_path, caplog):
    path = tmp_path / "journal.jsonl"
    content = written(path)
    path.write_bytes(content + content.splitlines(keepends=True)[-1])
    assert len(journal.read(path)) == 3
    assert "line 4" in caplog.text and "repeats another" in caplog.text


def test_a_damaged_line_within_is_refused_by_its_number(tmp_path):
    path = tmp_path / "journal.jsonl"
    path.write_bytes(written(path).replace(b'"trial_id": 1', b'"trial_id": 7'))
    with pytest.raises(ValueError, match=r"line 2 of .* is damaged: its checksum"):
        journal.Journal(path)


def test_a_full_disk_leaves_whole_lines(tmp_path, monkeypatch):
    path = tmp_path / "journal.jsonl"
    whole = written(path)
    book, real = journal.Journal(path), os.write

    def full(file, data):
        if len(data) > 10:
            return real(file, data[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(journal.os, "write", full)
        with pytest.raises(OSError, match="No space left"):
            book.append({"trial_id": 3, "score": 1.0})
    assert path.read_bytes() == whole
    book.append({"trial_id": 3, "score": 1.0})
    book.close()
    assert len(journal.read(path)) == 4


# Checkpoints.


def test_states_come_back_as_they_were(tmp_path):
    states = {3: state(), 5: state(7), 8: state(2, 6), 9: state(1, dtype="bfloat16")}
    expected = {i: trees.avals(s) for i, s in states.items()}
    for make in (checkpoints.stack, checkpoints.apart):
        kept = Checkpoints(tmp_path / make.__name__)
        kept.save(make(states))
        found, wrong = checkpoints.unstack(kept.load(), expected)
        assert not wrong and found.keys() == states.keys()
        for i, one in found.items():
            same(one, states[i])
    assert states[9].params["a.b/c"]["kernel"].dtype == ml_dtypes.bfloat16


def test_the_newest_complete_checkpoint_counts_and_is_the_only_one(tmp_path):
    kept = Checkpoints(tmp_path / "c")
    expected = {0: trees.avals(state())}
    assert kept.load() == {}
    kept.save(checkpoints.stack({0: state(1)}))
    kept.save(checkpoints.stack({0: state(2)}))
    cut_off = tmp_path / "c" / "000007.orbax-checkpoint-tmp"
    shutil.copytree(tmp_path / "c" / "000001", cut_off)
    found, _ = checkpoints.unstack(Checkpoints(tmp_path / "c").load(), expected)
    assert found[0].step == 2
    kept.save(checkpoints.stack({0: state(3)}))
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["000002"]
    assert kept.count == 3 and kept.size_bytes > 0


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (state(width=5), "kernel is float32[2, 4], expected float32[2, 5]"),
        (state(dtype="bfloat16"), "kernel is float32[2, 4], expected bfloat16[2, 4]"),
        (state()._replace(model_state={"m": np.zeros(2)}), "lacks model_state.m"),
        (state()._replace(opt_state=()), "has opt_state.0"),
    ],
)
def test_a_state_of_another_form_is_not_used(tmp_path, other, reason):
    kept = Checkpoints(tmp_path)
    kept.save(checkpoints.stack({0: state(), 1: state(5)}))
    expected = {0: trees.avals(other), 1: trees.avals(state())}
    found, wrong = checkpoints.unstack(kept.load(), expected)
    assert reason in wrong[0]
    same(found[1], state(5))


def test_a_state_is_of_its_own_lane():
    part = checkpoints.stack({0: state(), 1: state(5)})
    part["0"]["trial_id"] = part["0"]["trial_id"][::-1]
    expected = dict.fromkeys((0, 1), trees.avals(state()))
    found, wrong = checkpoints.unstack(part, expected)
    assert not found and wrong == dict.fromkeys((0, 1), "its checksum is wrong")
    short = checkpoints.stack({0: state(), 1: state(5)})
    short["0"]["state"] = jax.tree.map(lambda leaf: leaf[:1], short["0"]["state"])
    found, wrong = checkpoints.unstack(short, expected)
    assert found.keys() == {0} and wrong.keys() == {1}


@pytest.fixture(scope="module")
def whole(tiny_dataset):
    """A sweep that nothing interrupted."""
    return run(tiny_dataset, None)


@pytest.fixture
def checkpoint_always(monkeypatch):
    monkeypatch.setattr(driver, "EARLY_SECONDS", 0.0)
    monkeypatch.setattr(driver, "EARLY_SHARE", 1e9)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.write_bytes(content)


def largest(path):
    return max((p for p in path.rglob("*") if p.is_file()), key=os.path.getsize)


DAMAGES = {
    "checkpoint changed": lambda d: flip(largest(d / "checkpoints")),
    "checkpoint emptied": lambda d: largest(d / "checkpoints").write_bytes(b""),
    "checkpoint gone": lambda d: shutil.rmtree(d / "checkpoints"),
    "best changed": lambda d: flip(largest(d / "best")),
    "best gone": lambda d: shutil.rmtree(d / "best"),
    "half a checkpoint": lambda d: shutil.copytree(
        d / "checkpoints", d / "checkpoints" / "000099.orbax-checkpoint-tmp"
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
# What reads for Orbax goes on for a moment after an error.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_damage_costs_time_and_nothing_else(
    tiny_dataset, tmp_path, monkeypatch, checkpoint_always, whole, caplog, damage
):
    real = Store.save

    def save(self, states, best):
        real(self, states, best)
        self.wait()

    with monkeypatch.context() as patch:
        patch.setattr(Store, "save", save)
        crash_after(patch, 20)
        with pytest.raises(Crash):
            run(tiny_dataset, tmp_path)
    assert (tmp_path / "checkpoints").is_dir() and (tmp_path / "best").is_dir()
    DAMAGES[damage](tmp_path)
    with caplog.at_level(logging.WARNING, "jaxpack"):
        result = run(tiny_dataset, tmp_path)
    assert table(result) == table(whole)
    assert difference(result.best.params, whole.best.params) == 0
    if "changed" in damage or "emptied" in damage:
        assert "of no use" in caplog.text or "cannot be read" in caplog.text
    assert not list(tmp_path.glob("checkpoints/*"))


@pytest.mark.parametrize(
    ("file", "number"),
    [
        ("journal", errno.ENOSPC),
        ("checkpoint", errno.ENOSPC),
        ("sweep.json", errno.ENOSPC),
        ("journal", errno.EROFS),
    ],
)
def test_a_disk_that_cannot_be_written_loses_nothing(
    tiny_dataset, tmp_path, monkeypatch, checkpoint_always, whole, file, number
):
    count = 0

    def fail(real, after):
        def failing(*args, **kwargs):
            nonlocal count
            count += 1
            if count > after:
                raise OSError(number, os.strerror(number))
            return real(*args, **kwargs)

        return failing

    with monkeypatch.context() as patch:
        if file == "journal":
            patch.setattr(journal.os, "fsync", fail(os.fsync, 9))
        elif file == "checkpoint":
            patch.setattr(checkpoints, "write", fail(checkpoints.write, 1))
        else:
            patch.setattr(os, "replace", fail(os.replace, 0))
        with pytest.raises(OSError, match=r"cannot be written: .*(space|Read-only)"):
            run(tiny_dataset, tmp_path / "a")
    assert count
    result = run(tiny_dataset, tmp_path / "a")
    assert table(result) == table(whole)


def test_a_directory_that_cannot_be_made(tiny_dataset, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(OSError, match=r"cannot be written: .*Read-only"):
        run(tiny_dataset, tmp_path / "a")


def test_a_directory_without_its_head(tiny_dataset, tmp_path):
    written(tmp_path / "journal.jsonl")
    with pytest.raises(ValueError, match=r"has no sweep\.json beside it"):
        run(tiny_dataset, tmp_path)
    (tmp_path / "sweep.json").write_text('{"identity": ')
    with pytest.raises(ValueError, match=r"sweep\.json' is damaged"):
        run(tiny_dataset, tmp_path)
    (tmp_path / "sweep.json").write_text('{"seed": 0}')
    with pytest.raises(ValueError, match="incompatible version"):
        run(tiny_dataset, tmp_path)


@pytest.mark.parametrize("name", ["journal.jsonl", "checkpoints", "best"])
def test_what_is_left_of_another_sweep_is_not_taken_for_ones_own(tmp_path, name):
    if name == "journal.jsonl":
        written(tmp_path / "a.jsonl")
        (tmp_path / "a.jsonl").rename(tmp_path / name)
    else:
        Checkpoints(tmp_path / name).save(checkpoints.stack({0: state()}))
    with pytest.raises(ValueError, match=rf"{name}' has no sweep\.json beside it"):
        Store(tmp_path)
    anew = Store(tmp_path, overwrite=True)
    assert anew.asked == {} and not (tmp_path / name).exists()
    anew.close()
    (aside,) = tmp_path.parent.glob(f"{tmp_path.name}.*")
    assert (aside / name).exists()


def test_the_lock_is_held_until_nothing_is_written_any_more(tmp_path, monkeypatch):
    go, real = threading.Event(), checkpoints.write
    monkeypatch.setattr(
        checkpoints, "write", lambda *args: (go.wait(10), real(*args))[1]
    )
    store = Store(tmp_path)
    store.write(seed=0)
    store.save({0: state()}, {})
    store.close(wait=False)
    with pytest.raises(ValueError, match="is being written by"):
        Store(tmp_path)
    go.set()
    store.wait()
    for _ in range(1000):  # Until the lock is let go of.
        with contextlib.suppress(ValueError):
            Store(tmp_path).close()
            break
        time.sleep(0.01)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["000000"]
    Store(tmp_path).close()


def test_checkpoints_of_another_sweep_are_not_used(tmp_path, caplog):
    expected, mine, other = {0: trees.avals(state())}, tmp_path / "a", tmp_path / "b"
    for directory in (mine, other):
        with Store(directory) as store:
            store.write(seed=0)
            store.save({0: state()}, {0: state()})
    with Store(mine) as store:
        assert store.load(expected).keys() == store.load_best(expected).keys() == {0}
    for name in ("checkpoints", "best"):
        shutil.rmtree(mine / name)
        shutil.copytree(other / name, mine / name)
    with Store(mine) as store:
        assert not store.load(expected) and not store.load_best(expected)
    assert caplog.text.count("of no use: its checksum is wrong") == 2


def test_files_of_others_among_the_checkpoints_stay(tmp_path):
    kept = Checkpoints(tmp_path / "c")
    kept.save(checkpoints.stack({0: state(1)}))
    (tmp_path / "c" / ".nfs0001").touch()
    kept.save(checkpoints.stack({0: state(2)}))
    assert {path.name for path in (tmp_path / "c").iterdir()} == {".nfs0001", "000001"}


def test_nothing_names_another_place(tiny_dataset, tmp_path):
    run(tiny_dataset, tmp_path / "a")
    for path in (tmp_path / "a").rglob("*"):
        # Orbax leaves a note of where it wrote, which nothing reads.
        if path.is_file() and path.name != "commit_success.txt":
            assert str(tmp_path).encode() not in path.read_bytes(), path


# The lock.


def test_one_writer_at_a_time(tiny_dataset, tmp_path):
    held = lock.Lock(tmp_path)
    who = f"process {os.getpid()} on {socket.gethostname()}"
    with pytest.raises(ValueError, match=f"is being written by {who}"):
        run(tiny_dataset, tmp_path)
    held.release()
    held.release()
    lock.Lock(tmp_path).release()


HOLDS = """
import pathlib, sys, time
from jaxpack.lock import Lock
held = Lock(pathlib.Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def test_the_lock_of_a_process_that_was_killed(tmp_path, caplog):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match=f"process {holder.pid} on"):
            lock.Lock(tmp_path)
        holder.kill()
    lock.Lock(tmp_path).release()
    assert f"from process {holder.pid}" in caplog.text
    assert "which is gone" in caplog.text


def owned(directory, **changes):
    path = directory / "lock"
    path.touch()
    owner = lock._myself() | {"file": path.stat().st_ino}
    path.write_text(json.dumps(owner | changes))


def test_the_lock_of_another_host(tmp_path):
    owned(tmp_path, host="elsewhere", pid=1)
    with pytest.raises(ValueError, match=r"process 1 on elsewhere.*delete '.*lock'"):
        lock.Lock(tmp_path)
    # In a copy of the directory it is nobody's.
    copy = tmp_path / "copy"
    copy.mkdir()
    shutil.copy(tmp_path / "lock", copy / "lock")
    lock.Lock(copy).release()


def test_a_lock_whose_file_went_meanwhile_is_no_lock(tmp_path, monkeypatch):
    real, others = lock._try_lock, []

    def try_lock(file):
        if not others:  # Its holder has deleted it, and another has made a new one.
            (tmp_path / "lock").unlink()
            others.append(None)
            others.append(lock.Lock(tmp_path))
        return real(file)

    monkeypatch.setattr(lock, "_try_lock", try_lock)
    with pytest.raises(ValueError, match="is being written by"):
        lock.Lock(tmp_path)
    others[1].release()


def test_a_forked_process_does_not_keep_the_lock(tmp_path):
    held = lock.Lock(tmp_path)
    inherited = os.dup(held._file)  # As a process forked meanwhile has it.
    held.release()
    lock.Lock(tmp_path).release()
    os.close(inherited)


def test_where_the_system_has_no_locks(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "fcntl", None)
    owned(tmp_path)
    with pytest.raises(ValueError, match="is being written by process"):
        lock.Lock(tmp_path)
    owned(tmp_path, started=1)  # Its number has gone to another process.
    lock.Lock(tmp_path).release()


def test_a_refused_sweep_leaves_nothing(tiny_dataset, tmp_path):
    with pytest.raises(ValueError, match="engine is 'quick'"):
        run(tiny_dataset, tmp_path / "a", engine="quick")
    assert not list(tmp_path.glob("a/*"))
