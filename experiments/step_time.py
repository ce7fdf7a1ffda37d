"""Time of a training step: one trial at a time against many at once.

Claim: `engine="auto"` is never slower than one trial at a time and takes the fastest
of the programs there are for the model on this chip. On a CPU that is single trials
on all cores, or packs of tiny models; on a GPU it is packs.

    python -m experiments.step_time
    python -m experiments.step_time --models mlp_small cnn --lanes 16
    python -m experiments.step_time --full

What is compared, each warm, blocked and with its compilation apart, all of it in turn
in one process, the median of `--repeats` rounds:

- the baselines of `experiments.baselines`: a good user's script without jaxpack;
- every engine of jaxpack at every lane count, on one worker and on all of them. All
  lanes of all workers are busy: `packed` at 16 lanes and 2 workers trains 32 trials;
- `auto`: what the planner takes for as many trials, in packs as wide as it likes.

Times are those of a lane-step: one training step of one trial. Expect about seven
minutes for the default models on two CPU cores.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from experiments import baselines, measure, models
from jaxpack.engines import ADVANCE
from jaxpack.report import print_table

if TYPE_CHECKING:
    from rich.table import Table

GOOD_ENOUGH = 0.9
"""`auto` against the best candidate; what is below is measured once more."""


@dataclasses.dataclass
class Flags:
    """The flags of this benchmark."""

    models: tuple[str, ...] = ()
    """Names in `experiments.models.CASES`; the five small ones by default."""
    lanes: tuple[int, ...] = (1, 4, 16)
    """Trials in a pack; the headline figures are those of the largest."""
    full: bool = False
    """All models but the bfloat16 ones."""
    smoke: bool = False
    """A short run of the smallest model that only shows that all of it works."""
    repeats: int = 5
    """Rounds, of which the median is taken."""
    seconds: float = 0.4
    """How long one measurement should last."""
    directory: pathlib.Path | None = None
    """Where to write results. By default a folder of the device's in results/."""


class Run(NamedTuple):
    """Something that is timed.

    Attributes:
      name: A baseline, an engine or "auto".
      lanes: Trials in a pack.
      workers: Worker threads.
    """

    name: str
    lanes: int = 1
    workers: int = 1


class Measured(NamedTuple):
    """The measurements of a model.

    Attributes:
      seconds: Time of a lane-step for each run.
      lanes: The lane count of the headline figures.
      workers: The workers there are.
      engine: What `auto` took for as many trials.
      width: Its trials in a pack.
      compile_seconds: What `auto` took to compile.
    """

    seconds: dict[Run, float]
    lanes: int
    workers: int
    engine: str
    width: int
    compile_seconds: float


class Budget(NamedTuple):
    """How long measurements last.

    Attributes:
      repeats: Rounds.
      seconds: Of one measurement.
      least_steps: Steps that a trial takes at least in one.
      num_epochs: Epochs that it takes at most.
    """

    repeats: int = 5
    seconds: float = 0.4
    least_steps: int = 16
    num_epochs: int = 2048


SMOKE = Budget(repeats=1, seconds=0.01, least_steps=2, num_epochs=4)


def measure_case(case: models.Case, lanes: Sequence[int], budget: Budget) -> Measured:
    """Times the baselines, the engines and `auto` on one model.

    Args:
      case: The model.
      lanes: Trials in a pack.
      budget: How long to measure.
    """
    problem, workers = case.problem(), measure.num_workers()
    lanes = sorted(set(lanes), reverse=True)
    # The widest `auto` first, so that it pays for all of its compilation.
    fleets: dict[Run, int | None] = {Run("auto", n, workers): None for n in lanes}
    for engine in ADVANCE:
        for count in (1,) if engine == "solo" else lanes:
            for threads in sorted({1, workers}):
                fleets[Run(engine, count, threads)] = threads
    task = problem.task()
    timers: dict[Run, Callable[[], float]] = {
        Run(name): baseline_timer(name, problem, budget) for name in baselines.NAMES
    }
    autos = []
    for run, threads in fleets.items():
        made = measure.fleet(task, run.name, run.lanes, threads, budget.num_epochs)
        timers[run], compile_seconds = fleet_timer(made, budget)
        if run.name == "auto":
            taken = made.engine, made.lanes
            autos.append((lanes[0], workers, *taken, compile_seconds))
    seconds = measure.interleave(timers, budget.repeats)
    measured = Measured(seconds, *autos[0])
    if figures(measured)["auto_vs_best_candidate"] < GOOD_ENOUGH and budget != SMOKE:
        seconds = measure.interleave(timers, budget.repeats)
    return measured._replace(seconds=seconds)


