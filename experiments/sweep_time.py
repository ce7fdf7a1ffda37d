"""Time of a whole Hyperband sweep: jaxpack against one trial at a time.

Claim: a sweep over learning rate, momentum, weight decay and dropout on 5000 MNIST
images takes a fraction of the time of a script that trains the same trials one after
another, most of all once compilation is counted.

    python -m experiments.sweep_time
    python -m experiments.sweep_time --sweeps mlp_R81 cnn_R81
    python -m experiments.sweep_time --full

Every row trains the same trials and promotes by the same rule:

- `one_recompile`, `one`, `one_scan_conv`: see `experiments.baselines`;
- `packed, within rungs`: packs of one rung of one bracket at a time, with a barrier
  after each, as the paper's pack-aware Hyperband has them;
- `packed` and `auto`: all brackets at once, as `jp.sweep` runs them.

*all* is the time of everything from an empty process: tracing, compilation, training
and evaluation. *steady* is training and evaluation with everything compiled, measured
by a second sweep with another seed. Only loading the data is left out. `auto` finds
jaxpack's compilation cache on disk as it is, so a second run of the command compiles
less; the column *compiled* says how many programs were compiled. To count from nothing:

    XDG_CACHE_HOME=$(mktemp -d) python -m experiments.sweep_time

A row other than `auto` that would take longer than `--limit` seconds is cut:
compilation is counted as it is, and the rest is scaled by the lane-steps, readings and
trials left out. Such rows are marked with "~".

The bound is what free packing could give, lanes that cost nothing: all epochs over
those of the longest chain of rungs that must follow each other. It is a bound on
packing alone: workers on more cores and fewer dispatches come on top.

Expect about six minutes for the default sweeps on two CPU cores.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import sys
import tempfile
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jaxpack as jp
from experiments import measure, sweep_runs
from jaxpack.report import print_table
from jaxpack.schedulers import Scheduler

if TYPE_CHECKING:
    from rich.table import Table

DEFAULT = ("mlp_R27", "cnn_R27")
FULL = ("mlp_R27", "mlp_R81", "cnn_R27", "cnn_R81")


@dataclasses.dataclass
class Flags:
    """The flags of this benchmark."""

    sweeps: tuple[str, ...] = ()
    """Names in `experiments.sweep_runs.SWEEPS`; mlp_R27 and cnn_R27 by default."""
    full: bool = False
    """All four sweeps on MNIST."""
    smoke: bool = False
    """A tiny sweep that only shows that all of it works."""
    repeats: int = 1
    """Steady sweeps of jaxpack in turn, each with a seed of its own."""
    limit: float = 20.0
    """Seconds after which a row other than `auto` is cut and scaled."""
    directory: pathlib.Path | None = None
    """Where to write results. By default a folder of the device's in results/."""


def time_sweep(
    sweep: sweep_runs.Sweep, limit: float, repeats: int
) -> dict[str, sweep_runs.Outcome]:
    """Times every way of running one sweep."""
    problem, scheduler = sweep.problem(), jp.Hyperband(sweep.max_resource)
    rows = {
        "auto": sweep_runs.time_library(
            problem, scheduler, "auto", repeats, sweep_runs.across_brackets
        )
    }
    for name, run in (
        ("packed", sweep_runs.across_brackets),
        ("packed, within rungs", sweep_runs.within_rungs),
    ):
        with _empty_cache():  # Not the programs that `auto` has left there.
            rows[name] = sweep_runs.time_library(
                problem, scheduler, "packed", repeats, run, limit
            )
    for name in ("one", "one_scan_conv"):
        rows[name] = sweep_runs.time_baseline(name, problem, scheduler, limit)
    if sweep.max_resource <= 27:
        name = "one_recompile"
        rows[name] = sweep_runs.time_baseline(name, problem, scheduler, limit)
    return rows


def figures(
    rows: Mapping[str, sweep_runs.Outcome], scheduler: Scheduler
) -> dict[str, Any]:
    """The headline figures of a sweep; a ratio is None where a row was not run."""
    auto = rows["auto"]

    def ratio(name: str, what: str) -> float | None:
        seconds = getattr(rows[name], what) if name in rows else None
        return seconds and measure.significant(seconds / getattr(auto, what))

    return {
        "steady_vs_one": ratio("one", "steady"),
        "steady_vs_one_scan": ratio("one_scan_conv", "steady"),
        "all_vs_one": ratio("one", "all"),
        "all_vs_one_recompile": ratio("one_recompile", "all"),
        "compile_seconds": round(auto.compile_seconds, 3),
        "compiles_after_first_segment": auto.late,
        "occupancy": auto.occupancy and round(auto.occupancy, 4),
        "bound": measure.significant(sweep_runs.bound(scheduler)),
    }


