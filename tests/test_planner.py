"""The plan: engines by rule and by measurement, widths, the text of it."""

from __future__ import annotations

import jax
import pytest
from tiny import MLP, mlp_task, optimizer, space

import jaxpack as jp
from jaxpack import planner, tune
from jaxpack.forecast import Forecast, Work
from jaxpack.widths import ACCELERATOR, CPU, Layout, Load, Tail, lay_out


def packs(dataset, scheduler=None, more=None, **options):
    scheduler = scheduler or jp.RandomSearch(8, 4)
    plan = jp.explain(mlp_task(dataset), space(**(more or {})), scheduler, **options)
    return plan.packs


def test_tiny_models_are_packed_and_others_are_not(tiny_dataset):
    assert jax.devices()[0].platform == "cpu"
    (small,) = packs(tiny_dataset, workers=2)
    assert (small.spec.engine, small.spec.num_lanes) == ("packed", 4)
    (large,) = packs(tiny_dataset, more={"width": 10_000}, workers=2)
    assert small.flops < planner.TINY < large.flops
    assert (large.spec.engine, large.spec.num_lanes) == ("solo", 1)
    assert "solo" in large.reason


@pytest.mark.parametrize(
    ("trials", "workers", "max_lanes", "lanes"),
    [
        (8, 1, None, 8),
        (8, 2, None, 4),
        (5, 1, None, 8),
        (100, 2, None, 16),
        (8, 1, 3, 3),
    ],
)
def test_packs_are_no_wider_than_needed(
    tiny_dataset, trials, workers, max_lanes, lanes
):
    (pack,) = packs(
        tiny_dataset,
        jp.RandomSearch(trials, 1),
        engine="packed",
        workers=workers,
        max_lanes=max_lanes,
    )
    assert pack.spec.num_lanes == lanes


@pytest.mark.parametrize(
    ("solo", "packed", "engine"),
    [(1.0, 0.5, "packed"), (0.5, 1.0, "solo"), (0.95, 1.0, "packed")],
)
def test_the_fastest_engine_is_taken_where_work_is_long(
    tiny_dataset, monkeypatch, solo, packed, engine
):
    def measure(dataset, trials, candidates, devices):
        seconds = {"solo": solo * 1e-6, "packed": packed * 1e-6}
        return {members: seconds[members[0].engine] for members in candidates}

    monkeypatch.setattr(planner, "measure", measure)
    (short,) = packs(tiny_dataset)
    assert short.measured == ()
    monkeypatch.setattr(planner, "WORTH_MEASURING", 0.0)
    (pack,) = packs(tiny_dataset, jp.RandomSearch(8, 4000), workers=1)
    assert pack.spec.engine == engine
    assert dict(pack.measured) == {"solo x 1": solo, "packed x 8": packed}
    assert "by measurement" in pack.reason
    (asked,) = packs(tiny_dataset, engine="solo")
    assert asked.spec.engine == "solo" and asked.measured == ()


def test_unlike_models_are_measured_apart(tiny_dataset, monkeypatch):
    measured = []

    def measure(dataset, trials, candidates, devices):
        (trial,) = trials.values()
        measured.append(trial.hparams.model)
        return dict.fromkeys(candidates, 1e-6)

    monkeypatch.setattr(planner, "measure", measure)
    monkeypatch.setattr(planner, "WORTH_MEASURING", 0.0)

    def model(hp):  # Of one size, whichever it is.
        return MLP(hp.width, hp.rate) if hp.model == "a" else MLP(hp.width + 1, hp.rate)

    task = jp.Task(model, optimizer, tiny_dataset)
    mixed = space(model=jp.choice("a", "b"), width=jp.choice(14, 15))
    plan = jp.explain(task, mixed, jp.RandomSearch(16, 1), workers=1)
    assert len(plan.packs) == 4
    assert sorted(measured) == ["a", "b"]


def test_a_pack_that_cannot_be_kept_full_has_to_be_that_much_faster(
    tiny_dataset, monkeypatch
):
    def measure(dataset, trials, candidates, devices):
        return {members: faster[members[0].engine] for members in candidates}

    monkeypatch.setattr(planner, "measure", measure)
    monkeypatch.setattr(planner, "WORTH_MEASURING", 0.0)
    monkeypatch.setattr(planner, "TINY", 0)
    # A third of the steps are one trial's.
    halving = jp.SuccessiveHalving(9, 8100)
    for packed, engine in ((0.7e-6, "solo"), (0.1e-6, "packed")):
        faster = {"packed": packed, "solo": 1e-6}
        (pack,) = packs(tiny_dataset, halving, workers=1)
        assert pack.spec.engine == engine


