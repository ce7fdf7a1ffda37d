"""What the benchmarks share: fair timing, the library at work, and saving results."""

from __future__ import annotations

import json
import os
import pathlib
import platform
import re
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from importlib import metadata
from typing import Any, NamedTuple, TypeVar

import jax

from jaxpack.forecast import Work
from jaxpack.groups import kinds_of_trials
from jaxpack.pack import Reading
from jaxpack.planner import plan, worker_devices
from jaxpack.plans import Plan
from jaxpack.task import Task
from jaxpack.train import make_ready, steps_per_epoch
from jaxpack.types import HParams, Trial
from jaxpack.worker import Pool

Key = TypeVar("Key", bound=Hashable)

RESULTS = pathlib.Path(__file__).parent / "results"
WARM_STEPS = 4
"""Steps that a trial takes before the clock starts."""


class Fleet(NamedTuple):
    """Trials that keep every lane of every worker busy, under one plan.

    Attributes:
      task: The task.
      plan: The plan.
      trials: The trials that are driven: as many as there are lanes.
      num_epochs: The longest they may train.
    """

    task: Task
    plan: Plan
    trials: tuple[Trial, ...]
    num_epochs: int

    @property
    def lanes(self) -> int:
        """Trials in a pack."""
        return self.plan.packs[0].spec.num_lanes

    @property
    def engine(self) -> str:
        """The plan's engine."""
        return self.plan.packs[0].spec.engine


class Timing(NamedTuple):
    """A measurement of a fleet.

    Attributes:
      seconds: Per lane-step.
      compile_seconds: Spent on compiling before the clock started.
    """

    seconds: float
    compile_seconds: float


def fleet(
    task: Task, engine: str, lanes: int, workers: int | None, num_epochs: int
) -> Fleet:
    """Plans trials for a number of lanes a worker.

    Args:
      task: A task with the hparams learning_rate and weight_decay.
      engine: An engine, `lanes` wide, or "auto", which chooses its width, too.
      lanes: Trials a worker.
      workers: Worker threads; None leaves them to the plan.
      num_epochs: The longest that a trial may train.
    """
    count = lanes * (workers or num_workers())
    trials = [
        Trial(i, HParams({"learning_rate": rate, "weight_decay": rate / 100}))
        for i, rate in enumerate(spread(1e-4, 3e-3, count))
    ]
    horizon = num_epochs * steps_per_epoch(task, trials[0].hparams)
    made = plan(
        task,
        trials,
        kinds_of_trials(trials),
        [horizon] * count,
        Work.of([horizon] * count) if engine == "auto" else None,
        engine=engine,
        max_lanes=None if engine == "auto" else lanes,
        workers=workers,
    )
    busy = made.packs[0].spec.num_lanes * len(made.workers)
    return Fleet(task, made, tuple(trials[:busy]), num_epochs)


def time_fleet(fleet: Fleet, steps: int) -> Timing:
    """Trains a fleet and measures it.

    Every trial is evaluated twice, `steps` steps apart. The clock runs from the first
    reading of all to the last: compilation and initialisation are outside, and one
    evaluation of each trial is inside.

    Raises:
      RuntimeError: If a trial fails.
    """
    task, horizon = fleet.task, fleet.num_epochs
    spe = steps_per_epoch(task, fleet.trials[0].hparams)
    ready = [
        make_ready(
            trial,
            fleet.plan,
            order=(trial.trial_id,),
            stops=(WARM_STEPS, WARM_STEPS + steps),
            total_steps=horizon * spe,
        )
        for trial in fleet.trials
    ]
    with Pool(task.dataset, 0, horizon, fleet.plan.workers) as pool:
        pool.submit(ready)
        next_reading(pool)
        start = time.perf_counter()
        for _ in range(2 * len(ready) - 1):
            next_reading(pool)
        seconds = time.perf_counter() - start
        compile_seconds = pool.stats().compile_seconds
    return Timing(seconds / (steps * len(ready)), compile_seconds)


def next_reading(pool: Pool) -> Reading:
    """The next reading of a pool.

    Raises:
      RuntimeError: If it says that a trial failed.
    """
    reading = pool.get()
    assert reading is not None
    if not reading.metrics:
        raise RuntimeError(
            f"trial {reading.trial_id} failed after {reading.steps} steps; a benchmark "
            "needs trials that train"
        )
    return reading


def interleave(
    runs: Mapping[Key, Callable[[], float]], repeats: int
) -> dict[Key, float]:
    """Calls all of them in turn, again and again, and takes the median of each.

    Whatever slows the machine down for a while slows all of them down alike.

    Examples:
      >>> values = iter([1.0, 9.0, 2.0, 7.0, 5.0, 8.0])
      >>> interleave({"a": lambda: next(values), "b": lambda: next(values)}, 3)
      {'a': 2.0, 'b': 8.0}
    """
    times: dict[Key, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            times[name].append(run())
    return {name: statistics.median(values) for name, values in times.items()}


def spread(low: float, high: float, count: int) -> list[float]:
    """`count` numbers from `low` to `high`, each the same factor above the last.

    Examples:
      >>> spread(1.0, 16.0, 3)
      [1.0, 4.0, 16.0]
    """
    return [low * (high / low) ** (i / max(count - 1, 1)) for i in range(count)]


def num_workers() -> int:
    """Workers that a call has by default on this machine."""
    return len(worker_devices())


def device_name() -> str:
    """The chip, and on a CPU how many cores of it."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return device.device_kind
    return f"cpu x {num_workers()}"


def results_directory(
    directory: pathlib.Path | None, smoke: bool
) -> pathlib.Path | None:
    """Where results are kept; nowhere by default in a smoke test."""
    if directory is not None or smoke:
        return directory
    return RESULTS / re.sub(r"[^a-z0-9]+", "-", device_name().lower()).strip("-")


def save(
    directory: pathlib.Path, name: str, figures: Mapping[str, Any], **details: Any
) -> pathlib.Path:
    """Writes the results of a benchmark with what they were measured on.

    Args:
      directory: Where to.
      name: The benchmark.
      figures: The headline figures.
      **details: Everything else that was measured.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.json"
    content = {"figures": figures, **details, "environment": environment()}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return path


def environment() -> dict[str, Any]:
    """Device, versions and machine."""
    packages = ("jaxpack", "jax", "jaxlib", "flax", "optax", "numpy")
    return {
        "device": device_name(),
        "devices": len(jax.devices()),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in packages},
    }


def significant(value: float, digits: int = 4) -> float:
    """Rounds to some significant digits.

    Examples:
      >>> significant(0.0123456), significant(1234.5678)
      (0.01235, 1235.0)
    """
    return float(f"{value:.{digits}g}")


def _version(name: str) -> str | None:
    # A checkout on the path is importable without being installed.
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
