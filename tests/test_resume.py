"""Going on with a sweep: after a kill, with more to do, and not with another's."""

from __future__ import annotations

import json
import logging
import shutil
import signal
import threading
import time

import jax
import numpy as np
import optax
import pytest
from reference import difference
from tiny import MLP, mlp_task, model, space

import jaxpack as jp
from jaxpack import bundle, driver, journal, pack, planner
from jaxpack.forecast import Forecast
from jaxpack.store import Store
from jaxpack.widths import Layout, Tail

ENGINES = ("packed", "solo")
STEPS = 69 * 4  # Hyperband(9), 4 steps an epoch
SCHEDULER = jp.Hyperband(9)


class Crash(BaseException):
    """Stands for a process that dies."""


def run(dataset, directory, scheduler=SCHEDULER, **options):
    options = {
        "workers": 1,
        "max_lanes": 4,
        "seed": 5,
        "engine": "packed",
        "progress": False,
    } | options
    task = options.pop("task", None) or mlp_task(dataset)
    dims = options.pop("space", None) or space()
    return jp.sweep(task, dims, scheduler, directory=directory, **options)


def table(result):
    """All that an interruption must not change."""
    return [
        (t.trial_id, t.status, t.score, t.history, t.bracket, t.rung, t.steps, t.reason)
        for t in result.trials
    ] + [(result.best.trial_id, result.best_score, result.best.steps)]


def crash_after(monkeypatch, lines):
    """Lets the process die when the journal has so many lines."""
    real, count = Store.append, 0

    def append(self, record):
        nonlocal count
        real(self, record)
        count += 1
        if count == lines:
            raise Crash

    monkeypatch.setattr(Store, "append", append)


@pytest.fixture(scope="module", params=ENGINES)
def whole(request, tiny_dataset):
    """A sweep that nothing interrupted, and its engine."""
    return run(tiny_dataset, None, engine=request.param), request.param


@pytest.mark.parametrize(
    ("often", "lines"),
    [
        pytest.param(True, 2, id="checkpoints-2"),
        pytest.param(False, 18, id="no checkpoint-18"),
        pytest.param(False, 2, id="no checkpoint-2", marks=pytest.mark.slow),
        pytest.param(True, 18, id="checkpoints-18", marks=pytest.mark.slow),
    ],
)
def test_a_crash_changes_nothing(
    tiny_dataset, tmp_path, monkeypatch, whole, lines, often
):
    uninterrupted, engine = whole
    if often:
        monkeypatch.setattr(driver, "EARLY_SECONDS", 0.0)
        monkeypatch.setattr(driver, "EARLY_SHARE", 1e9)
    with monkeypatch.context() as patch:
        crash_after(patch, lines)
        with pytest.raises(Crash):
            run(tiny_dataset, tmp_path / "a", engine=engine)
    shutil.move(tmp_path / "a", tmp_path / "elsewhere")
    result = run(tiny_dataset, tmp_path / "elsewhere", engine=engine)
    assert table(result) == table(uninterrupted)
    assert difference(result.best.params, uninterrupted.best.params) == 0
    assert 0 < result.stats.lane_steps < STEPS + 9 * 4


def test_a_complete_sweep_trains_nothing_again(tiny_dataset, tmp_path):
    first = run(tiny_dataset, tmp_path, keep=3)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json*")}
    again = run(tiny_dataset, tmp_path, keep=3)
    assert table(again) == table(first)
    assert again.stats.lane_steps == again.stats.swaps == again.stats.compiles == 0
    for a, b in zip(first.incumbents, again.incumbents, strict=True):
        assert (a.trial_id, a.score, a.steps) == (b.trial_id, b.score, b.steps)
        for field in ("params", "model_state", "opt_state", "key"):
            tree = getattr(a, field)
            assert jax.tree.structure(tree) == jax.tree.structure(getattr(b, field))
            assert difference(tree, getattr(b, field)) == 0
    assert all(path.stat().st_mtime_ns == time for path, time in files.items())
    assert not (tmp_path / "checkpoints").exists()
    # More of the best than were kept: those are trained again.
    more = run(tiny_dataset, tmp_path, keep=4)
    assert len(more.incumbents) == 4 and more.stats.lane_steps > 0
    assert table(more) == table(first)
    assert more.incumbents[3].params is not None


