"""The benchmarks measure what they say, and end with the line that they promise."""

from __future__ import annotations

import doctest
import functools
import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest

import jaxpack as jp
from experiments import (
    baselines,
    bench_gpu,
    candidates,
    measure,
    models,
    step_time,
    sweep_runs,
    sweep_time,
)
from jaxpack import rewrite

STEP_KEYS = [
    *("auto_vs_one", "auto_vs_best_baseline", "auto_vs_best_candidate"),
    *("packed_vs_one", "engine", "lanes", "improvement", "compile_seconds"),
]
SWEEP_KEYS = [
    *("steady_vs_one", "steady_vs_one_scan", "all_vs_one", "all_vs_one_recompile"),
    *("compile_seconds", "compiles_after_first_segment", "occupancy", "bound"),
]
TRIAL = {"learning_rate": 0.05, "weight_decay": 1e-4, "dropout": 0.3}


def images(count: int, seed: int):
    rng = np.random.default_rng(seed)
    y = np.arange(count, dtype=np.int32) % 10
    return rng.normal(size=(count, 8, 8, 1)).astype(np.float32), y


def mlp(hp) -> models.MLP:
    return models.MLP((16,), hp.dropout)


def cnn(hp) -> models.CNN:
    return models.CNN((4, 8), 16, hp.dropout)


def problem_with(model) -> models.Problem:
    dataset = jp.data.Dataset.from_arrays(images(40, 1), images(20, 2))
    return models.Problem(model, models.momentum, dataset, 8)


@functools.cache
def trained(model) -> jp.TrialResult:
    """A trial trained by the library for 2 epochs of 5 steps, with seed 7."""
    task = problem_with(model).task()
    return jp.train(task, [TRIAL], epochs=2, seed=7, engine="solo")[0]


@pytest.mark.parametrize(
    "name, model",
    [
        ("one", mlp),
        ("one_scan", mlp),
        ("one_recompile", mlp),
        pytest.param("one_scan_conv", cnn, marks=pytest.mark.slow),
    ],
)
def test_baselines_do_the_work_of_the_library(name, model):
    problem, expected = problem_with(model), trained(model)
    constants = TRIAL if name == "one_recompile" else None
    baseline = baselines.make(name, problem, baselines.put(problem), constants)
    values = baselines.on_device(TRIAL)
    state = baseline.init(values, np.uint32(7), np.uint32(0))
    orders = baselines.batches(problem, 7, 2)
    state = baselines.train(baseline, state, values, orders)
    assert int(state.step) == expected.steps == 10
    for a, b in zip(
        jax.tree.leaves(state.params), jax.tree.leaves(expected.params), strict=True
    ):
        np.testing.assert_allclose(a, b, atol=1e-5)
    accuracy = float(baseline.evaluate(state, values))
    assert accuracy == pytest.approx(expected.score, abs=1e-6)


@pytest.mark.parametrize("name, times", [("one_scan", 0), ("one_scan_conv", 1)])
def test_only_one_baseline_has_our_convolution(monkeypatch, name, times):
    replaced = []

    def record(loss):
        replaced.append(loss)
        return loss

    monkeypatch.setattr(rewrite, "replace_operations", record)
    problem = problem_with(cnn)
    baseline = baselines.make(name, problem, baselines.put(problem))
    values = baselines.on_device(TRIAL)
    state = jax.eval_shape(baseline.init, values, np.uint32(0), np.uint32(0))
    order = baselines.batches(problem, 0, 1)[0]
    jax.eval_shape(baseline.advance, state, values, baseline.data, order)
    assert len(replaced) == times
    assert baseline.steps_per_call == 5


def test_unknown_baselines_are_refused():
    problem = problem_with(cnn)
    with pytest.raises(ValueError, match="'two'"):
        baselines.make("two", problem, baselines.put(problem))


