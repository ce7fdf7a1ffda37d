"""What the sweeps among the experiments share: their flags and how they end."""

from __future__ import annotations

import dataclasses
import datetime
import json
import pathlib
from typing import Any, Literal

from rich.table import Table

import jaxpack as jp
from jaxpack.progress import format_number
from jaxpack.report import print_table, trials_table
from jaxpack.worker import Stats


@dataclasses.dataclass
class Flags:
    """The flags of a sweep."""

    engine: Literal["auto", "packed", "solo"] = "auto"
    """Many trials in one program (packed), one in each (solo), or what suits (auto)."""
    max_resource: int = 27
    """Epochs that a trial gets which is never stopped, Hyperband's R."""
    reduction_factor: int = 3
    """One in so many trials is promoted from rung to rung, Hyperband's eta."""
    seed: int = 0
    """Fixes the trials, their weights, dropout and the order of the data."""
    directory: pathlib.Path | None = None
    """Where to write the results. By default a new folder in runs/."""
    max_lanes: int | None = None
    """Most trials to train in one program; by default what suits the device."""
    workers: int | None = None
    """Threads that train; by default one a CPU core, or one a GPU."""
    overwrite: bool = False
    """Move the results of an earlier sweep in the directory aside, not refuse."""
    quiet: bool = False
    """Show neither the plan nor the progress, only the results."""


def run(name: str, task: jp.Task, space: jp.Space, flags: Flags) -> jp.SweepResult:
    """Runs Hyperband as the flags say, and prints what came of it.

    Args:
      name: Names the folder in `runs/`, if no directory is given.
      task: What is trained.
      space: The hparams to try.
      flags: The flags.
    """
    directory = flags.directory or _new_directory(name)
    result = jp.sweep(
        task,
        space,
        jp.Hyperband(flags.max_resource, flags.reduction_factor),
        seed=flags.seed,
        directory=directory,
        engine=flags.engine,
        max_lanes=flags.max_lanes,
        workers=flags.workers,
        overwrite=flags.overwrite,
        progress=not flags.quiet,
    )
    _print_outcome(result, directory)
    print(json.dumps(headline(result)), flush=True)
    return result


def headline(result: jp.SweepResult) -> dict[str, Any]:
    """The figures of a sweep for the last line of output; times in seconds."""
    stats = result.stats
    epochs = stats.lane_epochs
    engines = sorted({pack["engine"] for pack in stats.packs})
    return {
        "best_score": result.best_score,
        "test_score": (result.test_metrics or {}).get(result.metric),
        "trials": len(result.trials),
        "lane_epochs": int(epochs) if epochs == int(epochs) else epochs,
        "lane_steps": stats.lane_steps,
        "compiles": stats.compiles,
        "compile_seconds": round(stats.compile_seconds, 3),
        "train_seconds": round(stats.train_seconds, 3),
        "wall_seconds": round(stats.wall_seconds, 3),
        "engine": "+".join(engines),
        "occupancy": round(stats.occupancy, 4),
    }


def _print_outcome(result: jp.SweepResult, directory: pathlib.Path) -> None:
    print()
    top = result.trials, result.metric, result.mode
    print_table(trials_table(*top), trials_table(*top, narrow=True))
    best, test = result.best, (result.test_metrics or {}).get(result.metric)
    print(
        f"\ntrial {best.trial_id} is the best: {result.metric} "
        f"{format_number(best.score)} on the validation split, "
        f"{format_number(test)} on the test split\n"
    )
    print_table(stats_table(result.stats))
    picture = result.plot(directory / "report" / "rungs.png")
    print(f"\nscores by rung: {picture}")
    print(f"all results: {directory}\n")


def stats_table(stats: Stats) -> Table:
    """What a sweep has cost, as a table of two columns."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(justify="right")
    for name in ("lane_steps", "lane_epochs", "compiles", "swaps", "workers"):
        table.add_row(name.replace("_", "-"), format_number(getattr(stats, name)))
    table.add_row("lanes busy", f"{100 * stats.occupancy:.1f} %")
    for name in ("compile", "train", "eval", "wall"):
        seconds = getattr(stats, f"{name}_seconds")
        table.add_row(f"{name} time", f"{format_number(seconds)} s")
    return table


def _new_directory(name: str) -> pathlib.Path:
    """Makes a folder in `runs/` that nobody else has."""
    now = f"{datetime.datetime.now(datetime.UTC):%Y%m%d-%H%M%S}"
    path = pathlib.Path("runs", f"{name}-{now}")
    count = 1
    while True:
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            count += 1
            path = pathlib.Path("runs", f"{name}-{now}-{count}")
