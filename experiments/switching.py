"""What it costs to change the trial in a lane, against a fresh program or process.

Claim: the paper loads a model into a pack and takes it out again while the others go
on, which costs far less than starting over: a copy of the trial's state, not a
compilation, and not a process.

    python -m experiments.switching
    python -m experiments.switching --smoke

| row | what is timed |
|---|---|
| `take` | a trial's state out of its lane, to the host |
| `put` | a state from the host into a lane |
| `start` | a new trial: its initialisation, and into a lane |
| `step` | a training step of the whole pack, for comparison |
| `program` | tracing and compiling that step, as a new program needs |
| `process` | a new Python process to its first trained step, nothing cached |

`take`, `put`, `start` and `step` are medians of interleaved calls, warm and blocked.
Expect a swap (`take` and `put`) to cost less than some steps, and a new program or
process a thousand times as much or more.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import optax

import jaxpack as jp
from experiments import measure
from jaxpack import bundle, executables, trees
from jaxpack.executables import CompileLog
from jaxpack.groups import kinds_of_trials
from jaxpack.pack import Feed
from jaxpack.planner import plan
from jaxpack.report import print_table
from jaxpack.train import make_ready
from jaxpack.types import Trial

if TYPE_CHECKING:
    from rich.table import Table

MODELS: dict[str, tuple[str, Callable[[], Any]]] = {
    "mlp": ("digits", lambda: jp.models.MLP(64, 2)),
    "resnet8": ("photos", lambda: jp.models.ResNet(8, width=8)),
    "mlp_cifar": ("tfds:cifar10", lambda: jp.models.MLP(512, 3)),
    "resnet20": ("tfds:cifar10", lambda: jp.models.ResNet(20)),
    "densenet40": ("tfds:cifar10", lambda: jp.models.DenseNet(40)),
}
"""Data set and model by name."""

SMOKE = ("mlp", "resnet8")
FULL = ("mlp_cifar", "resnet20", "densenet40")
FAR = 2**30
"""A step that no trial of this experiment gets to."""


@dataclasses.dataclass
class Flags:
    """The flags of this experiment."""

    smoke: bool = False
    """Two small models with data that need no download."""
    models: tuple[str, ...] = ()
    """Names in `experiments.switching.MODELS`; by default those on CIFAR-10."""
    lanes: int = 8
    """Lanes of the pack."""
    repeats: int = 20
    """How often each is timed, in turn; the median counts."""
    directory: pathlib.Path | None = None
    """Where to write results. By default a folder of the device's in results/."""


def make_task(name: str) -> jp.Task:
    """The task of one of `MODELS`."""
    dataset, make = MODELS[name]

    def model(_: jp.HParams) -> Any:
        return make()

    def optimizer(hp: jp.HParams) -> optax.GradientTransformation:
        return optax.adam(hp.learning_rate)

    return jp.Task(model, optimizer, jp.data.load(dataset))


def time_pack(task: jp.Task, lanes: int, repeats: int) -> dict[str, float]:
    """Times swaps, steps and the program of a pack, in seconds."""
    trials = [
        Trial(i, jp.HParams({"learning_rate": rate}))
        for i, rate in enumerate(measure.spread(1e-5, 1e-3, lanes + 1))
    ]
    made = plan(
        task,
        trials,
        kinds_of_trials(trials),
        [FAR] * len(trials),
        engine="packed",
        max_lanes=lanes,
        workers=1,
    )
    ready = [
        make_ready(trial, made, order=(i,), stops=(FAR,), total_steps=FAR)
        for i, trial in enumerate(trials)
    ]
    feed = Feed(task.dataset, 0, 1, made.workers[0])
    # A width of its own, whatever the number of trials has led to.
    spec = dataclasses.replace(made.packs[0].spec, num_lanes=lanes)
    ready = [each._replace(pack=spec) for each in ready]
    executables.clear()
    jax.clear_caches()
    start = time.perf_counter()
    filled = bundle.Bundle((spec,), feed, 0, CompileLog())
    program = time.perf_counter() - start
    for each in ready[:lanes]:
        filled.put(each)
    return {**_interleaved(filled, ready[lanes], repeats), "program": program}


