"""Sweeps over unlike architectures, whose trials have hparams of their own."""

from __future__ import annotations

import json
import math

import flax.linen as nn
import numpy as np
import optax
import pytest
from tiny import MLP

import jaxpack as jp
from jaxpack import planner, report
from jaxpack.groups import kinds_of_trials
from jaxpack.types import Trial

SPACE = jp.Space(
    jp.when(model="mlp")(width=jp.choice(4, 6), dropout=jp.uniform(0.0, 0.5)),
    jp.when(model="scaled")(scale=jp.uniform(0.5, 2.0), act=jp.choice("relu", "tanh")),
    model=jp.choice("mlp", "scaled"),
    learning_rate=jp.log_uniform(1e-2, 1e-1),
)


class Scaled(nn.Module):
    """A linear model of a scaled activation."""

    scale: float
    act: object

    @nn.compact
    def __call__(self, x):
        x = x.reshape(len(x), -1)
        return nn.Dense(10)(self.act(self.scale * x))


def model(hp):
    if hp.model == "mlp":
        return jp.models.MLP(width=hp.width, depth=1, dropout=hp.dropout)
    return Scaled(hp.scale, jp.switch(hp.act, {"relu": nn.relu, "tanh": nn.tanh}))


def optimizer(hp):
    return optax.sgd(hp.learning_rate, momentum=0.9)


@pytest.fixture(scope="module")
def task():
    return jp.Task(model, optimizer, jp.data.load("digits"), batch_size=128)


@pytest.mark.parametrize("engine", ["packed", "solo"])
def test_every_trial_of_a_mixed_sweep_equals_the_trial_alone(task, engine, tmp_path):
    scheduler = jp.Hyperband(3)
    result = jp.sweep(
        task, SPACE, scheduler, engine=engine, directory=tmp_path, progress=False
    )
    assert {trial.hparams.model for trial in result.trials} == {"mlp", "scaled"}
    keys = [dict(pack.key) for pack in result.plan.packs]
    assert {"model": "scaled"} in keys and all("model" in key for key in keys)
    alone = jp.train(
        task,
        [trial.hparams for trial in result.trials],
        epochs=[trial.history[-1]["epochs"] for trial in result.trials],
        horizon=3,
        engine="solo",
    )
    for trial, one in zip(result.trials, alone, strict=True):
        assert trial.score == pytest.approx(one.score, abs=5e-3)
        assert trial.history[-1]["loss"] == pytest.approx(
            one.history[-1]["loss"], abs=1e-4
        )
    frame = result.to_pandas()
    scaled = frame["hparams_model"] == "scaled"
    assert frame["hparams_width"].isna().tolist() == scaled.tolist()
    assert frame["hparams_act"].isna().tolist() == (~scaled).tolist()
    assert frame["hparams_learning_rate"].notna().all()
    written = json.loads((tmp_path / "sweep.json").read_text())
    assert written["space"] == SPACE.describe()
    lines = (tmp_path / "journal.jsonl").read_text().splitlines()
    for line in map(json.loads, lines):
        assert SPACE.check(line["hparams"]) == line["hparams"]


def test_the_findings_of_all_families_make_one(task):
    plan = jp.explain(task, SPACE, jp.RandomSearch(12, 1))
    assert {f.name: f.per_lane for f in plan.findings} == {
        "model": False,
        "learning_rate": True,
        "width": False,
        "dropout": True,
        "scale": True,
        "act": True,
    }
    reasons = {f.name: f.reason for f in plan.findings}
    assert "string is needed" in reasons["model"]
    assert "never used" not in reasons.values()
    assert len(plan.packs) == 3  # Two widths, and the others together.


def test_one_name_may_mean_unlike_things(task):
    """An int to one family and a float to the other, with nothing else to tell them."""
    space = jp.Space(
        jp.when(kind=0)(scale=jp.choice(1, 2)),
        jp.when(kind=1)(scale=jp.uniform(0.5, 0.9)),
        kind=jp.choice(0, 1),
        learning_rate=0.1,
    )

    def model(hp):
        return Scaled(hp.scale, nn.relu)

    mixed = jp.Task(model, optimizer, task.dataset, batch_size=128)
    with pytest.warns(UserWarning, match="kind is never used"):
        plan = jp.explain(mixed, space, jp.RandomSearch(6, 1))
    dtypes = {
        lane.dtype
        for pack in plan.packs
        for lane in pack.spec.program.lane_hparams
        if lane.name == "scale"
    }
    assert dtypes == {"int32", "float32"}
    assert sorted(i for pack in plan.packs for i in pack.trial_ids) == list(range(6))


