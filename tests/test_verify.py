"""Trials of a sweep come to the same score when they are trained again, alone."""

from __future__ import annotations

import dataclasses

import pytest
from tiny import MLP, mlp_task, optimizer, space

import jaxpack as jp
from jaxpack import resume
from jaxpack.verify import TOLERANCE, TOLERANCE_STEPS, _draw


@pytest.fixture(scope="module")
def swept(tiny_dataset, tmp_path_factory):
    """A sweep of single trials, with its directory."""
    return jp.sweep(
        mlp_task(tiny_dataset),
        space(),
        jp.Hyperband(3),
        seed=4,
        engine="solo",
        workers=1,
        directory=tmp_path_factory.mktemp("verify") / "a",
        progress=False,
    )


def test_single_trials_are_equal_to_the_bit(swept, tiny_dataset):
    found = jp.verify(swept, k=9, workers=1)
    assert found.ok and [check.trial_id for check in found.checks] == [0, 1, 2, 3, 4]
    for check, trial in zip(found.checks, swept.trials, strict=True):
        assert check.recorded == check.alone == trial.score
        assert (check.tolerance, check.difference, check.loss_difference) == (0, 0, 0)
        assert (check.engine, check.steps) == ("solo", trial.steps)
    assert str(found).count("ok: to the bit") == 5
    loaded = jp.load(swept.directory)
    again = jp.verify(loaded, k=9, task=mlp_task(tiny_dataset), workers=1)
    assert again == found


def test_packed_trials_are_equal_within_the_tolerance(swept_directory, tiny_dataset):
    _, result = swept_directory
    found = jp.verify(result, k=4, workers=1)
    assert found.ok and len(found.checks) == 4
    statuses = {result.trials[check.trial_id].status for check in found.checks}
    assert statuses <= {"COMPLETE", "STOPPED"}
    for check in found.checks:
        begun = -(-check.steps // TOLERANCE_STEPS)
        assert check.engine == "packed" and check.tolerance >= TOLERANCE * begun
        assert "engine packed in the sweep" in check.note


def test_the_draw_is_by_seed(swept):
    draws = [[t.trial_id for t in _draw(swept, 3, seed)] for seed in range(8)]
    assert len({tuple(draw) for draw in draws}) > 2
    assert draws[0] == [t.trial_id for t in _draw(swept, 3, 0)]
    assert all(draw == sorted(set(draw)) and len(draw) == 3 for draw in draws)


def test_another_score_is_told(swept):
    trials = [
        dataclasses.replace(
            trial,
            history=(*trial.history[:-1], trial.history[-1] | {"accuracy": 0.0}),
        )
        for trial in swept.trials
    ]
    found = jp.verify(dataclasses.replace(swept, trials=trials), k=1, workers=1)
    (check,) = found.checks
    assert not found.ok and check.difference == check.alone > 0
    assert "NOT OK" in str(found)


def test_no_tolerance_to_the_bit_with_other_versions(swept, tiny_dataset, monkeypatch):
    others = resume.versions() | {"jax": "0.0.1"}
    monkeypatch.setattr(resume, "versions", lambda: others)
    loaded = jp.load(swept.directory)
    found = jp.verify(loaded, k=1, task=mlp_task(tiny_dataset), workers=1)
    assert found.checks[0].tolerance > 0 and "jax was" in found.checks[0].note


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("model", "it computes something else for all trials"),
        ("data", "its data have another content"),
    ],
)
def test_another_task_is_refused(swept, tiny_dataset, change, said):
    if change == "data":
        (x, y), validation = tiny_dataset.train, tiny_dataset.validation
        other = mlp_task(jp.data.Dataset.from_arrays((x + 1, y), validation))
    else:
        other = jp.Task(lambda hp: MLP(17, hp.rate), optimizer, tiny_dataset)
    for result in (swept, jp.load(swept.directory)):
        with pytest.raises(ValueError, match="task is not the one of the sweep") as got:
            jp.verify(result, k=1, task=other, workers=1)
        assert said in str(got.value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"k": 0}, "k is 0; it must be a whole number >= 1"),
        ({"k": True}, "k is True"),
        ({"seed": -1}, "seed is -1"),
        ({"task": 3}, "task is 3; make one with jaxpack.Task"),
    ],
)
def test_arguments_that_will_not_do(swept, arguments, said):
    with pytest.raises(ValueError, match=said):
        jp.verify(swept, **arguments)


def test_what_cannot_be_verified(swept):
    with pytest.raises(
        ValueError, match=r"give the\s+one that it was run with: verify"
    ):
        jp.verify(jp.load(swept.directory))
    nothing = dataclasses.replace(swept, trials=[])
    with pytest.raises(
        ValueError, match="no trial of the sweep is COMPLETE or STOPPED"
    ):
        jp.verify(nothing)
    with pytest.raises(ValueError, match="result is 'runs/a'; expected what"):
        jp.verify("runs/a")