def baseline_timer(
    name: str, problem: models.Problem, budget: Budget
) -> Callable[[], float]:
    """Compiles a baseline, and returns what measures a lane-step of it in seconds."""
    baseline = baselines.make(name, problem, baselines.put(problem))
    hparams = baselines.on_device({"learning_rate": 1e-3, "weight_decay": 1e-5})
    orders = baselines.batches(problem, 0, 1)

    def run(num_epochs: int) -> float:
        state = baseline.init(hparams, np.uint32(0), np.uint32(0))
        jax.block_until_ready(state)
        start = time.perf_counter()
        state = baselines.train(baseline, state, hparams, orders * num_epochs)
        jax.block_until_ready(state)
        seconds = time.perf_counter() - start
        return seconds / (num_epochs * problem.steps_per_epoch)

    run(1)
    epoch = run(1) * problem.steps_per_epoch
    num_epochs = int(min(max(1, budget.seconds / epoch), budget.num_epochs))
    return functools.partial(run, num_epochs)


def fleet_timer(
    fleet: measure.Fleet, budget: Budget
) -> tuple[Callable[[], float], float]:
    """Compiles a fleet, and returns what measures a lane-step of it in seconds.

    The second is the time that compilation took.
    """
    spe = models.STEPS_PER_EPOCH
    most = budget.num_epochs * spe - measure.WARM_STEPS
    first = measure.time_fleet(fleet, budget.least_steps)
    steps, seconds = budget.least_steps, first.seconds
    for _ in range(2):  # A short run is slower a step than a long one.
        wanted = int(budget.seconds / (seconds * len(fleet.trials)))
        if wanted <= steps:
            break
        steps = min(wanted, most)
        seconds = measure.time_fleet(fleet, steps).seconds
    return lambda: measure.time_fleet(fleet, steps).seconds, first.compile_seconds


def figures(measured: Measured) -> dict[str, Any]:
    """The headline figures of a model: ratios of throughput, and what `auto` took."""
    seconds, lanes, workers = measured.seconds, measured.lanes, measured.workers
    one, auto = seconds[Run("one")], seconds[Run("auto", lanes, workers)]
    fastest = min(seconds[Run(name)] for name in baselines.NAMES)
    candidates = [value for run, value in seconds.items() if run.name in ADVANCE]
    ratios = {
        "auto_vs_one": one / auto,
        "auto_vs_best_baseline": fastest / auto,
        "auto_vs_best_candidate": min(candidates) / auto,
        "packed_vs_one": one / seconds[Run("packed", lanes, workers)],
    }
    return {
        **{name: measure.significant(ratio) for name, ratio in ratios.items()},
        "engine": measured.engine,
        "lanes": measured.width,
        "improvement": measure.significant((one - auto) / one),
        "compile_seconds": round(measured.compile_seconds, 3),
    }


def table(name: str, measured: Measured) -> Table:
    """Microseconds of a lane-step, and throughput as a multiple of `one`."""
    from rich.table import Table

    seconds = measured.seconds
    lanes = sorted({run.lanes for run in seconds})
    result = Table(title=f"{name}: us a lane-step (x one)", title_justify="left")
    result.add_column("")
    for count in lanes:
        result.add_column(f"{count} lane{'s' if count > 1 else ''}", justify="right")
    for kind in dict.fromkeys((run.name, run.workers) for run in seconds):
        label, workers = kind
        cells = []
        for count in lanes:
            value = seconds.get(Run(label, count, workers))
            ratio = seconds[Run("one")] / value if value else 0
            cells.append(f"{value * 1e6:.1f} ({ratio:.2f})" if value else "")
        if label == "auto":
            label = f"auto ({measured.engine}, {measured.width} wide)"
        if workers > 1:
            label += f", {workers} workers"
        result.add_row(label, *cells)
    return result