def given(*trials):
    shared = {"learning_rate": 0.05}
    mlp = {"model": "mlp", "width": 4, "dropout": 0.1}
    scaled = {"model": "scaled", "scale": 1.5, "act": "relu"}
    return [
        shared | {"mlp": mlp, "scaled": scaled}[name] | more for name, more in trials
    ]


def test_trials_of_unlike_hparams_train_together(task):
    trials = given(
        ("mlp", {}), ("scaled", {}), ("mlp", {"dropout": 0.3}), ("scaled", {})
    )
    results = jp.train(task, trials, epochs=1)
    assert [result.status for result in results] == ["COMPLETE"] * 4
    for i in (1, 2):
        # The trial's number is part of its key, so it is given again here.
        (one,) = jp.train(task, [trials[i] | {"seed": i}], epochs=1)
        loss = one.history[-1]["loss"]
        assert results[i].history[-1]["loss"] == pytest.approx(loss, 1e-4)


def test_only_what_depends_on_a_value_fails_a_trial(task):
    trials = given(("mlp", {}), ("mlp", {"width": -1}), ("scaled", {}))
    statuses = [result.status for result in jp.train(task, trials, steps=1)]
    assert statuses == ["COMPLETE", "FAILED", "COMPLETE"]


def test_what_fails_a_whole_architecture_is_raised(task):
    for trials, name in [
        (given(("mlp", {}), ("scaled", {"act": "rleu"})), "model='scaled'"),
        (
            [*given(("mlp", {})), {"model": "mlp", "learning_rate": 0.1, "widht": 8}],
            "widht",
        ),
    ]:
        with pytest.raises((ValueError, AttributeError, KeyError)) as raised:
            jp.train(task, trials, steps=1)
        (note,) = [n for n in raised.value.__notes__ if "All trials with" in n]
        assert name in note and "trial 1" in note


def test_what_an_hparam_does_to_one_model_says_nothing_of_another(tiny_dataset):
    """A condition whose error is caught is found in each architecture."""

    def model(hp):
        if hp.model == "plain":
            return MLP(width=4)
        try:
            wide = bool(hp.rate > 0.5)
        except Exception:
            wide = True
        return MLP(width=4, rate=0.3 if wide else 0.0)

    mixed = jp.Task(model, lambda hp: optax.sgd(0.1), tiny_dataset)
    trials = [
        Trial(i, jp.HParams({"model": name, "rate": rate}))
        for i, (name, rate) in enumerate([("plain", 0.4), ("odd", 0.6), ("odd", 0.4)])
    ]
    plan = planner.plan(mixed, trials, kinds_of_trials(trials), [4] * 3)
    assert not {f.name: f.per_lane for f in plan.findings}["rate"]
    assert len(plan.packs) == 3


def test_tables_show_trials_without_an_hparam():
    trials = [
        jp.TrialResult(
            i,
            jp.HParams(hp),
            "COMPLETE",
            0.5,
            ({"steps": 1, "epochs": 1, "loss": loss},),
        )
        for i, (hp, loss) in enumerate(
            [({"a": 1, "b": "x"}, 0.1), ({"a": 2}, 0.2), ({"a": 3, "c": 8}, 0.3)]
        )
    ]
    frame = report.to_pandas(trials, "loss")
    assert frame["hparams_c"].dtype == np.float64
    assert math.isnan(frame["hparams_c"][0]) and frame["hparams_c"][2] == 8
    assert frame["hparams_b"].isna().tolist() == [False, True, True]
    table = report.trials_table(trials, "loss", "min")
    cells = {c.header: list(c.cells) for c in table.columns}
    assert cells["b"] == ["x", "-", "-"] and cells["c"] == ["-", "-", "8"]
    narrow = report.trials_table(trials, "loss", "min", narrow=True)
    assert list(narrow.columns[-1].cells) == ["a=1 b=x", "a=2", "a=3 c=8"]
