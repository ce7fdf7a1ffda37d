"""The plan: engines by rule and by measurement, widths, the text of it."""

from __future__ import annotations

import jax
import pytest
from tiny import MLP, mlp_task, optimizer, space

import jaxpack as jp
from jaxpack import planner, tune


def packs(dataset, scheduler=None, more=None, **options):
    scheduler = scheduler or jp.RandomSearch(8, 4)
    plan = jp.explain(mlp_task(dataset), space(**(more or {})), scheduler, **options)
    return plan.packs


def test_tiny_models_are_packed_and_others_are_not(tiny_dataset):
    assert jax.devices()[0].platform == "cpu"
    (small,) = packs(tiny_dataset, workers=2)
    assert (small.spec.engine, small.spec.num_lanes) == ("packed", 4)
    (large,) = packs(tiny_dataset, more={"width": 1000}, workers=2)
    assert large.num_params > planner.TINY
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
    (pack,) = packs(tiny_dataset, workers=1)
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
        return {members: 1e-6 for members in candidates}

    monkeypatch.setattr(planner, "measure", measure)
    monkeypatch.setattr(planner, "WORTH_MEASURING", 0.0)

    def model(hp):  # Of one size, whichever it is.
        return MLP(hp.width, hp.rate) if hp.model == "a" else MLP(hp.width + 1, hp.rate)

    task = jp.Task(model, optimizer, tiny_dataset)
    mixed = space(model=jp.choice("a", "b"), width=jp.choice(14, 15))
    plan = jp.explain(task, mixed, jp.RandomSearch(16, 1), workers=1)
    assert len(plan.packs) == 4
    assert sorted(measured) == ["a", "b"]


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
