"""`status`, `report`, `compare` and `export`: sweeps from their directories."""

from __future__ import annotations

import collections
import datetime
import itertools
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import tyro
from rich.table import Table

from jaxpack import exports, lock
from jaxpack.cli.errors import DONE, UsageError
from jaxpack.cli.flags import File, Folder, Name
from jaxpack.cli.outcome import print_trials
from jaxpack.load import load, rungs
from jaxpack.progress import RungCount, Snapshot, format_number, rung_table
from jaxpack.records import read_asked, read_journal
from jaxpack.report import print_table
from jaxpack.sweep import SweepResult
from jaxpack.types import RUNNING

Directory = Annotated[pathlib.Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
Directories = Annotated[
    tuple[pathlib.Path, ...],
    tyro.conf.Positional,
    tyro.conf.arg(metavar="DIR [DIR ...]", help_behavior_hint="(required)"),
]
SHOWN = 16
"""Trials named in a line."""

Url = Annotated[str | None, tyro.conf.arg(metavar="URL", help_behavior_hint="")]


def status(directory: Directory) -> int:
    """Shows how far a sweep is, running or not: its rungs, trials and best so far.

    It only reads, and may be called at any time, on any machine that sees the files.

        python -m jaxpack status runs/a

    Args:
      directory: The sweep's directory.
    """
    result, asked = load(directory), read_asked(directory)
    print(f"{directory}: {_state(result, directory)}")
    for line in _facts(result, asked):
        print(line)
    print()
    counts = tuple(map(RungCount.of, rungs(directory)))
    snapshot = Snapshot(result.stats, 0, counts, result.unit, result.metric)
    print_table(rung_table(snapshot))
    if result.incumbents:
        print()
        print_trials(result)
    return DONE


def report(directory: Directory, to: Folder = None) -> int:
    """Writes the page of a sweep, `index.html`, and its pictures.

    A sweep writes its page at its end; for one that runs, this shows it so far.

        python -m jaxpack report runs/a

    Args:
      directory: The sweep's directory.
      to: The folder to write to. By default `report` in the directory.
    """
    print(load(directory).report(to))
    return DONE


def compare(directories: Directories) -> int:
    """Puts sweeps side by side: the best of each, its cost, what was asked otherwise.

    Scores in a column are of the metric that the sweep ranked by. Lane-epochs are those
    of all its trials; the seconds are left out if no single call trained them all.

        python -m jaxpack compare runs/a runs/b

    Args:
      directories: The directories of the sweeps.
    """
    if not directories:
        raise UsageError("no directory is named; give those of the sweeps to compare")
    results = [load(directory) for directory in directories]
    table = _table(
        "sweep", "metric", "best", "test", "trials", "lane_epochs", "seconds"
    )
    for result in results:
        best = result.best_score if result.incumbents else None
        figures = (
            best,
            (result.test_metrics or {}).get(result.metric),
            len(result.trials),
            *_cost(result),
        )
        table.add_row(
            str(result.directory), result.metric, *map(format_number, figures)
        )
    print_table(table)
    different = list(_differences([read_asked(directory) for directory in directories]))
    if different:
        print("\nasked otherwise")
        table = _table("", *map(str, directories), justify="left")
        for row in different:
            table.add_row(*row)
        print_table(table)
    elif results[1:]:
        print("\nasked alike")
    return DONE


def export(
    directory: Directory,
    csv: File = None,
    parquet: File = None,
    optuna: Url = None,
    study: Name = None,
    tensorboard: Folder = None,
    readings: bool = False,
) -> int:
    """Gives a sweep to other tools, also one that is still running.

    Exported to the same Optuna storage again, a study gets what is new.

        python -m jaxpack export runs/a --csv a.csv --tensorboard events
        python -m jaxpack export runs/a --optuna sqlite:///sweeps.db

    Args:
      directory: The sweep's directory.
      csv: A table to write, a row a trial.
      parquet: The same as a Parquet file, which keeps the types.
      optuna: A storage of Optuna's, for a study of the sweep's name.
      study: Another name for the study.
      tensorboard: A folder for event files, a run a trial.
      readings: Write a row a reading to the tables, not a row a trial.
    """
    given: dict[str, Any] = {
        "csv": csv,
        "parquet": parquet,
        "optuna": optuna,
        "tensorboard": tensorboard,
    }
    wanted = {kind: target for kind, target in given.items() if target is not None}
    if not wanted:
        kinds = ", ".join(f"--{kind}" for kind in given)
        raise UsageError(f"nothing to export is named; give at least one of {kinds}")
    result = load(directory)
    writers: dict[str, Callable[[Any], Any]] = {
        "csv": lambda path: exports.to_csv(result, path, readings=readings),
        "parquet": lambda path: exports.to_parquet(result, path, readings=readings),
        "optuna": lambda url: exports.to_optuna(result, url, study),
        "tensorboard": lambda logdir: exports.to_tensorboard(result, logdir),
    }
    for kind, target in wanted.items():
        writers[kind](target)
        print(f"{kind}: {target}")
    return DONE


def _cost(result: SweepResult) -> tuple[float, float | None]:
    """The lane-epochs of all trials, and the seconds of the call if it trained them."""
    rows = [trial.history[-1] for trial in result.trials if trial.history]
    epochs = round(sum(row["epochs"] for row in rows), 6)
    in_parts = result.stats.lane_steps < sum(trial.steps for trial in result.trials)
    return epochs, None if in_parts else result.stats.wall_seconds or None


def _state(result: SweepResult, directory: pathlib.Path) -> str:
    """Whether a sweep has ended, is running, or has been left."""
    if result.ended:
        return f"ended early, by {result.stopped}" if result.stopped else "complete"
    holder = lock.holder(directory)
    if holder is None:
        return "not running; the same command goes on with it"
    return f"running, as {holder}"


def _facts(result: SweepResult, asked: dict[str, Any]) -> Iterator[str]:
    """What is known of a sweep, in a few lines."""
    statuses = collections.Counter(trial.status for trial in result.trials)
    trials = ", ".join(f"{n} {status}" for status, n in statuses.items())
    yield f"  begun {asked['created']}, on {asked['device']}"
    yield f"  {len(result.trials)} trials: {trials}"
    running = [t.trial_id for t in result.trials if t.status == RUNNING]
    if running:
        some = ", ".join(map(str, running[:SHOWN]))
        more = ", ..." if running[SHOWN:] else ""
        yield f"  running, or ready to: {some}{more}"
    engines = collections.Counter(pack["engine"] for pack in result.stats.packs)
    programs = ", ".join(f"{n} {engine}" for engine, n in engines.items())
    yield f"  programs: {programs}; {result.stats.workers} workers"
    lines = read_journal(result.directory or "")
    if lines and "time" in lines[-1]:
        age = datetime.timedelta(seconds=round(time.time() - lines[-1]["time"]))
        yield (
            f"  {len(lines)} readings, the last {age} ago, of trial "
            f"{lines[-1]['trial_id']}"
        )
    if result.incumbents:
        best = result.best
        yield (
            f"  best {result.metric} {format_number(best.score)}, trial "
            f"{best.trial_id} after {best.steps} steps"
        )
    if result.test_metrics:
        tested = result.test_metrics[result.metric]
        yield f"  on the test split {format_number(tested)}"


def _differences(asked: Sequence[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """A row for each thing that was not asked alike: its name, and each's value."""
    sweeps = [
        {
            "data": one["dataset"]["name"] or one["dataset"]["content_hash"][:12],
            "scheduler": one["scheduler"],
            "seed": one["seed"],
            "metric": f"{one['metric']}, {one['mode']}",
            "engines": "+".join(sorted({pack["engine"] for pack in one["plan"]})),
            "device": one["device"],
            **_flat(one["space"]),
        }
        for one in asked
    ]
    for name in dict.fromkeys(itertools.chain(*sweeps)):
        values = [str(sweep.get(name, "-")) for sweep in sweeps]
        if len(set(values)) > 1:
            yield name, *values


def _flat(space: dict[str, Any]) -> dict[str, Any]:
    """The dimensions of a described space, those of conditions after the condition."""
    flat: dict[str, Any] = {}
    for name, value in space.items():
        inner = value if isinstance(value, dict) else {}
        flat |= {f"{name} {key}": one for key, one in inner.items()}
        if not inner:
            flat[name] = value
    return flat


def _table(first: str, *names: str, justify: Any = "right") -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column(first, overflow="fold")
    for name in names:
        table.add_column(name, justify=justify, overflow="fold")
    return table
