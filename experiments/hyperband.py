"""Hyperband one by one, resumed, by packs within rungs, and across brackets.

Claim: Hyperband with packing (the paper's section 6: R=81, eta=3, packs of 9 within a
rung) takes a fraction of the time of the original, which trains one trial at a time
and starts every trial afresh at each rung; and running all brackets at once, with
lanes handed from trial to trial, takes less than packing within rungs, for the same
promotions.

    python -m experiments.hyperband
    python -m experiments.hyperband --smoke

| way | trials at a time | a promoted trial |
|---|---|---|
| `original` | one | starts afresh |
| `resumed` | one | goes on |
| `within_rungs` | packs of 9 of one rung of one bracket, each to its end | goes on |
| `across_brackets` | as many as there are lanes, of any rung and bracket | goes on |

Expect, on a GPU, about the speed-ups of the bounds at small widths. On a CPU the engine
is `solo`, whose lanes are the cores: with two of them, at most twice the speed. The
bound of a way is what lanes that cost nothing would gain over `original`, with as many
lanes as are used and with any number.

All ways of one engine come to scores equal to the bit, and so to the same promotions.
The `packed` engine rounds otherwise than `solo`: how many promotions that changes is
reported, with the rank correlation of the scores. Its packs of 9 are timed under each
of the paper's packing policies, too.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

import jaxpack as jp
from experiments import measure, paper, rungs, sweep_runs
from jaxpack import policies
from jaxpack.report import print_table
from jaxpack.schedulers import Scheduler

if TYPE_CHECKING:
    from rich.table import Table

WAYS = ("original", "resumed", "within_rungs", "across_brackets")


@dataclasses.dataclass
class Flags:
    """The flags of this experiment."""

    smoke: bool = False
    """A small MLP on the 8x8 digits and R=9, for a minute on two cores."""
    max_resource: int = 81
    """Epochs that a trial gets which is never stopped, Hyperband's R."""
    size: int = 9
    """Trials of a pack."""
    repeats: int = 1
    """How often each way is timed, in turn; the median counts. Policies are once."""
    seed: int = 0
    """Fixes the trials, their weights and the order of the data."""
    engine: str = dataclasses.field(default_factory=paper.default_engine)
    """The engine of packs; trials one by one are always `solo`."""
    workers: int | None = None
    """Worker threads of packs; one a core, or one a GPU, by default."""
    dataset: str = "tfds:cifar10"
    """The data."""
    model: str = "densenet"
    """The model: densenet or mlp."""
    batch_sizes: tuple[int, ...] = paper.BATCH_SIZES
    """Batch sizes of the space; each makes a program of its own."""
    directory: pathlib.Path | None = None
    """Where to write results. By default a folder of the device's in results/."""


def run(flags: Flags) -> dict[str, Any]:
    """Runs every way in turn, and returns the headline figures."""
    sizes = flags.batch_sizes
    problem = paper.Problem(flags.model, flags.dataset, batch_sizes=sizes)
    if flags.smoke:
        problem = paper.SMOKE
        flags = dataclasses.replace(flags, max_resource=9, repeats=5)
    scheduler = jp.Hyperband(flags.max_resource)
    given = problem.task, problem.space, scheduler
    ways = _ways(given, flags)
    # Compiles everything, so that all runs are timed warm.
    ways["across_brackets"](), ways["resumed"]()
    runs, seconds = timed(ways, flags.repeats)
    packs = {
        f"packed, {name}": functools.partial(
            rungs.by_rungs, *given, engine="packed", policy=name, size=flags.size
        )
        for name in policies.NAMES[1:]
    }
    packs["packed, across_brackets"] = functools.partial(
        rungs.across_brackets, *given, engine="packed", max_lanes=flags.size
    )
    packs = {
        name: functools.partial(way, seed=flags.seed, workers=flags.workers)
        for name, way in packs.items()
    }
    for way in packs.values():
        way()
    of_packs, seconds_of_packs = timed(packs, 1)
    lanes = flags.size if flags.engine == "packed" else 1
    lanes *= flags.workers or measure.num_workers()
    figures = {
        "same_promotions": same_scores(runs, flags.engine),
        "seconds": seconds,
        "bounds": {
            "lanes": lanes,
            "with_these_lanes": bounds(scheduler, lanes),
            "any": bounds(scheduler, None),
        },
        "speed_up": {
            way: round(seconds["original"] / s, 3) for way, s in seconds.items()
        },
        "lane_epochs": {way: each.lane_epochs for way, each in runs.items()},
        "best": {way: each.best for way, each in runs.items()},
        "packed_seconds": seconds_of_packs,
        "packed_against_solo": difference(
            runs["resumed"], of_packs["packed, across_brackets"]
        ),
    }
    print_table(table(runs | of_packs, seconds | seconds_of_packs, figures["bounds"]))
    directory = measure.results_directory(flags.directory, flags.smoke)
    if directory is not None:
        asked = dataclasses.asdict(dataclasses.replace(flags, directory=None))
        settings = {"settings": asked, "problem": repr(problem)}
        path = measure.save(directory, "hyperband", figures, **_plain(settings))
        plot(seconds | seconds_of_packs, path.with_suffix(".png"))
        print(f"results: {path}")
    return figures