def test_widths_are_those_that_lanes_pay_for():
    scheduler = jp.Hyperband(81)
    trials = tuple(range(scheduler.num_trials))
    work = Work(scheduler.brackets(), (45,) * len(trials))

    def lanes(flops, pace, workers, most=None, work=work, state=0):
        load = Load(trials, "packed", flops, state)
        found = lay_out([load], work, workers, pace, most or pace.lanes)
        return found.lanes[0], found.forecast.occupancy

    # On a CPU what a lane costs is nearly all: full lanes pay.
    width, occupancy = lanes(5e5, CPU, workers=2)
    assert width < 16 and occupancy > 0.7
    # Where it is next to nothing, so are empty lanes.
    assert lanes(1e4, ACCELERATOR, workers=1)[0] >= 64
    assert lanes(5e7, ACCELERATOR, workers=1)[0] < 64
    assert lanes(1e4, ACCELERATOR, workers=1, most=8)[0] == 8
    equal = Work.of([100] * len(trials))
    assert lanes(5e5, CPU, workers=2, work=equal) == (16, pytest.approx(0.99, abs=0.1))
    # Lanes whose states do not fit into the cache together are slower.
    assert lanes(3e6, CPU, workers=2, work=equal, state=30_000)[0] == 16
    assert lanes(3e6, CPU, workers=2, work=equal, state=200_000)[0] == 4


def test_a_tail_has_to_repay_its_compilation():
    scheduler = jp.Hyperband(243)
    trials = tuple(range(scheduler.num_trials))
    load = Load(trials, "packed", 5e5)

    def tail(steps, load=load):
        work = Work(scheduler.brackets(), (steps,) * len(trials))
        return lay_out([load], work, 2, CPU, 16).tails[0]

    assert tail(45) is None
    steps, engine, lanes = tail(1500)
    assert steps % 1500 == 0 and 1500 < steps <= 243 * 1500
    assert lanes < 16 and engine == ("packed" if lanes > 1 else "solo")
    solo = Load(trials, "solo", 5e5)
    assert tail(1500, solo) is None


@pytest.mark.parametrize("engine, lanes", [("solo", 1), ("packed", 2)])
def test_trials_that_go_on_in_a_narrower_pack_equal_trials_alone(
    tiny_dataset, monkeypatch, engine, lanes
):
    task, scheduler = mlp_task(tiny_dataset), jp.Hyperband(9)
    layout = Layout((4,), (Tail(9 * 4, engine, lanes),), Forecast(1.0, 0.9))
    with monkeypatch.context() as patch:
        patch.setattr(planner, "lay_out", lambda *_, **__: layout)
        result = jp.sweep(task, space(), scheduler, workers=1, progress=False)
    assert f", from 36 steps {engine}" in str(result.plan)
    assert "2 programs for 17 trials" in str(result.plan)
    assert result.stats.packs[0]["tail"] == [36, engine, lanes]
    whole = [trial.status == "COMPLETE" for trial in result.trials]
    assert sum(whole) == 5
    hparams = [trial.hparams for trial in result.trials]
    epochs = [9 if each else 0 for each in whole]
    alone = jp.train(task, hparams, epochs=epochs, horizon=9, engine="solo")
    for trial, one in zip(result.trials, alone, strict=True):
        if trial.status == "COMPLETE":
            assert trial.steps == one.steps == 36
            loss = one.history[-1]["loss"]
            assert trial.history[-1]["loss"] == pytest.approx(loss, abs=1e-5)
            assert trial.score == pytest.approx(one.score, abs=1e-6)


def test_measuring_runs_real_steps_and_is_remembered(
    tiny_dataset, monkeypatch, tmp_path
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(planner, "WORTH_MEASURING", 0.0)
    monkeypatch.setattr(tune, "ROUND_SECONDS", 0.005)
    monkeypatch.setattr(tune.executables, "disk_cache_wanted", lambda: True)
    monkeypatch.setattr(
        tune.executables, "_use_directory", lambda directory: {}
    )  # Nothing but the measurement is to be kept.
    (pack,) = packs(tiny_dataset, workers=2)
    assert len(pack.measured) == 2 and all(us > 0 for _, us in pack.measured)
    monkeypatch.setattr(tune, "_run", None)  # A second measurement would fail.
    (again,) = packs(tiny_dataset, workers=2)
    assert again.measured == pack.measured


def test_the_plan_as_text(tiny_dataset):
    text = str(
        jp.explain(mlp_task(tiny_dataset), space(width=jp.choice(8, 16)), workers=2)
    )
    assert "learning_rate  per-lane" in text
    assert "width          static" in text
    assert "tiny.py" in text and "hp.learning_rate" in text
    assert "2 programs for 49 trials" in text
    assert "2 workers on cpu" in text


def test_a_sweep_keeps_its_plan(tiny_dataset):
    result = jp.sweep(
        mlp_task(tiny_dataset), space(), jp.RandomSearch(2, 1), progress=False
    )
    (row,) = result.stats.packs
    assert row["engine"] == "packed" and row["trials"] == 2 and row["reason"]
    assert result.plan.packs[0].row() == row
