"""The benchmarks on a GPU, in one script of under eight minutes.

Claim: every engine gives a trial the weights that it has alone, and packing pays on a
GPU, where one small network leaves most of the chip idle.

    PYTHONPATH=. python -m experiments.bench_gpu
    PYTHONPATH=. python -m experiments.bench_gpu --smoke    # on any machine, a minute

Nothing is downloaded, and of the packages that jaxpack can use it needs only jax, flax,
optax, numpy and scikit-learn. Four parts:

- `lane_equals_solo`: the largest difference between the weights of trials trained by
  each engine and those of a plain loop without jaxpack, in float32 with the precision
  of matrix products pinned;
- `models`: the step times of `experiments.step_time`, with packs of up to 256, in
  float32 (pinned again) and bfloat16;
- `candidates`: forms of a pack's program that the library does not take so far: of its
  convolutions, and of the training loop (see `experiments.candidates`);
- `sweeps`: Hyperband with R=81 on the digits, across brackets, against `one`.

A part that finds the time spent is left out and named under `left_out`. Results go to
a folder of the device's in experiments/results/.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import jaxpack as jp
from experiments import (
    baselines,
    candidates,
    measure,
    models,
    step_time,
    sweep_runs,
    sweep_time,
)
from jaxpack.engines import ADVANCE
from jaxpack.report import print_table

SECONDS = 400.0
"""After this nothing more is started."""
TOLERANCE = 1e-4
"""Largest difference in the weights, relative to the largest weight or 1."""
STEPS = 64
LANES = (1, 16, 64, 256)
MODELS = ("mlp_small", "cnn", "mlp", "transformer", "mlp_bfloat16", "cnn_bfloat16")
CHECKED = ("mlp_small", "cnn", "resnet8")
CANDIDATES = ("cnn", "cnn_bfloat16", "mlp_small", "resnet8")
CANDIDATE_LANES = 32
SMOKE_CASE = models.Case(models.CNN((2,), 4), (4, 4, 1), models.momentum, 4)
BUDGET = step_time.Budget(repeats=5, seconds=0.2, least_steps=16, num_epochs=512)


def lane_equals_solo(name: str, num_trials: int, steps: int) -> dict[str, float]:
    """The largest difference of each engine's weights from those of a plain loop.

    Args:
      name: One of `models.CASES`.
      num_trials: Trials to train.
      steps: Steps of each.

    Returns:
      By engine, the difference relative to the largest weight or 1.
    """
    problem = models.CASES[name].problem()
    rates = measure.spread(1e-4, 3e-3, num_trials)
    trials = [{"learning_rate": r, "weight_decay": r / 100} for r in rates]
    baseline = baselines.make("one", problem, baselines.put(problem))
    epochs = -(-steps // problem.steps_per_epoch)
    orders = baselines.batches(problem, 0, epochs)
    orders[-1] = orders[-1][: steps - (epochs - 1) * problem.steps_per_epoch]
    alone = []
    for i, trial in enumerate(trials):
        values = baselines.on_device(trial)
        state = baseline.init(values, np.uint32(0), np.uint32(i))
        alone.append(baselines.train(baseline, state, values, orders).params)
    return {
        engine: max(
            _difference(result.params, params)
            for result, params in zip(
                jp.train(problem.task(), trials, steps=steps, engine=engine),
                alone,
                strict=True,
            )
        )
        for engine in ADVANCE
    }


def check(names: Sequence[str], steps: int) -> dict[str, Any]:
    """Checks that lanes equal trials trained alone, for every engine and some models.

    Returns:
      The differences by model and engine, and whether all are small.
    """
    found = {name: lane_equals_solo(name, 4, steps) for name in names}
    worst = max(value for each in found.values() for value in each.values())
    return {"differences": found, "steps": steps, "passed": worst <= TOLERANCE}


def run(*, smoke: bool, started: float) -> dict[str, Any]:
    """Runs the four parts, as long as there is time.

    Args:
      smoke: Whether only to show that all of it works.
      started: The `time.perf_counter()` that the time is counted from.
    """
    left_out: list[str] = []
    result: dict[str, Any] = {"device": measure.device_name()}
    with jax.default_matmul_precision("highest"):
        names = CHECKED[:1] if smoke else CHECKED
        result["lane_equals_solo"] = check(names, 8 if smoke else STEPS)
    scheduler = jp.Hyperband(3 if smoke else 81)
    sweep = sweep_runs.SWEEPS["digits_R3" if smoke else "digits_R81"]
    problem = sweep.problem()
    rows = {
        "auto": sweep_runs.time_library(
            problem, scheduler, "auto", 1, sweep_runs.across_brackets
        ),
        "one": sweep_runs.time_baseline("one", problem, scheduler, 1 if smoke else 20),
    }
    name = f"digits_R{scheduler.max_resource}"
    print_table(sweep_time.table(name, rows, scheduler))
    result["sweeps"] = {name: sweep_time.figures(rows, scheduler)}
    result["models"], result["runs"] = {}, []
    for name in ("mlp_tiny",) if smoke else MODELS:
        if time.perf_counter() - started > SECONDS:
            left_out.append(name)
            continue
        precision = None if "bfloat16" in name else "highest"
        with jax.default_matmul_precision(precision):
            measured = step_time.measure_case(
                models.CASES[name],
                (1, 2) if smoke else LANES,
                step_time.SMOKE if smoke else BUDGET,
            )
        print_table(step_time.table(name, measured))
        result["models"][name] = step_time.figures(measured)
        result["runs"] += step_time.rows({name: measured})
    result["candidates"] = {}
    for name in CANDIDATES[:1] if smoke else CANDIDATES:
        if time.perf_counter() - started > SECONDS:
            left_out.append(f"candidates of {name}")
            continue
        precision = None if "bfloat16" in name else "highest"
        with jax.default_matmul_precision(precision):
            result["candidates"][name] = candidates.time_candidates(
                SMOKE_CASE if smoke else models.CASES[name],
                2 if smoke else CANDIDATE_LANES,
                chunks=(1, 2) if smoke else candidates.CHUNKS,
                seconds=0.001 if smoke else 0.2,
                repeats=1 if smoke else 5,
            )
    result["left_out"] = left_out
    return result


def main(args: Sequence[str] | None = None) -> None:
    """Runs the benchmark that the command line asks for."""
    started = time.perf_counter()
    parser = argparse.ArgumentParser(
        prog="python -m experiments.bench_gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--smoke", action="store_true", help="a run of a minute")
    parser.add_argument("--directory", type=pathlib.Path, help="where to write results")
    flags = parser.parse_args(args)
    headline = run(smoke=flags.smoke, started=started)
    runs = headline.pop("runs")
    directory = measure.results_directory(flags.directory, flags.smoke)
    if directory is not None:
        path = measure.save(directory, "bench_gpu", headline, runs=runs)
        print(f"results: {path}\n")
    print(json.dumps(headline), flush=True)
    if not headline["lane_equals_solo"]["passed"]:
        raise SystemExit("the weights of some lanes differ from those trained alone")


def _difference(a: Any, b: Any) -> float:
    """The largest difference between two trees, relative to the largest value or 1."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(
        float(np.max(np.abs(np.asarray(x) - np.asarray(y))) / max(1, np.max(np.abs(y))))
        for x, y in pairs
    )


if __name__ == "__main__":
    main()
