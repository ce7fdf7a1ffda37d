"""Time and memory of a pack against the number of models in it.

Claim: a pack saves more of the time the more models are in it (Liu et al., arXiv
2002.02885, find up to 40 % for two on a GPU and more for more), until the chip is full;
large batches fill it sooner. Its memory grows with each model, but by less than
programs of their own would take, since the data are there once.

    python -m experiments.pack_size
    python -m experiments.pack_size --families resnet --batch-sizes 32 --models 1 2 4
    python -m experiments.pack_size --smoke

Models of one configuration are trained as a pack (`packed`), against as many one after
the other (`solo`): with K models the improvement is `(K T_1 - T_K) / (K T_1)`. All
numbers of models take turns, warm and blocked, and the median of `--repeats` rounds
counts. The memory is what the compiled program takes: arguments, results and scratch,
with results that take over an argument's memory counted once. It includes the training
data, and no framework or driver, of which every process would have its own.

At full size there are 84 programs to compile, for a GPU. The smoke test takes two
families of small models and half a minute on two CPU cores. There, expect eight MLPs to
save about 30 % of the time and half the memory. Expect eight ResNets to lose some 15 %
of the time and to save hardly any memory: nearly all of it is scratch, for each.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
from rich.table import Table

from experiments import measure, study, timing
from jaxpack import executables
from jaxpack.report import print_table

Runs = list[dict[str, Any]]


@dataclasses.dataclass
class Flags(study.Flags):
    """The flags of this experiment."""

    optimizer: str = "adam"
    """The optimizer of all models."""
    models: tuple[int, ...] = ()
    """Numbers of models; powers of two up to 64 by default."""


def run(flags: Flags) -> dict[str, Any]:
    """Measures packs of every size, and gives the headline figures."""
    chosen = flags.configs([flags.optimizer])
    counts = flags.models or ((1, 2, 4, 8) if flags.smoke else (1, 2, 4, 8, 16, 32, 64))
    check_counts(counts)
    lab = study.laboratory(chosen, flags)
    runs: Runs = []
    with executables.disk_cache():
        for config in chosen:
            runs += measured(config, sorted({1, *counts}), lab, flags)
            print_table(table([run for run in runs if run["config"] == str(config)]))
    headline = figures(runs)
    directory = measure.results_directory(flags.directory, flags.smoke)
    if directory is not None:
        path = measure.save(directory, "pack_size", headline, runs=runs)
        plot(runs, directory / "pack_size.png")
        print(f"\nresults: {path}, picture: {path.with_suffix('.png')}")
    return headline


def check_counts(counts: Sequence[int]) -> None:
    """Checks numbers of models.

    Raises:
      ValueError: If one is not a whole number above 0.
    """
    for count in counts:
        if count < 1:
            raise ValueError(f"models has {count}; a pack has at least 1")


def measured(
    config: study.Config, counts: Sequence[int], lab: study.Lab, flags: Flags
) -> Runs:
    """Times packs of one configuration, as many sizes of them as fit into memory.

    Args:
      config: The configuration.
      counts: Numbers of models, ascending, the first of them 1.
      lab: What all timings have in common.
      flags: How long to measure.
    """
    spec, timers, memory = study.pack_spec(config, lab), {}, {}
    for count in counts:
        try:
            bundle = timing.filled([timing.widened(spec, count)], lab)
            timers[count] = timing.timer(bundle, flags.seconds)
            memory[count] = bundle.memory_bytes
        except jax.errors.JaxRuntimeError as error:
            if count == 1 or not executables.out_of_memory(error):
                raise
            print(f"{config}: {count} models do not fit into memory")
            break
    seconds = measure.interleave(timers, flags.repeats)
    return [
        {
            "config": str(config),
            "models": count,
            "us": measure.significant(1e6 * together),
            "us_alone": measure.significant(1e6 * count * seconds[1]),
            "improvement": round(study.improvement([seconds[1]] * count, together), 4),
            "memory_bytes": memory[count],
            "memory_bytes_alone": count * memory[1],
        }
        for count, together in seconds.items()
    ]


def figures(runs: Runs) -> dict[str, Any]:
    """The headline figures: for each configuration the largest pack and the best."""
    found = {}
    for config in dict.fromkeys(run["config"] for run in runs):
        packs = [r for r in runs if r["config"] == config and r["models"] > 1]
        if not packs:
            continue
        best = max(packs, key=lambda run: run["improvement"])
        largest = max(packs, key=lambda run: run["models"])
        memory = largest["memory_bytes"] / largest["memory_bytes_alone"]
        found[config] = {
            "best": best["improvement"],
            "best_models": best["models"],
            "largest": largest["improvement"],
            "largest_models": largest["models"],
            "memory_of_alone": round(memory, 4),
        }
    return {"device": measure.device_name(), "configurations": found}


def table(runs: Runs) -> Table:
    """The packs of one configuration, a row a size."""
    result = Table(title=runs[0]["config"])
    for name in ("models", "us a step", "one by one", "saved", "MB", "MB one each"):
        result.add_column(name, justify="right")
    for run in runs:
        result.add_row(
            str(run["models"]),
            f"{run['us']:,.0f}",
            f"{run['us_alone']:,.0f}",
            f"{100 * run['improvement']:.0f} %",
            f"{run['memory_bytes'] / 1e6:,.1f}",
            f"{run['memory_bytes_alone'] / 1e6:,.1f}",
        )
    return result


def plot(runs: Runs, path: pathlib.Path) -> None:
    """Draws improvement and memory against the number of models."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(9, 4), layout="constrained")
    left, right = picture.subplots(1, 2)
    for config in dict.fromkeys(run["config"] for run in runs):
        of_config = [run for run in runs if run["config"] == config]
        counts = [run["models"] for run in of_config]
        saved = [run["improvement"] for run in of_config]
        (line,) = left.plot(counts, saved, "o-", label=config)
        for name, style in (("memory_bytes", "o-"), ("memory_bytes_alone", ":")):
            megabytes = [run[name] / 1e6 for run in of_config]
            right.plot(counts, megabytes, style, color=line.get_color())
    left.axhline(0, color="black", linewidth=0.8)
    left.set_ylabel("time saved, share")
    right.set_ylabel("memory, MB (dotted: one program each)")
    right.set_yscale("log", base=2)
    right.yaxis.set_major_formatter("{x:g}")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("models in the pack")
    picture.suptitle(measure.device_name())
    picture.legend(loc="outside lower center", ncols=4, fontsize="small")
    picture.savefig(path, dpi=150)


def main(args: Sequence[str] | None = None) -> None:
    """Runs the experiment that the command line asks for."""
    study.command("pack_size", Flags, run, __doc__, args)


if __name__ == "__main__":
    main()
