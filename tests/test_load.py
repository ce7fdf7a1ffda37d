"""Reading a sweep back from its directory."""

from __future__ import annotations

import dataclasses
import json
import shutil

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import jaxpack as jp
from jaxpack import records
from jaxpack.types import TrialResult

FIELDS = [
    field.name
    for field in dataclasses.fields(TrialResult)
    if field.name not in ("history", "params", "model_state", "opt_state", "key")
]


@pytest.fixture
def directory(swept_directory, tmp_path):
    """A copy of the sweep's directory, somewhere else."""
    return shutil.copytree(swept_directory[0], tmp_path / "moved")


def edit(directory, change):
    path = directory / "sweep.json"
    asked = json.loads(path.read_text())
    change(asked)
    path.write_text(json.dumps(asked))


def keep_lines(directory, n):
    path = directory / "journal.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:n]))


def same(ours, theirs):
    """Whether two rows agree; what is not finite becomes NaN on disk."""
    assert list(ours) == list(theirs)
    for name, value in ours.items():
        assert theirs[name] == value or not (
            np.isfinite(value) or np.isfinite(theirs[name])
        )


def test_all_is_as_it_was(swept_directory, directory):
    _, result = swept_directory
    loaded = jp.load(directory)
    assert len(loaded.trials) == len(result.trials)
    for ours, theirs in zip(result.trials, loaded.trials, strict=True):
        for name in FIELDS:
            value = getattr(ours, name)
            if name in ("seconds", "score"):
                value = pytest.approx(value, abs=1e-6, nan_ok=True)
            assert getattr(theirs, name) == value, name
        for a, b in zip(ours.history, theirs.history, strict=True):
            same(a, b)
    for a, b in zip(result.history, loaded.history, strict=True):
        same(a, b)
    for name in ("metric", "mode", "unit", "stopped", "test_metrics", "dims"):
        assert getattr(loaded, name) == getattr(result, name), name
    assert loaded.ended and loaded.plan is None and loaded.directory == directory
    best = loaded.best
    assert (best.trial_id, best.score, best.steps) == (
        result.best.trial_id,
        result.best.score,
        result.best.steps,
    )
    jax.tree.map(np.testing.assert_array_equal, best.params, result.best.params)
    assert loaded.stats.lane_epochs == result.stats.lane_epochs
    assert [t.trial_id for t in loaded.top(3)] == [t.trial_id for t in result.top(3)]
    assert list(loaded.to_pandas().columns) == list(result.to_pandas().columns)
    assert loaded.plot(directory / "rungs.png").is_file()


def test_the_timeline_adds_up(swept_directory):
    _, result = swept_directory
    timeline, stats = jp.load(swept_directory[0]).stats.timeline, result.stats
    for name in ("train_seconds", "eval_seconds", "swap_seconds", "compile_seconds"):
        total = pytest.approx(getattr(stats, name), abs=1e-3)
        assert sum(timeline[name]) == total and getattr(stats, name) > 0
    assert sum(timeline["lane_steps"]) == pytest.approx(stats.lane_steps, abs=1e-2)
    done = sum(timeline["lane_steps"]) / sum(timeline["computed"])
    assert done == pytest.approx(stats.occupancy, abs=1e-3)


def test_a_running_sweep(swept_directory, directory):
    _, result = swept_directory
    edit(directory, lambda asked: asked.pop("outcome"))
    keep_lines(directory, 0)
    nothing = jp.load(directory)
    assert {t.status for t in nothing.trials} == {"RUNNING"} and not nothing.ended
    assert [t.hparams for t in nothing.trials] == [t.hparams for t in result.trials]
    assert [t.bracket for t in nothing.trials] == [t.bracket for t in result.trials]
    with pytest.raises(RuntimeError, match="no trial of this sweep has a finite score"):
        _ = nothing.best
    assert "17 trials" in repr(nothing)


@pytest.mark.parametrize("n", [1, 5, 12, 20])
def test_a_sweep_cut_off_after_some_readings(swept_directory, directory, n):
    _, result = swept_directory
    edit(directory, lambda asked: asked.pop("outcome"))
    shutil.copy(swept_directory[0] / "journal.jsonl", directory)
    keep_lines(directory, n)
    part = jp.load(directory)
    assert len(part.history) == min(n, len(result.history))
    read = {row["trial_id"] for row in part.history}
    for trial in part.trials:
        whole = result.trials[trial.trial_id]
        assert len(trial.history) <= len(whole.history)
        if trial.trial_id not in read:
            assert trial.status == "RUNNING" and trial.score is None
        elif trial.status in ("STOPPED", "COMPLETE", "FAILED"):
            assert trial.status == whole.status and trial.score == pytest.approx(
                whole.score, nan_ok=True
            )
    assert part.stats.lane_steps == sum(t.steps for t in part.trials)
    assert part.stats.packs and part.report().is_file()