def table(
    name: str, rows: Mapping[str, sweep_runs.Outcome], scheduler: Scheduler
) -> Table:
    """Seconds of each row, and its speed as a multiple of `one`."""
    from rich.table import Table

    epochs = scheduler.total_resource()
    title = f"{name}: {scheduler.num_trials} trials, {epochs} epochs"
    result = Table(title=title, title_justify="left")
    result.add_column("")
    for column in ("all s", "x one", "steady s", "x one", "compiling s", "compiled"):
        result.add_column(column, justify="right")
    for column in ("run", "bound", "best"):
        result.add_column(column, justify="right")
    one = rows["one"]
    for label, row in rows.items():
        steady = row.steady or 0.0
        packs = label.startswith(("packed", "auto"))
        limit = sweep_runs.bound(scheduler, within="within" in label)
        mark = "" if row.share == 1 else "~"
        result.add_row(
            label,
            f"{mark}{row.all:.1f}",
            f"{one.all / row.all:.2f}",
            f"{mark}{steady:.1f}" if steady else "",
            f"{one.steady / steady:.2f}" if steady and one.steady else "",
            f"{row.compile_seconds:.2f}",
            "" if row.compiles is None else str(row.compiles),
            f"{100 * row.share:.0f} %",
            f"{limit:.1f}" if packs else "",
            "" if row.best is None else f"{row.best:.3f}",
        )
    return result


def plot(
    results: Mapping[str, Mapping[str, sweep_runs.Outcome]], path: pathlib.Path
) -> None:
    """Draws the time of every row of each sweep, compilation on top."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(4.2 * len(results), 3.4), layout="constrained")
    panels = picture.subplots(1, len(results), squeeze=False)[0]
    for axes, (name, rows) in zip(panels, results.items(), strict=True):
        labels = [f"{'~' * (row.share < 1)}{label}" for label, row in rows.items()]
        steady = [row.steady or 0.0 for row in rows.values()]
        everything = [row.all for row in rows.values()]
        axes.barh(labels, everything, color="lightgrey", label="everything")
        axes.barh(labels, steady, height=0.5, label="steady")
        axes.invert_yaxis()
        axes.set_xlabel("seconds")
        axes.set_title(name)
    panels[0].legend(frameon=False, fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(path, dpi=150)


def chosen(flags: Flags) -> tuple[str, ...]:
    """The sweeps that the flags ask for.

    Raises:
      ValueError: If a name or a number is not valid.
    """
    default = FULL if flags.full else DEFAULT
    names = flags.sweeps or (("digits_R3",) if flags.smoke else default)
    for name in names:
        if name not in sweep_runs.SWEEPS:
            raise ValueError(
                f"sweeps has {name!r}; it may have {', '.join(sweep_runs.SWEEPS)}"
            )
    if flags.repeats < 1:
        raise ValueError(f"repeats is {flags.repeats!r}; it must be at least 1")
    return names


def main(args: Sequence[str] | None = None) -> None:
    """Runs the benchmark that the command line asks for."""
    import tyro

    program = "python -m experiments.sweep_time"
    flags = tyro.cli(Flags, prog=program, args=args, description=__doc__)
    try:
        names = chosen(flags)
    except ValueError as error:
        sys.exit(f"{program}: {error}")
    results, headline = {}, {}
    for name in names:
        scheduler = jp.Hyperband(sweep_runs.SWEEPS[name].max_resource)
        sweep = sweep_runs.SWEEPS[name]
        rows = results[name] = time_sweep(sweep, flags.limit, flags.repeats)
        headline[name] = figures(rows, scheduler)
        print_table(table(name, rows, scheduler))
        if any(row.share < 1 for row in rows.values()):
            print("~ a part was run, and the rest scaled by lane-steps")
        print(flush=True)
    directory = measure.results_directory(flags.directory, flags.smoke)
    if directory is not None:
        rows = {
            name: {label: row._asdict() for label, row in rows.items()}
            for name, rows in results.items()
        }
        path = measure.save(directory, "sweep_time", {"sweeps": headline}, rows=rows)
        plot(results, directory / "sweep_time.png")
        print(f"results: {path}, picture: {path.with_suffix('.png')}\n")
    print(json.dumps({"sweeps": headline}), flush=True)


@contextlib.contextmanager
def _empty_cache() -> Generator[None]:
    """Has jaxpack keep its programs in an empty directory, while it lasts."""
    before = os.environ.get("XDG_CACHE_HOME")
    with tempfile.TemporaryDirectory() as directory:
        os.environ["XDG_CACHE_HOME"] = directory
        try:
            yield
        finally:
            del os.environ["XDG_CACHE_HOME"]
            if before is not None:
                os.environ["XDG_CACHE_HOME"] = before


if __name__ == "__main__":
    main()