@pytest.mark.parametrize("name", models.CASES)
def test_models_are_of_the_shape_they_say(name):
    problem = models.CASES[name].problem()
    module, x = problem.model(None), problem.dataset.train[0][:2]

    def outputs(key):
        return module.init_with_output(key, x)[0]

    assert jax.eval_shape(outputs, jax.random.key(0)).shape == (2, 10)
    assert isinstance(
        problem.optimizer(jp.HParams(TRIAL)), optax.GradientTransformation
    )
    assert problem.steps_per_epoch == models.STEPS_PER_EPOCH
    assert problem.dataset.num_train % problem.batch_size == 0


@pytest.mark.parametrize("module", [measure, sweep_runs])
def test_examples_in_docstrings_are_right(module):
    done = doctest.testmod(module)
    assert done.attempted and not done.failed


@pytest.mark.slow
def test_a_fleet_fills_every_lane_of_every_worker():
    task = models.CASES["mlp_tiny"].problem().task()
    packed = measure.fleet(task, "packed", lanes=4, workers=2, num_epochs=2)
    assert (packed.engine, packed.lanes, len(packed.trials)) == ("packed", 4, 8)
    solo = measure.fleet(task, "solo", lanes=4, workers=2, num_epochs=2)
    assert (solo.engine, solo.lanes, len(solo.trials)) == ("solo", 1, 2)
    timing = measure.time_fleet(solo, 8)
    assert timing.seconds > 0 and timing.compile_seconds > 0


def test_step_time_figures():
    Run = step_time.Run
    seconds = {
        Run("one"): 8.0,
        Run("one_scan"): 5.0,
        Run("one_scan_conv"): 4.0,
        Run("solo", 1, 1): 4.0,
        Run("solo", 1, 2): 1.9,
        Run("packed", 16, 2): 2.5,
        Run("auto", 16, 2): 2.0,
    }
    found = step_time.figures(step_time.Measured(seconds, 16, 2, "solo", 1, 1.25))
    assert list(found) == STEP_KEYS
    assert list(found.values()) == [4.0, 2.0, 0.95, 3.2, "solo", 1, 0.75, 1.25]


def test_sweep_time_figures():
    rows = {
        "auto": sweep_runs.Outcome(10.0, 4.0, 3.0, late=0, occupancy=0.9),
        "one": sweep_runs.Outcome(40.0, 16.0, 3.0),
        "one_scan_conv": sweep_runs.Outcome(30.0, 8.0, 3.0),
    }
    found = sweep_time.figures(rows, jp.Hyperband(81))
    assert list(found) == SWEEP_KEYS
    assert list(found.values()) == [4.0, 2.0, 4.0, None, 3.0, 0, 0.9, 19.52]


def test_a_cut_baseline_is_scaled_by_what_was_left_out():
    clock, scheduler = sweep_runs.Clock(), jp.Hyperband(3)  # 5 trials, 11 epochs
    for part, count in (("compile", 1), ("init", 1), ("train", 2), ("evaluate", 1)):
        clock.seconds[part], clock.counts[part] = 1.0, count
    one = sweep_runs._scaled("one", clock, scheduler, best=0.5)
    assert one.steady == pytest.approx(5 + 5.5 + 6)
    assert one.all == pytest.approx(1 + one.steady)
    assert one.share == pytest.approx(2 / 11) and one.best is None
    each = sweep_runs._scaled("one_recompile", clock, scheduler, best=0.5)
    assert each.all == pytest.approx(5 + one.steady) and each.steady is None


@pytest.mark.slow
def test_all_ways_of_running_a_sweep_find_the_same():
    problem, scheduler = sweep_runs.SWEEPS["digits_R3"].problem(), jp.Hyperband(3)
    across, within = (
        sweep_runs.time_library(problem, scheduler, "solo", 1, run)
        for run in (sweep_runs.across_brackets, sweep_runs.within_rungs)
    )
    one = sweep_runs.time_baseline("one", problem, scheduler, limit=1000)
    assert across.best == pytest.approx(within.best) == pytest.approx(one.best)
    assert one.share == 1
    for row in (across, within):
        assert row.compiles and row.compile_seconds > 0 and row.late == 0
        assert 0 < row.steady < row.all


