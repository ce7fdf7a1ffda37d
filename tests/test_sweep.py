"""`jaxpack.sweep`: the driver, end to end on a tiny task."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from reference import difference
from tiny import MLP, mlp_task, space

import jaxpack as jp

ENGINES = ("packed", "solo")
STEPS_PER_EPOCH = 4  # 50 examples in batches of 16


def run(task, space, scheduler, **options):
    options = {"workers": 1, "progress": False} | options
    return jp.sweep(task, space, scheduler, **options)


@pytest.fixture(scope="module", params=ENGINES)
def swept(request, tiny_dataset):
    """A whole Hyperband sweep and its task, by each engine."""
    task = mlp_task(tiny_dataset)
    result = run(
        task, space(), jp.Hyperband(9), engine=request.param, seed=5, max_lanes=4
    )
    return task, result, request.param


def test_every_trial_trains_to_its_rung_and_no_further(swept):
    _, result, _ = swept
    assert len(result.trials) == 17
    assert result.stats.lane_epochs == 69
    assert result.stats.lane_steps == 69 * STEPS_PER_EPOCH
    brackets = jp.Hyperband(9).brackets()
    for trial in result.trials:
        resources = [resource for _, resource in brackets[trial.bracket]]
        epochs = [row["epochs"] for row in trial.history]
        assert epochs == resources[: trial.rung + 1]
        assert trial.steps == epochs[-1] * STEPS_PER_EPOCH
        assert trial.status == ("COMPLETE" if epochs[-1] == 9 else "STOPPED")
    assert Counter(t.status for t in result.trials)["COMPLETE"] == 1 + 1 + 3


def test_promotion_keeps_the_best_of_each_rung(swept):
    _, result, _ = swept
    for index, bracket in enumerate(jp.Hyperband(9).brackets()):
        mine = [t for t in result.trials if t.bracket == index]
        for rung, (_, resource) in enumerate(bracket[:-1]):
            scores = {
                t.trial_id: row["accuracy"]
                for t in mine
                for row in t.history
                if row["epochs"] == resource
            }
            went_on = {t.trial_id for t in mine if t.rung > rung}
            assert went_on == set(jp.promote(scores, bracket[rung + 1][0], "max"))


def test_promoted_trials_equal_trials_trained_straight_through(swept):
    task, result, engine = swept
    straight = jp.train(
        task,
        [trial.hparams for trial in result.trials],
        epochs=[trial.history[-1]["epochs"] for trial in result.trials],
        horizon=9,
        engine=engine,
        seed=5,
        workers=1,
        max_lanes=4,
    )
    for trial, alone in zip(result.trials, straight, strict=True):
        assert trial.score == alone.score
        assert trial.history[-1]["loss"] == alone.history[-1]["loss"]
    promoted_twice = [t for t in result.trials if t.rung == 2]
    assert promoted_twice


def test_the_best_is_the_incumbent_with_its_weights(swept):
    task, result, _ = swept
    rows = [row for row in result.history if np.isfinite(row["accuracy"])]
    best = max(rows, key=lambda r: (r["accuracy"], r["steps"], -r["trial_id"]))
    assert result.best.trial_id == best["trial_id"]
    assert result.best_score == best["accuracy"]
    assert result.best.steps == best["steps"]
    assert result.best_hparams == result.trials[best["trial_id"]].hparams
    x, y = task.dataset.validation
    outputs = MLP().apply({"params": result.best.params, **result.best.model_state}, x)
    assert np.mean(np.argmax(outputs, -1) == y) == pytest.approx(result.best_score)
    top = result.top(3)
    assert top[0].trial_id == result.best.trial_id
    assert [t.score for t in top] == sorted((t.score for t in top), reverse=True)
    for name, ours in (("best_params", "best_hparams"), ("best_value", "best_score")):
        with pytest.raises(AttributeError, match=ours):
            getattr(result, name)


def test_the_table_of_a_sweep(swept):
    _, result, _ = swept
    frame = result.to_pandas()
    assert frame.index.name == "trial_id" and list(frame.index) == list(range(17))
    assert {"status", "score", "hparams_learning_rate", "loss"} <= set(frame.columns)


def test_a_sweep_again_compiles_nothing(tiny_dataset):
    events, listening = Counter(), True

    def count(event, duration, **details):
        if listening and event == "/jax/core/compile/backend_compile_duration":
            events[details.get("fun_name", "?")] += 1

    class Net(nn.Module):
        width: int
        rate: float

        @nn.compact
        def __call__(self, x, *, train: bool = False):
            x = nn.gelu(nn.Dense(self.width)(x))
            return nn.Dense(4)(nn.Dropout(self.rate, deterministic=not train)(x))

    def fresh_task():
        return jp.Task(
            lambda hp: Net(hp.width, hp.rate),
            lambda hp: optax.adamw(hp.learning_rate),
            tiny_dataset,
        )

    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        both = {"width": jp.choice(11, 13)}
        options = {"engine": "packed", "max_lanes": 4}
        first = run(fresh_task(), space(**both), jp.Hyperband(9), **options)
        compiled = dict(events)
        events.clear()
        second = run(fresh_task(), space(**both), jp.Hyperband(9), seed=9, **options)
    finally:
        listening = False  # A listener can be taken back in newer releases alone.
    names = {
        name.removeprefix("jit(").removesuffix(")"): n for name, n in compiled.items()
    }
    keys = len(first.plan.packs)
    assert keys == 2
    for name in ("init", "advance_packed", "evaluate", "put", "take"):
        assert 1 <= names[name] <= keys, (name, names)
        assert first.stats.compiles_by_name[name] == names[name]
    assert not events
    assert second.stats.compiles == 0
    assert second.best_hparams != first.best_hparams


@pytest.mark.parametrize("engine", ENGINES)
def test_an_all_failed_sweep_ends_cleanly(tiny_dataset, engine):
    lost = jp.Space(learning_rate=jp.uniform(1e30, 2e30), rate=jp.uniform(0, 0.5))
    result = run(mlp_task(tiny_dataset), lost, jp.Hyperband(9), engine=engine)
    assert {trial.status for trial in result.trials} == {"FAILED"}
    assert all(trial.first_bad_step is not None for trial in result.trials)
    assert result.stats.lane_epochs < 17
    with pytest.raises(RuntimeError, match="training loss was not finite at step"):
        _ = result.best
    assert result.top(3) == [] and len(result.to_pandas()) == 17


def test_half_of_the_trials_failing_starves_no_bracket(tiny_dataset):
    half = jp.Space(learning_rate=jp.choice(1e30, 0.05), rate=jp.uniform(0, 0.5))
    result = run(mlp_task(tiny_dataset), half, jp.Hyperband(9), engine="packed")
    failed = {t.trial_id for t in result.trials if t.hparams.learning_rate > 1}
    assert failed == {t.trial_id for t in result.trials if t.status == "FAILED"}
    assert 0 < len(failed) < 17
    for bracket in range(3):
        mine = [t for t in result.trials if t.bracket == bracket]
        assert any(t.status == "COMPLETE" for t in mine)


def test_a_minimised_metric_promotes_the_lowest(tiny_dataset):
    result = run(
        mlp_task(tiny_dataset), space(), jp.SuccessiveHalving(6, 3), metric="loss"
    )
    assert result.mode == "min"
    lowest = min(row["loss"] for row in result.history)
    assert result.best_score == lowest


def test_one_trial_that_cannot_be_built_fails_alone(tiny_dataset):
    def model(hp):
        if hp.width == 13:
            raise RuntimeError("no such width")
        return MLP(width=hp.width, rate=hp.rate)

    task = jp.Task(model, lambda hp: optax.sgd(hp.learning_rate), tiny_dataset)
    widths = space(width=jp.choice(8, 13))
    result = run(task, widths, jp.RandomSearch(6, 1), seed=1)
    failed = [trial for trial in result.trials if trial.status == "FAILED"]
    assert {trial.hparams.width for trial in failed} == {13}
    assert failed[0].reason == "RuntimeError: no such width"
    always = jp.Task(lambda hp: model({}), task.functions.optimizer, tiny_dataset)
    with pytest.raises(AttributeError, match="width"):
        run(always, widths, jp.RandomSearch(6, 1))


def test_enqueued_trials_come_first(tiny_dataset):
    first = {"learning_rate": 0.05, "rate": 0.25}
    task = mlp_task(tiny_dataset)
    result = run(task, space(), jp.RandomSearch(3, 1), enqueue=[first])
    plain = run(task, space(), jp.RandomSearch(3, 1))
    assert dict(result.trials[0].hparams) == first
    assert [t.hparams for t in result.trials[1:]] == [
        t.hparams for t in plain.trials[:2]
    ]
    with pytest.raises(ValueError, match="momentum"):
        run(task, space(), jp.RandomSearch(3, 1), enqueue=[{**first, "momentum": 1}])


@pytest.mark.parametrize(
    ("options", "why"),
    [({"max_seconds": 1e-6}, "max_seconds"), ({"target": 0.0}, "target")],
)
def test_limits_end_a_sweep_early(tiny_dataset, options, why):
    result = run(mlp_task(tiny_dataset), space(), jp.Hyperband(9), **options)
    assert result.stopped == why
    assert result.stats.lane_epochs < 69
    assert not {t.status for t in result.trials} & {"RUNNING"}


def test_the_directory_of_a_sweep(tiny_dataset, tmp_path):
    lines = []
    directory = tmp_path / "runs" / "a"
    options = {"directory": directory, "on_record": lines.append}
    task = mlp_task(tiny_dataset)
    result = run(task, space(), jp.Hyperband(3), **options)
    asked = json.loads((directory / "sweep.json").read_text())
    assert asked["seed"] == 0 and asked["metric"] == "accuracy"
    assert asked["dataset"]["content_hash"] == tiny_dataset.content_hash
    assert asked["outcome"]["best_score"] == result.best_score
    lines_on_disk = (directory / "journal.jsonl").read_text().splitlines()
    journal = [json.loads(line) for line in lines_on_disk]
    assert len(journal) == len(result.history) == len(lines) == 6
    for line, row in zip(journal, result.history, strict=True):
        assert line["score"] == row["accuracy"]
        assert line["hparams"] == dict(result.trials[line["trial_id"]].hparams)
        assert {k: line[k] for k in row} == row
    again = run(task, space(), jp.Hyperband(3), overwrite=True, **options)
    assert again.best_score == result.best_score
    assert len(list(directory.parent.iterdir())) == 2  # The old one stands aside.


def test_on_record_may_fail_without_harm(tiny_dataset):
    def fails(line):
        raise OSError("no network")

    with pytest.warns(UserWarning, match="on_record raised OSError: no network"):
        result = run(
            mlp_task(tiny_dataset), space(), jp.RandomSearch(3, 1), on_record=fails
        )
    assert len(result.history) == 3


def test_the_winner_meets_the_test_split_once_at_the_end(tiny_dataset):
    x, y = tiny_dataset.train
    shuffled = (y + 1) % 4  # A test split that no good model does well on.
    dataset = jp.data.Dataset.from_arrays(
        train=(x, y), validation=tiny_dataset.validation, test=(x, shuffled)
    )
    result = run(mlp_task(dataset), space(), jp.Hyperband(3))
    assert result.test_metrics["accuracy"] < 0.2 < 0.5 < result.best_score
    plain = run(mlp_task(tiny_dataset), space(), jp.Hyperband(3))
    assert plain.test_metrics is None
    assert [t.score for t in plain.trials] == [t.score for t in result.trials]


def test_two_workers_give_the_scores_of_one(tiny_dataset):
    widths = space(width=jp.choice(8, 16))
    one, two = (
        run(mlp_task(tiny_dataset), widths, jp.Hyperband(9), engine="solo", workers=n)
        for n in (1, 2)
    )
    assert [t.history for t in one.trials] == [t.history for t in two.trials]
    assert difference(one.best.params, two.best.params) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metric": "f1"}, "metric is 'f1'"),
        ({"seed": 2**32}, "seed is 4294967296"),
        ({"keep": 0}, "keep is 0"),
        ({"keep": True}, "keep is True"),
        ({"max_seconds": 0}, "max_seconds is 0; it must be a number above 0"),
        ({"max_seconds": True}, "max_seconds is True"),
        ({"max_seconds": "60"}, "max_seconds is '60'"),
        ({"target": float("nan")}, "target is nan; it must be a number"),
        ({"target": "0.9"}, "target is '0.9'"),
        ({"engine": "quick"}, "engine is 'quick'"),
        ({"max_lanes": 0}, "max_lanes is 0"),
        ({"workers": 2.0}, "workers is 2.0"),
        ({"policy": "best"}, "policy is 'best'; it must be 'none' or 'random'"),
        ({"policy": ["none"]}, r"policy is \['none'\]"),
        ({"mode": "up"}, "mode is 'up'; it must be 'min' or 'max'"),
        ({"overwrite": "no"}, "overwrite is 'no'; it must be True or False"),
        ({"progress": None}, "progress is None"),
        ({"on_record": "log.txt"}, "on_record is 'log.txt'; it must be a function"),
        ({"checkpoint_seconds": True}, "checkpoint_seconds is True"),
        ({"checkpoint_seconds": float("nan")}, "checkpoint_seconds is nan"),
        ({"directory": 3}, "directory is 3; it must be a path"),
        ({"directory": __file__}, "which is a file"),
        ({"enqueue": {"learning_rate": 0.01}}, "enqueue is of type dict; give a list"),
        ({"enqueue": [3]}, r"enqueue\[0\] is 3; it must map"),
        (
            {"enqueue": [{"learning_rate": 1.0, "rate": 0.1}]},
            r"learning_rate is 1.0; expected a value of log_uniform\(0.001, 0.1\)",
        ),
        ({"enqueue": [{"learning_rate": 0.01}]}, "lack rate"),
        (
            {"enqueue": [{"learning_rate": 0.01, "rate": r / 9} for r in range(4)] * 2},
            "enqueue has 8 trials, more than the 5",
        ),
        ({"space": {"rate": 0.1}}, "space is {'rate': 0.1}; make one with"),
        ({"space": space(batch_size=jp.choice(16, 64))}, "batch_size is 64, more than"),
        ({"scheduler": jp.Hyperband}, "scheduler is <class .*; make one with"),
        ({"scheduler": jp.RandomSearch(10**7, 1)}, "scheduler takes 10000000 trials"),
        ({"scheduler": jp.RandomSearch(1, 2**30)}, "steps; a trial can have"),
        ({"task": "mlp"}, "task is 'mlp'; make one with"),
    ],
)
def test_bad_arguments_are_named(tiny_dataset, tmp_path, options, message):
    (tmp_path / "sweep.json").write_text("{}")  # Of a sweep that is not to be moved.
    given = {
        "task": mlp_task(tiny_dataset),
        "space": space(),
        "scheduler": jp.Hyperband(3),
        "directory": tmp_path,
        "overwrite": True,
    } | options
    with pytest.raises(ValueError, match=message):
        run(given.pop("task"), given.pop("space"), given.pop("scheduler"), **given)
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.json"]


def test_a_space_of_fewer_trials_than_asked_for_is_tried_once(tiny_dataset):
    few = jp.Space(learning_rate=jp.choice(0.1, 0.05, 0.01), rate=0.3)
    result = run(mlp_task(tiny_dataset), few, jp.Hyperband(3), engine="solo")
    rates = [trial.hparams.learning_rate for trial in result.trials]
    assert sorted(rates) == [0.01, 0.05, 0.1]
    assert [trial.bracket for trial in result.trials] == [0, 0, 0]
    assert Counter(t.status for t in result.trials) == {"COMPLETE": 1, "STOPPED": 2}


PROGRAM = """
import json, sys
import numpy as np
sys.path.insert(0, {tests!r})
from tiny import mlp_task, space
from conftest import _blobs
import jaxpack as jp
data = jp.data.Dataset.from_arrays(
    train=_blobs(50, (8,), 1), validation=_blobs(23, (8,), 2)
)
result = jp.sweep(mlp_task(data), space(batch_size=jp.choice(8, 16)), jp.Hyperband(3),
                  engine="packed", workers=2, progress=False)
rows = [[t.trial_id, t.status, t.score, dict(t.hparams)] for t in result.trials]
print(json.dumps(rows))
"""


def test_two_processes_agree_whatever_their_hash_seed():
    tests = os.path.dirname(__file__)
    outputs = []
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM.format(tests=tests)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1]
    assert len(json.loads(outputs[0])) == 5
