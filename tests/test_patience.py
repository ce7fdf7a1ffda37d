"""Early stopping inside a trial."""

from __future__ import annotations

import numpy as np
import pytest
from reference import difference
from tiny import mlp_task

import jaxpack as jp

# The last learns nothing more after a while: its steps are too large.
TRIALS = [{"learning_rate": lr, "rate": 0.0} for lr in (0.001, 0.1, 0.5)]
OPTIONS = {"epochs": 12, "metric": "loss", "evaluate_every": 1, "seed": 3}


def train(dataset, trials=TRIALS, **more):
    return jp.train(mlp_task(dataset), trials, **(OPTIONS | more))


@pytest.mark.parametrize("engine", ["packed", "solo", "fused"])
def test_a_trial_stops_where_its_scores_do_not_get_better(tiny_dataset, engine):
    whole = train(tiny_dataset, engine=engine)
    early = train(tiny_dataset, engine=engine, patience=2)
    stopped = [trial.status == "STOPPED" for trial in early]
    assert any(stopped) and not all(stopped)
    for a, b in zip(whole, early, strict=True):
        losses = [row["loss"] for row in a.history]
        waits = (
            n for n in range(3, 13) if min(losses[n - 2 : n]) >= min(losses[: n - 2])
        )
        end = next(waits, 12)
        assert [row["loss"] for row in b.history] == losses[:end]
        assert (b.status == "STOPPED") == (end < 12)
        best = int(np.argmin(losses[:end]))
        assert b.score == losses[best] and b.steps == a.history[best]["steps"]


def test_it_is_returned_at_its_best_and_goes_on_from_there(tiny_dataset):
    early = train(tiny_dataset, engine="solo", patience=2)
    task = mlp_task(tiny_dataset)
    for i, trial in enumerate(early):
        x, y = tiny_dataset.validation
        logits = jp.predict(task, trial, x).astype(float)
        losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(y)), y]
        assert trial.score == pytest.approx(losses.mean(), rel=1e-4)
        (alone,) = jp.train(
            task, [TRIALS[i] | {"seed": i}], steps=trial.steps, horizon=48, seed=3
        )
        assert difference(trial.params, alone.params) < 1e-5
    stopped = next(trial for trial in early if trial.status == "STOPPED")
    (more,) = train(tiny_dataset, [stopped], seed=None, epochs=12)
    steps = [row["steps"] for row in more.history]
    assert steps == sorted(set(steps)) and steps[-1] == 48


def test_failed_trials_stay_failed(tiny_dataset):
    bad = {"learning_rate": 1e30, "rate": 0.0}
    _, failed = train(tiny_dataset, [TRIALS[0], bad], patience=3)
    assert failed.status == "FAILED" and failed.params is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patience": 0}, "patience is 0; it must be a whole number >= 1"),
        ({"patience": 2, "evaluate_every": None}, "give evaluate_every, too"),
    ],
)
def test_bad_arguments_are_refused(tiny_dataset, options, message):
    with pytest.raises(ValueError, match=message):
        train(tiny_dataset, **options)