def test_statuses_of_a_stopped_sweep(directory):
    # It ended early: what was running then can go on.
    edit(directory, lambda asked: asked["outcome"].update(stopped="max_seconds"))
    keep_lines(directory, 5)
    loaded = jp.load(directory)
    assert loaded.stopped == "max_seconds" and loaded.ended
    assert {t.status for t in loaded.trials} <= {"PAUSED", "FAILED"}


def test_a_line_that_is_being_written_is_left_out(swept_directory, directory):
    path = directory / "journal.jsonl"
    text = path.read_text()
    first = text.splitlines(keepends=True)[0]
    path.write_text(text + first + first[:40])
    assert len(jp.load(directory).history) == len(swept_directory[1].history)


def test_what_is_damaged_is_named(directory, tmp_path):
    with pytest.raises(ValueError, match=r"nowhere', which holds no sweep\.json"):
        jp.load(tmp_path / "nowhere")
    path = directory / "journal.jsonl"
    lines = path.read_text().splitlines()
    lines[2] = lines[2][:30]
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match=r"line 3 of .*journal\.jsonl' is damaged"):
        jp.load(directory)
    for text, message in (
        ("{", r"sweep\.json' is damaged"),
        ("[]", r"sweep\.json' holds no sweep"),
        ('{"seed": 0, "mode": "max"}', r"sweep\.json' lacks metric, brackets"),
    ):
        (directory / "sweep.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            jp.load(directory)
    with pytest.raises(ValueError, match="directory is 3; it must be a path"):
        jp.load(3)


def test_a_changed_digit_is_not_taken_for_a_score(directory):
    path = directory / "journal.jsonl"
    text = path.read_text()
    place = text.index('"score": 0.') + len('"score": 0.')
    path.write_text(text[:place] + str((int(text[place]) + 1) % 10) + text[place + 1 :])
    with pytest.raises(ValueError, match="its checksum is wrong"):
        jp.load(directory)


def test_sweeps_that_say_less(swept_directory, directory):
    # As written before `trials`, `dims`, `metrics` and `unit` were.
    def forget(asked):
        for name in ("trials", "dims", "metrics", "unit"):
            del asked[name]

    edit(directory, forget)
    loaded = jp.load(directory)
    assert len(loaded.trials) == 17 and loaded.dims == {}
    for a, b in zip(swept_directory[1].history, loaded.history, strict=True):
        same(a, b)
    assert loaded.report().is_file()


def test_weights_come_from_disk(swept_directory, directory):
    best = swept_directory[1].best

    def part(trial_id, params, step):
        state = {"params": params, "step": np.asarray(step, np.int32)}
        state["key"] = best.key
        return {"trial_id": np.asarray(trial_id, np.int32), "state": state}

    params = jax.tree.map(np.asarray, best.params)
    other = next(t.trial_id for t in swept_directory[1].trials if t.status == "STOPPED")
    tree = {
        str(best.trial_id): part(best.trial_id, params, best.steps),
        str(other): part(other, params, 1),  # Not from its best reading.
    }
    shutil.rmtree(directory / "best")
    (directory / "best").mkdir()
    saver = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    saver.save(directory / "best" / "000002", args=ocp.args.PyTreeSave(tree))
    loaded = jp.load(directory)
    assert [t.trial_id for t in loaded.incumbents] == [best.trial_id]
    jax.tree.map(np.testing.assert_array_equal, loaded.best.params, params)
    assert loaded.best.score == best.score
    # Without them, the rest is there.
    for file in (directory / "best" / "000002").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    damaged = jp.load(directory)
    assert damaged.best.params is None and damaged.best_score == best.score


@pytest.mark.parametrize(
    "dim",
    [
        jp.uniform(0, 1),
        jp.log_uniform(1e-5, 1, static=True),
        jp.integer(1, 9),
        jp.integer(1, 9, log=True),
        jp.choice("a", 2, None, True),
    ],
)
def test_dimensions_survive_json(dim):
    rows = json.loads(json.dumps(records.dim_rows({"x": dim})))
    assert records.dims_from(rows) == {"x": dim}
    assert records.dims_from({"y": {"kind": "unheard of"}, **rows}) == {"x": dim}


@pytest.mark.parametrize(
    "values, dim",
    [
        ([1, 2, 3], jp.integer(1, 3)),
        ([1, 200], jp.integer(1, 200, log=True)),
        ([0.5, 1], jp.uniform(0.5, 1)),
        ([1e-4, 1.0], jp.log_uniform(1e-4, 1.0)),
        ([0.0, 1.0], jp.uniform(0.0, 1.0)),
        (["b", "a", "b"], jp.choice("b", "a")),
        ([True, False], jp.choice(True, False)),
        ([1, None], jp.choice(1, None)),
    ],
)
def test_dimensions_are_told_from_values(values, dim):
    trials = [{"x": value} for value in values]
    assert records.dims_of(trials, {}) == {"x": dim}
    narrow = {"x": jp.uniform(7, 8)}  # Does not hold them.
    assert records.dims_of(trials, narrow) == {"x": dim}
