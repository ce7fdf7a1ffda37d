"""Every pair of the paper's 48 configurations: what does a pack of the two save?

Claim: packing two models into one program saves up to 40 % of the time of a training
step on a GPU, and how much depends on the network and the batch size (Liu et al.,
arXiv 2002.02885). Models that leave most of the chip idle alone gain the most.

    python -m experiments.pairwise
    python -m experiments.pairwise --families mlp resnet --optimizers adam sgd
    python -m experiments.pairwise --smoke

Like pairs are two lanes of one `packed` program, unlike ones two members of a `fused`
program, and each model alone is a `solo` program. The three of a pair take turns, warm
and blocked, and the median of `--repeats` rounds counts. The improvement is
`(T_a + T_b - T_pack) / (T_a + T_b)`: 0.5 if the second model is free, negative where
the pack is slower than one after the other.

At full size these are 1176 pairs, each with a program to compile: plan for hours on a
GPU. Every pair is saved when it is known, and the same command goes on where an earlier
one was stopped. The smoke test takes two families of small models and two optimizers,
about a minute on two CPU cores. There, expect a median from nothing to 8 % for unlike
pairs and nothing for like ones; single pairs differ by more than that between runs.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import pathlib
import statistics
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from rich.table import Table

from experiments import measure, study, timing
from jaxpack import executables
from jaxpack.report import print_table

Runs = list[dict[str, Any]]

SETTING = ("image_size", "smoke", "repeats", "seconds")
"""Flags that measurements of one file have in common."""


@dataclasses.dataclass
class Flags(study.Flags):
    """The flags of this experiment."""

    optimizers: tuple[str, ...] = ()
    """All four by default."""


def run(flags: Flags) -> dict[str, Any]:
    """Measures every pair, and gives the headline figures.

    A pair that does not fit into the device's memory has null for its improvement.
    """
    default = ("adam", "momentum") if flags.smoke else study.OPTIMIZERS
    chosen = flags.configs(flags.optimizers or default)
    directory = measure.results_directory(flags.directory, flags.smoke)
    setting = {name: getattr(flags, name) for name in SETTING}
    runs = [] if directory is None else known(directory / "pairwise.json", setting)
    with executables.disk_cache():
        for _ in measured(chosen, flags, runs):
            if directory is not None:
                found = figures(chosen, runs)
                measure.save(directory, "pairwise", found, setting=setting, runs=runs)
    print_table(table(chosen, runs))
    headline = figures(chosen, runs)
    if directory is not None:
        path = measure.save(directory, "pairwise", headline, setting=setting, runs=runs)
        plot(chosen, runs, directory / "pairwise.png")
        print(f"\nresults: {path}, picture: {path.with_suffix('.png')}")
    return headline


def measured(
    chosen: Sequence[study.Config], flags: Flags, runs: Runs
) -> Generator[None]:
    """Measures the pairs that are not in `runs` yet and adds them, one at a time."""
    lab = study.laboratory(chosen, flags)
    specs = {config: study.pack_spec(config, lab) for config in chosen}

    @functools.cache
    def alone(config: study.Config) -> Callable[[], float]:
        return timing.timer(timing.filled([specs[config]], lab), flags.seconds)

    done = {(run["a"], run["b"]) for run in runs}
    for a, b in itertools.combinations_with_replacement(chosen, 2):
        if (str(a), str(b)) in done:
            continue
        together = [specs[a], specs[b]] if a != b else [timing.widened(specs[a], 2)]
        pair = {"a": str(a), "b": str(b), "engine": "fused" if a != b else "packed"}
        try:
            timers = {
                "us_a": alone(a),
                "us_b": alone(b),
                "us_pack": timing.timer(timing.filled(together, lab), flags.seconds),
            }
            runs.append(pair | timed(timers, flags.repeats))
        except jax.errors.JaxRuntimeError as error:
            if not executables.out_of_memory(error):
                raise
            runs.append(pair | {"us_pack": None, "improvement": None})
        yield


def timed(timers: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    """Takes the times of a pair, in microseconds a step, and the improvement."""
    seconds = measure.interleave(timers, repeats)
    alone, together = [seconds["us_a"], seconds["us_b"]], seconds["us_pack"]
    saved = round(study.improvement(alone, together), 4)
    times = {name: measure.significant(1e6 * s) for name, s in seconds.items()}
    return times | {"improvement": saved}


def known(path: pathlib.Path, setting: Mapping[str, Any]) -> Runs:
    """The pairs of an earlier run, if it was of the same setting and environment."""
    if not path.exists():
        return []
    content = json.loads(path.read_text(encoding="utf-8"))
    here = {"setting": dict(setting), "environment": measure.environment()}
    return content["runs"] if all(content[k] == here[k] for k in here) else []


def improvements(
    chosen: Sequence[study.Config], runs: Runs
) -> dict[tuple[study.Config, study.Config], float]:
    """The improvement of each pair of these that has one, both ways round."""
    by_name = {str(config): config for config in chosen}
    found = {}
    for run in runs:
        a, b = by_name.get(run["a"]), by_name.get(run["b"])
        if a and b and run["improvement"] is not None:
            found[a, b] = found[b, a] = run["improvement"]
    return found


def figures(chosen: Sequence[study.Config], runs: Runs) -> dict[str, Any]:
    """The headline figures: improvements of like and of unlike pairs."""
    found = improvements(chosen, runs)
    pairs = itertools.combinations_with_replacement(chosen, 2)
    fitting = [pair for pair in pairs if pair in found]
    like = [found[a, b] for a, b in fitting if a == b]
    unlike = [found[a, b] for a, b in fitting if a != b]
    best = max(fitting, key=lambda pair: found[pair], default=())
    return {
        "device": measure.device_name(),
        "configurations": len(chosen),
        "pairs": len(like) + len(unlike),
        "like": study.summary(like) if like else None,
        "unlike": study.summary(unlike) if unlike else None,
        "best_pair": [str(config) for config in best],
    }


def table(chosen: Sequence[study.Config], runs: Runs) -> Table:
    """The median improvement of the pairs of each two families."""
    found = improvements(chosen, runs)
    families = list(dict.fromkeys(config.family for config in chosen))
    result = Table(title="time saved by packing two models, median of the pairs")
    result.add_column("")
    # Pairs of one configuration are packed, so they have a column of their own.
    for name in (*families, "itself"):
        result.add_column(name, justify="right")
    for row in families:
        cells: dict[str, list[float]] = {name: [] for name in (*families, "itself")}
        for (a, b), saved in found.items():
            if a.family == row:
                cells["itself" if a == b else b.family].append(saved)
        result.add_row(row, *map(_percent, cells.values()))
    return result


def _percent(values: Sequence[float]) -> str:
    return f"{100 * statistics.median(values):.0f} %" if values else ""


def plot(chosen: Sequence[study.Config], runs: Runs, path: pathlib.Path) -> None:
    """Draws the heat map of the improvements."""
    from matplotlib.figure import Figure

    found = improvements(chosen, runs)
    grid = np.array([[found.get((a, b), np.nan) for b in chosen] for a in chosen])
    picture = Figure(figsize=(3.5 + 0.2 * len(chosen),) * 2, layout="constrained")
    axes = picture.subplots()
    image = axes.imshow(grid, cmap="RdBu", vmin=-0.5, vmax=0.5)
    names = [str(config) for config in chosen]
    axes.set_xticks(range(len(names)), names, rotation=90, fontsize="small")
    axes.set_yticks(range(len(names)), names, fontsize="small")
    axes.set_title(f"time saved by packing two models\n{measure.device_name()}")
    picture.colorbar(image, label="share of the time", shrink=0.6, extend="min")
    picture.savefig(path, dpi=150)


def main(args: Sequence[str] | None = None) -> None:
    """Runs the experiment that the command line asks for."""
    study.command("pairwise", Flags, run, __doc__, args)


if __name__ == "__main__":
    main()
