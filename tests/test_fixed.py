"""Trials that are given: lists, grids, and many seeds of one configuration."""

from __future__ import annotations

import math

import numpy as np
import pytest
from reference import difference
from tiny import mlp_task

import jaxpack as jp
from jaxpack.fixed import Fixed
from jaxpack.types import FAILED

GRID = jp.grid(learning_rate=[0.1, 0.01], rate=0.0, seed=[3, 4, 5])


def test_a_grid_is_every_combination_in_order():
    assert [(hp["learning_rate"], hp["seed"]) for hp in GRID] == [
        (0.1, 3),
        (0.1, 4),
        (0.1, 5),
        (0.01, 3),
        (0.01, 4),
        (0.01, 5),
    ]
    assert jp.grid(act=("relu", "tanh"), n=range(2))[-1] == {"act": "tanh", "n": 1}
    assert type(jp.grid(n=np.int64(3))[0]["n"]) is int


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"width": []}, "width is an empty list"),
        ({}, "has no hparams"),
        ({"items": [1]}, "'items' cannot name an hparam"),
        ({"rate": [math.nan]}, "nan"),
    ],
)
def test_bad_grids_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        jp.grid(**values)


def test_a_sweep_tries_a_list_in_its_order(tiny_dataset):
    task = mlp_task(tiny_dataset)
    halving = jp.SuccessiveHalving(num_trials=6, max_resource=3, reduction_factor=3)
    result = jp.sweep(task, GRID, halving, seed=2, progress=False)
    assert [dict(trial.hparams) for trial in result.trials] == GRID
    assert len(result.plan.packs) == 1
    best = result.best
    (alone,) = jp.train(task, [best.hparams], steps=best.steps, horizon=12, seed=2)
    assert difference(alone.params, best.params) < 1e-5
    assert jp.explain(task, GRID, halving).packs


def test_a_list_may_hold_unlike_and_equal_trials(tiny_dataset):
    trials = [
        {"learning_rate": 0.1, "rate": 0.0},
        {"learning_rate": 0.1, "rate": 0.0},
        {"learning_rate": 0.1, "rate": 0.0, "width": 8},
    ]
    search = jp.RandomSearch(3, max_resource=1)
    result = jp.sweep(mlp_task(tiny_dataset), trials, search, progress=False)
    first, second, narrow = result.trials
    assert first.score is not None and "width" not in first.hparams
    assert narrow.hparams.width == 8
    assert first.history[-1]["loss"] != second.history[-1]["loss"]


def test_lists_that_do_not_fit_are_refused(tiny_dataset):
    task = mlp_task(tiny_dataset)
    for search in (jp.RandomSearch(7, 1), jp.RandomSearch(5, 1)):
        with pytest.raises(ValueError, match="space has 6 trials and the scheduler"):
            jp.sweep(task, GRID, search, progress=False)
    with pytest.raises(ValueError, match=r"space\[0\] is 3; it must map"):
        jp.sweep(task, [3], jp.RandomSearch(1, 1), progress=False)
    with pytest.raises(ValueError, match="space is an empty list"):
        jp.sweep(task, [], jp.RandomSearch(1, 1), progress=False)
    with pytest.raises(ValueError, match="space is 'grid'; make one with"):
        jp.sweep(task, "grid", jp.RandomSearch(1, 1), progress=False)
    with pytest.raises(ValueError, match="none of the given"):
        Fixed(GRID).check({"learning_rate": 0.5, "rate": 0.0, "seed": 3})


def test_a_sweep_of_a_list_can_be_loaded_and_gone_on_with(tiny_dataset, tmp_path):
    task, search = mlp_task(tiny_dataset), jp.RandomSearch(6, 2)
    jp.sweep(task, GRID, search, directory=tmp_path, max_seconds=1e-3, progress=False)
    result = jp.sweep(task, GRID, search, directory=tmp_path, progress=False)
    assert all(trial.status == "COMPLETE" for trial in result.trials)
    assert jp.load(tmp_path).by_configuration().equals(result.by_configuration())
    other = [dict(hp, learning_rate=0.2) for hp in GRID]
    with pytest.raises(ValueError, match="holds another sweep"):
        jp.sweep(task, other, search, directory=tmp_path, progress=False)


def test_seeds_differ_and_are_summed_up(tiny_dataset):
    trials = [*GRID, {"learning_rate": 1e30, "rate": 0.0, "seed": 3}]
    results = jp.train(mlp_task(tiny_dataset), trials, epochs=2, metric="loss")
    assert results[-1].status == FAILED
    losses = np.array([trial.score for trial in results[:6]]).reshape(2, 3)
    assert len(np.unique(losses)) == 6
    table = jp.by_configuration(results, mode="min")
    order = np.argsort(losses.mean(1))
    assert list(table["hparams_learning_rate"][:2]) == [[0.1, 0.01][i] for i in order]
    assert np.allclose(table["mean"][:2], losses.mean(1)[order])
    assert np.allclose(table["std"][:2], losses.std(1, ddof=1)[order])
    assert list(table["count"]) == [3, 3, 0] and list(table["failed"]) == [0, 0, 1]
    assert "hparams_seed" not in table and math.isnan(table["mean"][2])
    backwards = jp.by_configuration(results, mode="max")
    assert list(backwards["hparams_learning_rate"][:2]) == [
        [0.1, 0.01][i] for i in order[::-1]
    ]