@pytest.mark.parametrize(
    ("fewer", "more"),
    [
        (jp.Hyperband(3), jp.Hyperband(3, repeats=3)),
        (jp.RandomSearch(3, 2), jp.RandomSearch(7, 2)),
    ],
)
def test_more_trials_come_after_the_old(tiny_dataset, tmp_path, fewer, more):
    first = run(tiny_dataset, tmp_path, fewer)
    grown = run(tiny_dataset, tmp_path, more)
    at_once = run(tiny_dataset, None, more)
    assert table(grown) == table(at_once)
    assert grown.stats.lane_steps == at_once.stats.lane_steps - first.stats.lane_steps
    with pytest.raises(ValueError, match=r"scheduler\.\w+ was (3|7), is [13]"):
        run(tiny_dataset, tmp_path, fewer)


def test_limits_end_a_part_of_a_sweep(tiny_dataset, tmp_path, whole):
    uninterrupted, engine = whole
    options = {"engine": engine}
    first = run(tiny_dataset, tmp_path, max_seconds=1e-6, **options)
    assert first.stopped == "max_seconds"
    second = run(tiny_dataset, tmp_path, target=0.5, **options)
    assert second.stopped == "target" and second.best_score >= 0.5
    third = run(tiny_dataset, tmp_path, target=0.5, **options)
    assert third.stopped == "target" and third.stats.lane_steps == 0
    last = run(tiny_dataset, tmp_path, max_seconds=1000, **options)
    assert last.stopped is None and table(last) == table(uninterrupted)
    trained = [r.stats.lane_steps for r in (first, second, third, last)]
    assert sum(trained) == STEPS  # Nothing twice.


def changed_task(dataset, **options):
    def other(hp):
        return optax.sgd(hp.learning_rate, momentum=0.8)

    return jp.Task(model, other, dataset, **({"batch_size": 16} | options))


def renamed_task(dataset):
    """`mlp_task` in other words."""

    class Network(MLP):
        pass

    def build(hparams):  # A comment.
        rate = hparams.rate
        return Network(rate=rate, width=hparams.get("width", 16))

    return jp.Task(
        lambda hp: build(hp),
        lambda hp: optax.sgd(learning_rate=hp.learning_rate, momentum=0.9),
        dataset,
        batch_size=16,
    )


@pytest.fixture(scope="module")
def finished(tiny_dataset, tmp_path_factory):
    directory = tmp_path_factory.mktemp("finished")
    run(tiny_dataset, directory, jp.Hyperband(3))
    return directory


@pytest.mark.parametrize(
    ("options", "difference_named"),
    [
        ({"seed": 6}, "seed was 5, is 6"),
        ({"metric": "loss"}, "metric was 'accuracy', is 'loss'"),
        ({"mode": "min"}, "mode was 'max', is 'min'"),
        ({"engine": "solo"}, "engine was 'packed', is 'solo'"),
        ({"max_lanes": 8}, "max_lanes was 4, is 8"),
        ({"scheduler": jp.Hyperband(9)}, "scheduler.max_resource was 3, is 9"),
        ({"scheduler": jp.RandomSearch(3, 3)}, "kind was 'Hyperband', is 'RandomS"),
        ({"space": space(width=jp.choice(8, 16))}, r"space.width was None, is 'choice"),
        (
            {
                "space": jp.Space(
                    learning_rate=jp.log_uniform(1e-3, 1), rate=jp.uniform(0, 0.5)
                )
            },
            r"space.learning_rate was 'log_uniform\(0.001, 0.1\)', is 'log_uniform",
        ),
        (
            {"enqueue": [{"learning_rate": 0.01, "rate": 0.1}]},
            r"enqueue was \[\], is \[{",
        ),
    ],
)
def test_another_sweep_is_refused(tiny_dataset, finished, options, difference_named):
    options = {"scheduler": jp.Hyperband(3)} | options
    with pytest.raises(ValueError, match=f"(?s)another sweep.*{difference_named}"):
        run(tiny_dataset, finished, **options)


def test_another_task_is_refused_and_the_same_in_other_words_is_not(
    tiny_dataset, finished
):
    options = {"scheduler": jp.Hyperband(3)}
    with pytest.raises(ValueError, match=r"programs\.all\.fingerprint was '\w+', is"):
        run(tiny_dataset, finished, task=changed_task(tiny_dataset), **options)
    x, y = tiny_dataset.train
    other = jp.data.Dataset.from_arrays((x + 1, y), tiny_dataset.validation)
    with pytest.raises(ValueError, match="dataset was '"):
        run(other, finished, **options)
    same = jp.data.Dataset.from_arrays((x.copy(), y), tiny_dataset.validation)
    result = run(same, finished, task=renamed_task(same), **options)
    assert result.stats.lane_steps == 0