def plot(measured: Mapping[str, Measured], path: pathlib.Path) -> None:
    """Draws throughput as a multiple of `one`, a group of bars a model."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(3.2 + 1.4 * len(measured), 4.2), layout="constrained")
    axes = picture.add_subplot()
    any_one = next(iter(measured.values()))
    runs = [Run(name) for name in baselines.NAMES if name != "one"]
    runs += [
        Run("solo", 1, any_one.workers),
        Run("packed", any_one.lanes, any_one.workers),
        Run("auto", any_one.lanes, any_one.workers),
    ]
    width = 0.8 / len(runs)
    for i, run in enumerate(runs):
        places = np.arange(len(measured)) + (i - (len(runs) - 1) / 2) * width
        speeds = [m.seconds[Run("one")] / m.seconds[run] for m in measured.values()]
        label = run.name if run.name != "packed" else f"{run.name}, {run.lanes} lanes"
        axes.bar(places, np.array(speeds) - 1, width, bottom=1, label=label)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xticks(range(len(measured)), list(measured))
    axes.set_ylabel("speed, x one trial at a time")
    axes.margins(x=0.01)
    axes.set_title(measure.device_name())
    picture.legend(loc="outside lower center", ncols=3, fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(path, dpi=150)


def chosen(flags: Flags) -> tuple[str, ...]:
    """The models that the flags ask for.

    Raises:
      ValueError: If a name, a lane count or the number of rounds is not valid.
    """
    default = models.DEFAULT | (models.LARGER if flags.full else {})
    names = flags.models or (("mlp_tiny",) if flags.smoke else tuple(default))
    for name in names:
        if name not in models.CASES:
            known = ", ".join(models.CASES)
            raise ValueError(f"models has {name!r}; it may have {known}")
    if not flags.lanes or min(flags.lanes) < 1:
        raise ValueError(f"lanes is {flags.lanes!r}; it must be whole numbers >= 1")
    if any(count & (count - 1) for count in flags.lanes):
        raise ValueError(f"lanes is {flags.lanes!r}; widths are powers of two")
    if flags.repeats < 1:
        raise ValueError(f"repeats is {flags.repeats!r}; it must be at least 1")
    return names


def main(args: Sequence[str] | None = None) -> None:
    """Runs the benchmark that the command line asks for."""
    import tyro

    program = "python -m experiments.step_time"
    flags = tyro.cli(Flags, prog=program, args=args, description=__doc__)
    try:
        names = chosen(flags)
    except ValueError as error:
        sys.exit(f"{program}: {error}")
    budget = SMOKE if flags.smoke else Budget(flags.repeats, flags.seconds)
    measured = {}
    for name in names:
        case = models.CASES[name]
        measured[name] = measure_case(case, flags.lanes, budget)
        print_table(table(name, measured[name]))
        print(flush=True)
    headline = {
        "device": measure.device_name(),
        "models": {name: figures(found) for name, found in measured.items()},
    }
    directory = measure.results_directory(flags.directory, flags.smoke)
    if directory is not None:
        path = measure.save(directory, "step_time", headline, runs=rows(measured))
        plot(measured, directory / "step_time.png")
        print(f"results: {path}, picture: {path.with_suffix('.png')}\n")
    print(json.dumps(headline), flush=True)


def rows(measured: Mapping[str, Measured]) -> list[dict[str, Any]]:
    """All measurements as plain records, times in microseconds a lane-step."""
    return [
        {"model": name, **run._asdict(), "us": measure.significant(1e6 * seconds)}
        for name, found in measured.items()
        for run, seconds in found.seconds.items()
    ]


if __name__ == "__main__":
    main()