def _interleaved(filled: bundle.Bundle, other: Any, repeats: int) -> dict[str, float]:
    """Median seconds of taking, putting and starting a trial, and of a step."""
    (pack,), deck = filled.packs, filled.feed.deck(0)
    kept: dict[str, Any] = {}

    def take() -> None:
        kept["state"] = trees.to_host(pack._take(pack.arguments[0], np.int32(0)))

    def put() -> None:
        del pack.live[0]
        pack.put(other._replace(state=kept["state"]))
        jax.block_until_ready(pack.arguments[0])

    def start() -> None:
        del pack.live[0]
        pack.put(other)
        jax.block_until_ready(pack.arguments[0])

    def one_step() -> None:
        filled.run(1, deck)

    def seconds_of(call: Callable[[], None]) -> Callable[[], float]:
        def timed() -> float:
            before = time.perf_counter()
            call()
            return time.perf_counter() - before

        return timed

    calls = {"take": take, "put": put, "start": start, "step": one_step}
    for call in calls.values():
        call()
    timed = {name: seconds_of(call) for name, call in calls.items()}
    return measure.interleave(timed, repeats)


def time_process(name: str) -> float:
    """Seconds of a new Python process that trains one step and ends."""
    code = f"from experiments import switching; switching.first_step({name!r})"
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {
            "XDG_CACHE_HOME": cache,
            "JAX_ENABLE_COMPILATION_CACHE": "false",
            # Of the device's memory this process holds a part already.
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        }
        root = pathlib.Path(__file__).parents[1]
        start = time.perf_counter()
        command = [sys.executable, "-c", code]
        subprocess.run(command, check=True, cwd=root, env=environment)
        return time.perf_counter() - start


def first_step(name: str) -> None:
    """Trains one trial for one step: what `time_process` has a process do."""
    options = {"steps": 1, "engine": "solo", "workers": 1}
    jp.train(make_task(name), [{"learning_rate": 1e-3}], **options)


def run(flags: Flags) -> dict[str, Any]:
    """Times every model, and returns the headline figures."""
    names = flags.models or (SMOKE if flags.smoke else FULL)
    unknown = [name for name in names if name not in MODELS]
    if unknown or flags.lanes < 1 or flags.repeats < 1:
        raise ValueError(
            f"models is {names}, lanes {flags.lanes}, repeats {flags.repeats}; models "
            f"may be {', '.join(MODELS)}, and the numbers must be at least 1"
        )
    processes = 1 if flags.smoke else 3
    seconds = {
        name: time_pack(make_task(name), flags.lanes, flags.repeats)
        | {"process": statistics.median(time_process(name) for _ in range(processes))}
        for name in names
    }
    figures = {name: headline(each) for name, each in seconds.items()}
    print_table(table(seconds, flags.lanes))
    directory = measure.results_directory(flags.directory, flags.smoke)
    if directory is not None:
        path = measure.save(
            directory, "switching", figures, seconds=seconds, lanes=flags.lanes
        )
        plot(seconds, path.with_suffix(".png"))
        print(f"results: {path}")
    return figures


def headline(seconds: Mapping[str, float]) -> dict[str, float]:
    """A swap in milliseconds, and what other ways of changing cost as multiples of it.

    Examples:
      >>> swap = {"take": 1e-3, "put": 1e-3, "step": 1e-3}
      >>> headline(swap | {"program": 4, "process": 8})
      {'swap_ms': 2.0, 'steps': 2.0, 'program': 2000.0, 'process': 4000.0}
    """
    swap = seconds["take"] + seconds["put"]
    figures = {
        "swap_ms": swap * 1e3,
        "steps": swap / seconds["step"],
        "program": seconds["program"] / swap,
        "process": seconds["process"] / swap,
    }
    return {name: measure.significant(value) for name, value in figures.items()}


def table(seconds: Mapping[str, Mapping[str, float]], lanes: int) -> Table:
    """Milliseconds of each, a row a model."""
    from rich.table import Table

    result = Table(title=f"milliseconds, a pack of {lanes}", title_justify="left")
    result.add_column("")
    columns = next(iter(seconds.values()))
    for column in columns:
        result.add_column(column, justify="right")
    for name, each in seconds.items():
        result.add_row(name, *(f"{each[column] * 1e3:,.2f}" for column in columns))
    return result


def plot(seconds: Mapping[str, Mapping[str, float]], path: pathlib.Path) -> None:
    """Draws all times on a logarithmic scale."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(5.5, 3.2), layout="constrained")
    axes = picture.subplots()
    for name, each in seconds.items():
        axes.plot(list(each), list(each.values()), "o-", label=name)
    axes.set_yscale("log")
    axes.set_ylabel("seconds")
    axes.set_title("Changing the trial in a lane")
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(path, dpi=150)


def main(args: Sequence[str] | None = None) -> None:
    """Runs the experiment that the command line asks for."""
    import tyro

    program = "python -m experiments.switching"
    flags = tyro.cli(Flags, prog=program, args=args, description=__doc__)
    try:
        figures = run(flags)
    except ValueError as error:
        sys.exit(f"{program}: {error}")
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