def test_an_incompatible_version_is_refused(tiny_dataset, finished, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(finished, copy)
    asked = json.loads((copy / "sweep.json").read_text())
    asked["identity"]["format"] = 0
    (copy / "sweep.json").write_text(json.dumps(asked))
    with pytest.raises(ValueError, match=r"incompatible version.*format is 0"):
        run(tiny_dataset, copy, jp.Hyperband(3))


def test_other_versions_that_compute_the_same_are_named(
    tiny_dataset, finished, tmp_path, caplog
):
    copy = tmp_path / "copy"
    shutil.copytree(finished, copy)
    asked = json.loads((copy / "sweep.json").read_text())
    asked["versions"]["jax"] = "0.1"
    asked["device"] = "abacus"
    (copy / "sweep.json").write_text(json.dumps(asked))
    run(tiny_dataset, copy, jp.Hyperband(3))
    assert "jax was '0.1', is" in caplog.text
    assert "device was 'abacus', is" in caplog.text
    with pytest.raises(ValueError, match=r"(?s)programs\..*\n  jax was '0.1', is"):
        run(tiny_dataset, copy, jp.Hyperband(3), task=changed_task(tiny_dataset))


def test_the_engine_and_width_on_record_are_obeyed(tiny_dataset, tmp_path, monkeypatch):
    first = run(tiny_dataset, None, engine="auto", max_lanes=None)
    with monkeypatch.context() as patch:
        crash_after(patch, 5)
        with pytest.raises(Crash):
            run(tiny_dataset, tmp_path, engine="auto", max_lanes=None)
    monkeypatch.setattr(planner, "TINY", 0)
    other = jp.explain(mlp_task(tiny_dataset), space(), SCHEDULER, workers=1)
    assert other.packs[0].spec.engine == "solo"
    result = run(tiny_dataset, tmp_path, engine="auto", max_lanes=None)
    assert result.plan.packs[0].spec == first.plan.packs[0].spec
    assert table(result) == table(first)


def test_a_tail_on_record_is_obeyed(tiny_dataset, tmp_path, monkeypatch):
    tail = Tail(9 * 4, "solo", 1)
    layout = Layout((4,), (tail,), Forecast(1.0, 0.9))
    with monkeypatch.context() as patch:
        patch.setattr(planner, "lay_out", lambda *_, **__: layout)
        first = run(tiny_dataset, None)
        crash_after(patch, 10)
        with pytest.raises(Crash):
            run(tiny_dataset, tmp_path)
    result = run(tiny_dataset, tmp_path)
    (mine,), (theirs,) = result.plan.packs, first.plan.packs
    assert mine.tail == theirs.tail and mine.tail[1].engine == "solo"
    assert table(result) == table(first)


def test_fused_packs_on_record_are_obeyed(tiny_dataset, tmp_path, monkeypatch):
    options = {"engine": "fused", "space": space(width=jp.choice(8, 16))}
    first = run(tiny_dataset, None, **options)
    assert len(first.plan.packs[0].fused) > 1
    with monkeypatch.context() as patch:
        crash_after(patch, 12)
        with pytest.raises(Crash):
            run(tiny_dataset, tmp_path, **options)
    # Left to itself, the planner would fuse otherwise for more workers.
    result = run(tiny_dataset, tmp_path, workers=3, **options)
    for mine, theirs in zip(result.plan.packs, first.plan.packs, strict=True):
        assert (mine.spec, mine.fused) == (theirs.spec, theirs.fused)
    assert table(result) == table(first)
    assert run(tiny_dataset, tmp_path, **options).stats.lane_steps == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_segment_and_can_be_gone_on_from(
    tiny_dataset, tmp_path, whole, number
):
    uninterrupted, engine = whole
    lines = []

    def interrupt(line):
        lines.append(line)
        if len(lines) == 12:
            signal.raise_signal(number)

    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt, match="the same call goes on from"):
        run(tiny_dataset, tmp_path, engine=engine, on_record=interrupt)
    assert signal.getsignal(number) is before
    kept = Store(tmp_path)
    kept.close()
    assert len(kept.records) == len(lines) >= 12
    result = run(tiny_dataset, tmp_path, engine=engine, on_record=lines.append)
    assert table(result) == table(uninterrupted) and len(lines) == 22
    steps_before = sum(
        {line["trial_id"]: line["steps"] for line in lines[:12]}.values()
    )
    assert result.stats.lane_steps <= STEPS - steps_before


def test_an_interrupt_after_the_last_reading_is_heeded(tiny_dataset, tmp_path):
    lines, search = [], jp.RandomSearch(2, 1)

    def interrupt(line):
        lines.append(line)
        if len(lines) == 2:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt, match="ended by SIGTERM; the same call"):
        run(tiny_dataset, tmp_path, search, on_record=interrupt)
    result = run(tiny_dataset, tmp_path, search)
    assert result.stats.lane_steps == 0 and result.best.params is not None