def test_step_time_ends_with_its_line(capsys, tmp_path):
    step_time.main(["--smoke", "--lanes", "2", "--directory", str(tmp_path)])
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(line) == ["device", "models"]
    assert list(line["models"]["mlp_tiny"]) == STEP_KEYS
    saved = json.loads((tmp_path / "step_time.json").read_text())
    assert saved["figures"] == line and len(saved["runs"]) == 8
    assert saved["environment"]["versions"]["jax"] == jax.__version__
    assert (tmp_path / "step_time.png").exists()


def test_sweep_time_ends_with_its_line(capsys, tmp_path, monkeypatch):
    outcome = sweep_runs.Outcome(2.0, 1.0, 0.5, 3, 1.0, 0.9, 0, 1.0)
    monkeypatch.setattr(sweep_runs, "time_library", lambda *_: outcome)
    monkeypatch.setattr(sweep_runs, "time_baseline", lambda *_: outcome)
    args = ["--sweeps", "mlp_R27", "mlp_R81", "--directory", str(tmp_path)]
    sweep_time.main(args)
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(line) == ["sweeps"] and list(line["sweeps"]) == ["mlp_R27", "mlp_R81"]
    assert list(line["sweeps"]["mlp_R27"]) == SWEEP_KEYS
    assert line["sweeps"]["mlp_R27"]["all_vs_one_recompile"] == 1.0
    assert line["sweeps"]["mlp_R81"]["all_vs_one_recompile"] is None
    assert (tmp_path / "sweep_time.json").exists()
    assert (tmp_path / "sweep_time.png").exists()


def test_gpu_benchmark_checks_lanes_and_stops_in_time(monkeypatch):
    monkeypatch.setattr(bench_gpu, "CHECKED", ("mlp_tiny",))
    row = sweep_runs.Outcome(2.0, 1.0, 0.5, 3, 1.0, 0.9, 0, 1.0)
    monkeypatch.setattr(sweep_runs, "time_library", lambda *_: row)
    monkeypatch.setattr(sweep_runs, "time_baseline", lambda *_: row)
    found = bench_gpu.run(smoke=True, started=-1e9)
    assert found["lane_equals_solo"]["passed"]
    assert list(found["lane_equals_solo"]["differences"]["mlp_tiny"]) == [
        "packed",
        "solo",
    ]
    assert found["left_out"] == ["mlp_tiny", "candidates of cnn"]
    assert not found["models"] and not found["candidates"]
    assert found["sweeps"]["digits_R3"]["steady_vs_one"] == 1.0


def test_candidates_are_every_form_of_a_program(monkeypatch):
    monkeypatch.setattr(candidates, "_timer", lambda *_: lambda: 1.5e-6)
    cnn, mlp = (
        candidates.time_candidates(models.CASES[name], 2) for name in ("cnn", "mlp")
    )
    forms = ("native", "looped", "patches")
    assert [*cnn] == [f"{form}, {n} a turn" for form in forms for n in (1, 8)]
    assert mlp == {"stock, 1 a turn": 1.5, "stock, 8 a turn": 1.5}


def test_a_chunked_loop_takes_every_step():
    case = models.Case(models.MLP((4,)), (4,), batch_size=4)
    # It raises if a lane has taken more or fewer.
    found = candidates.time_candidates(case, 2, chunks=(3,), seconds=1e-4, repeats=1)
    assert found["stock, 3 a turn"] > 0


@pytest.mark.parametrize(
    "main, args, message",
    [
        (step_time.main, ["--models", "mpl"], "models has 'mpl'"),
        (step_time.main, ["--lanes", "3"], "powers of two"),
        (step_time.main, ["--repeats", "0"], "repeats is 0"),
        (sweep_time.main, ["--sweeps", "mlp_R9"], "sweeps has 'mlp_R9'"),
    ],
)
def test_bad_flags_are_refused(main, args, message):
    with pytest.raises(SystemExit, match=message):
        main(args)


def test_gpu_benchmark_needs_few_packages():
    absent = ("tensorflow_datasets", "mlxtend", "ray", "tyro", "pandas", "matplotlib")
    code = f"import sys; sys.modules.update(dict.fromkeys({(*absent, 'PIL')}))\n"
    root = str(pathlib.Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code + "import experiments.bench_gpu"],
        env=os.environ | {"PYTHONPATH": root, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
