"""What a sweep prints at its end."""

from __future__ import annotations

import datetime
import pathlib
from typing import Any

from rich.table import Table

from jaxpack.progress import format_number
from jaxpack.report import print_table, trials_table
from jaxpack.sweep import SweepResult
from jaxpack.worker import Stats


def headline(result: SweepResult) -> dict[str, Any]:
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


def print_outcome(result: SweepResult) -> None:
    """Prints the best trials, the very best, what they cost, and where all of it is.

    Raises:
      RuntimeError: If no trial has a score.
    """
    best, test = result.best, (result.test_metrics or {}).get(result.metric)
    print()
    print_trials(result)
    tested = "" if test is None else f", {format_number(test)} on the test split"
    print(
        f"\ntrial {best.trial_id} is the best: {result.metric} "
        f"{format_number(best.score)} on the validation split{tested}"
    )
    for name, value in best.hparams.items():
        print(f"  {name} = {value!r}")
    if result.stopped is not None:
        print(f"the sweep was ended early, by {result.stopped}")
    print()
    if result.stats.lane_steps:
        print_table(stats_table(result.stats))
    else:
        print("nothing was left to train")
    if result.directory is not None:
        folder = result.directory / "report"
        print(f"\nscores by rung: {result.plot(folder / 'rungs.png')}")
        print(f"page: {folder / 'index.html'}")
        print(f"all results: {result.directory}\n")


def print_trials(result: SweepResult) -> None:
    """Prints a table of the best trials, as wide as there is room for."""
    top = result.trials, result.metric, result.mode
    print_table(trials_table(*top), trials_table(*top, narrow=True))


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


def new_directory(name: str) -> pathlib.Path:
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