def test_an_interrupt_without_a_directory(tiny_dataset):
    lines = []

    def interrupt(line):
        lines.append(line)
        if len(lines) == 3:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt, match="nothing of the sweep is kept"):
        run(tiny_dataset, None, on_record=interrupt)


def test_a_second_interrupt_ends_at_once(tiny_dataset, tmp_path):
    def interrupt(_):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match="at once"):
        run(tiny_dataset, tmp_path, on_record=interrupt)
    assert signal.getsignal(signal.SIGINT) is before
    assert run(tiny_dataset, tmp_path).best_score > 0.5


def test_an_ignored_signal_stays_ignored(tiny_dataset):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        result = run(
            tiny_dataset,
            None,
            jp.RandomSearch(2, 1),
            on_record=lambda _: signal.raise_signal(signal.SIGINT),
        )
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(result.history) == 2


def test_a_thread_has_no_handlers(tiny_dataset):
    before, during, results = signal.getsignal(signal.SIGINT), [], []

    def target():
        results.append(
            run(
                tiny_dataset,
                None,
                jp.RandomSearch(2, 1),
                on_record=lambda _: during.append(signal.getsignal(signal.SIGINT)),
            )
        )

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    assert during == [before, before] and len(results) == 1


def test_trials_that_failed_stay_failed(tiny_dataset, tmp_path):
    half = jp.Space(learning_rate=jp.choice(1e30, 0.05), rate=jp.uniform(0, 0.5))
    options = {"space": half, "engine": "packed"}
    first = run(tiny_dataset, tmp_path, **options)
    again = run(tiny_dataset, tmp_path, **options)
    assert again.stats.lane_steps == 0
    for a, b in zip(first.trials, again.trials, strict=True):
        assert (a.status, a.reason, a.first_bad_step) == (
            b.status,
            b.reason,
            b.first_bad_step,
        )
        # NaN is not equal to itself.
        np.testing.assert_equal(list(a.history), list(b.history))
    assert any(t.first_bad_step is not None for t in again.trials)


def test_running_lanes_are_part_of_a_checkpoint(
    tiny_dataset, tmp_path, monkeypatch, whole
):
    """A crash within a rung loses no more than what came after the checkpoint."""
    uninterrupted, engine = whole
    monkeypatch.setattr(pack, "FIRST_SEGMENT", 3)
    monkeypatch.setattr(pack, "SEGMENT_SECONDS", 0.0)
    monkeypatch.setattr(driver, "TICK_SECONDS", 0.001)
    advance = bundle.Bundle.advance
    monkeypatch.setattr(
        bundle.Bundle, "advance", lambda p: time.sleep(0.01) or advance(p)
    )
    real, saved = Store.save, []

    def save(self, states, best):
        real(self, states, best)
        saved.append({i: int(state.step) for i, state in states.items()})
        self.wait()
        if any(step % 4 for step in saved[-1].values()) and len(saved) > 1:
            raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(Store, "save", save)
        with pytest.raises(Crash):
            run(tiny_dataset, tmp_path, engine=engine, checkpoint_seconds=1e-9)
    left = Store(tmp_path)
    left.close()
    result = run(tiny_dataset, tmp_path, engine=engine)
    assert table(result) == table(uninterrupted)
    final = {t.trial_id: t.steps for t in result.trials}
    done = {r["trial_id"]: r["steps"] for r in left.records}
    # What is on disk of each trial: its checkpoint, or all if it trains no further.
    had = {i: final[i] if done.get(i) == final[i] else 0 for i in final} | saved[-1]
    assert result.stats.lane_steps <= sum(final[i] - had[i] for i in final)


def test_lost_weights_of_the_best_are_trained_again(
    tiny_dataset, tmp_path, whole, caplog
):
    uninterrupted, engine = whole
    run(tiny_dataset, tmp_path, engine=engine)
    shutil.rmtree(tmp_path / "best")
    with caplog.at_level(logging.WARNING, "jaxpack"):
        result = run(tiny_dataset, tmp_path, engine=engine)
    assert "are lost: they are trained again" in caplog.text
    assert table(result) == table(uninterrupted)
    assert difference(result.best.params, uninterrupted.best.params) == 0
    assert result.stats.lane_steps == uninterrupted.best.steps
    assert run(tiny_dataset, tmp_path, engine=engine).stats.lane_steps == 0


def test_the_journal_can_be_read_by_itself(finished):
    records = journal.read(finished / "journal.jsonl")
    assert len(records) == 6 and {"trial_id", "rung", "score"} <= set(records[0])