def timed(
    ways: Mapping[str, Callable[[], rungs.Run]], repeats: int
) -> tuple[dict[str, rungs.Run], dict[str, float]]:
    """Runs all ways in turn, again and again; a run of each, and median seconds."""
    runs: dict[str, rungs.Run] = {}

    def seconds_of(way: str) -> float:
        runs[way] = ways[way]()
        return runs[way].seconds

    calls = {way: functools.partial(seconds_of, way) for way in ways}
    seconds = measure.interleave(calls, repeats)
    return runs, {way: round(s, 3) for way, s in seconds.items()}


def same_scores(runs: Mapping[str, rungs.Run], engine: str) -> bool:
    """Whether all ways of one engine have the same readings, to the bit."""
    one_by_one = ("original", "resumed") if engine == "solo" else ()
    first = runs["across_brackets"].scores
    return all(runs[way].scores == first for way in (*one_by_one, "within_rungs"))


def bounds(scheduler: Scheduler, lanes: int | None) -> dict[str, float]:
    """What lanes that cost nothing could gain over `original`, by way.

    Args:
      scheduler: Hyperband.
      lanes: How many there are; None for any number.

    Examples:
      >>> bounds(jp.Hyperband(81), None)
      {'resumed': 1.203, 'within_rungs': 4.696, 'across_brackets': 23.48}
      >>> bounds(jp.Hyperband(81), 2)["across_brackets"]
      2.406
    """
    resumed = scheduler.total_resource(resume=False) / scheduler.total_resource()
    free = {
        "resumed": 1.0,
        "within_rungs": sweep_runs.bound(scheduler, within=True),
        "across_brackets": sweep_runs.bound(scheduler),
    }
    if lanes is not None:
        # A rung takes as many rounds as its trials need.
        rounds, before = 0, 0
        for bracket in scheduler.brackets():
            before = 0
            for trials, resource in bracket:
                rounds += -(-trials // lanes) * (resource - before)
                before = resource
        free["within_rungs"] = scheduler.total_resource() / rounds
        free["across_brackets"] = min(lanes, free["across_brackets"])
    return {way: measure.significant(resumed * gain) for way, gain in free.items()}


def difference(one: rungs.Run, other: rungs.Run) -> dict[str, Any]:
    """How two runs of the same trials differ.

    Returns:
      The promotions of the first that the second did not make, of how many, and the
      rank correlation of the accuracies that both have read (1 is the same order).
    """
    both = [
        (one.scores[place], other.scores[place])
        for place in one.scores.keys() & other.scores.keys()
    ]
    pairs = [(a[0], b[0]) for a, b in both if a is not None and b is not None]
    ranks = pd.DataFrame(pairs, columns=["one", "other"]).rank()
    return {
        "changed_promotions": len(one.promoted - other.promoted),
        "promotions": len(one.promoted),
        "rank_correlation": round(float(ranks["one"].corr(ranks["other"])), 4),
    }


def table(
    runs: Mapping[str, rungs.Run],
    seconds: Mapping[str, float],
    limits: Mapping[str, Any],
) -> Table:
    """A row a way: seconds, speed against `original`, its bound, epochs, best score."""
    from rich.table import Table

    result = Table(title="Hyperband", title_justify="left")
    result.add_column("")
    for column in ("s", "x original", "bound", "epochs", "best"):
        result.add_column(column, justify="right")
    for way, each in runs.items():
        limit = limits["with_these_lanes"].get(way)
        result.add_row(
            way,
            f"{seconds[way]:.2f}",
            f"{seconds['original'] / seconds[way]:.2f}",
            "" if limit is None else f"{limit:.2f}",
            f"{each.lane_epochs:g}",
            f"{each.best:.3f}",
        )
    return result


def plot(seconds: Mapping[str, float], path: pathlib.Path) -> None:
    """Draws the seconds of each way."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(5.5, 3), layout="constrained")
    axes = picture.subplots()
    axes.barh(list(seconds), list(seconds.values()))
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.set_title("Hyperband")
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(path, dpi=150)


def _ways(given: Any, flags: Flags) -> dict[str, Callable[[], rungs.Run]]:
    alone = {"size": 1, "engine": "solo", "workers": 1, "seed": flags.seed}
    packs = {"engine": flags.engine, "workers": flags.workers, "seed": flags.seed}
    by_rungs = functools.partial(rungs.by_rungs, *given)
    across = functools.partial(rungs.across_brackets, *given)
    return {
        "original": functools.partial(by_rungs, restart=True, **alone),
        "resumed": functools.partial(by_rungs, **alone),
        "within_rungs": functools.partial(by_rungs, size=flags.size, **packs),
        "across_brackets": functools.partial(across, max_lanes=flags.size, **packs),
    }


def _plain(settings: Any) -> Any:
    """The same, of what JSON has."""
    return json.loads(json.dumps(settings, default=str))


def main(args: Sequence[str] | None = None) -> None:
    """Runs the experiment that the command line asks for."""
    import tyro

    program = "python -m experiments.hyperband"
    flags = tyro.cli(Flags, prog=program, args=args, description=__doc__)
    print(json.dumps(run(flags)), flush=True)


if __name__ == "__main__":
    main()
