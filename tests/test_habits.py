"""Names and arguments that people bring from other tools."""

from __future__ import annotations

import copy
import pickle

import pytest
from tiny import mlp_task, space

import jaxpack as jp

FIRST = {"learning_rate": 0.05, "rate": 0.25}


@pytest.fixture(scope="module")
def result(tiny_dataset):
    search = jp.RandomSearch(3, 1)
    return jp.sweep(mlp_task(tiny_dataset), space(), search, progress=False)


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("best_params", "best_hparams"),
        ("best_params_", "best_hparams"),
        ("get_best_hyperparameters", "best_hparams"),
        ("best_score_", "best_score"),
        ("best_trials", r"top\(k\)"),
        ("get_dataframe", r"to_pandas\(\)"),
        ("wings", "no attribute 'wings'$"),
    ],
)
def test_a_sweep_names_what_other_tools_call_otherwise(result, name, ours):
    with pytest.raises(AttributeError, match=ours):
        getattr(result, name)


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("config", "it is hparams here"),
        ("value", "it is score here"),
        ("number", "it is trial_id here"),
        ("state", "it is status"),
        ("metrics", r"it is history\[-1\] here"),
        ("wings", "no attribute 'wings'$"),
    ],
)
def test_a_trial_names_what_other_tools_call_otherwise(result, name, ours):
    with pytest.raises(AttributeError, match=ours):
        getattr(result.best, name)


def test_results_can_be_copied(result):
    best = result.best
    for other in (copy.copy(best), pickle.loads(pickle.dumps(best))):
        assert (other.trial_id, other.score) == (best.trial_id, best.score)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enqueue": FIRST}, "enqueue is of type dict; give a list"),
        ({"enqueue": [FIRST | {"rate": 0.9}]}, "rate"),
        ({"enqueue": [{"rate": 0.1}]}, "learning_rate"),
        ({"enqueue": [FIRST] * 4}, "enqueue has 4 trials"),
        ({"on_record": "wandb"}, "on_record is 'wandb'; it must be a function"),
        ({"max_seconds": 0}, "max_seconds"),
        ({"target": "high"}, "target"),
        ({"keep": 0}, "keep"),
    ],
)
def test_bad_arguments_are_refused_before_anything_runs(tiny_dataset, options, message):
    def never(hp):
        raise RuntimeError("it ran")

    task = jp.Task(never, never, tiny_dataset)
    with pytest.raises(ValueError, match=message):
        jp.sweep(task, space(), jp.RandomSearch(3, 1), progress=False, **options)


def test_the_best_of_a_sweep_is_enqueued_in_the_next(tiny_dataset, result):
    search = jp.RandomSearch(2, 1)
    again = jp.sweep(
        mlp_task(tiny_dataset),
        space(),
        search,
        seed=7,
        enqueue=result.top(1),
        progress=False,
    )
    assert again.trials[0].hparams == result.best_hparams
    assert again.trials[1].hparams != result.best_hparams
