"""One input pipeline that feeds all models of a pack, against one for each.

Claim: models that train on the same batches need them read, prepared and moved to the
device once, not once for each model; the pack of Liu et al. (arXiv 2002.02885) is built
so. What that saves grows with the number of models and with the share of a step that
the input takes: most where batches come from the host and models are small, next to
nothing where the data are on the device.

    python -m experiments.shared_input
    python -m experiments.shared_input --families mlp --models 32
    python -m experiments.shared_input --smoke

Two sources of batches: the *device*, where a step gathers the batch's rows from data
that are there already, and the *host*, where each batch is gathered, turned from bytes
to numbers and copied to the device while the one before is computed. For each source
three ways to take a step of all models:

- `alone`: one model after the other, each with its own input;
- `own`: one pack in which every model has an input of its own;
- `shared`: the same pack with one input for all.

So `shared` against `own` is what sharing saves, and `own` against `alone` what packing
does. All of them take turns, warm and blocked, and the median of `--repeats` rounds
counts. That they come to the same weights is checked.

At full size there are 72 programs to compile, for a GPU. The smoke test takes two
families of small models and about a minute on two CPU cores, where a copy to the device
is only one in memory. There, expect sharing to save 5 % to 10 % with batches from the
host. With batches from the device it loses for the MLP, by up to a quarter.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from rich.table import Table

from experiments import feeding, measure, study, timing
from experiments.feeding import INPUTS, SOURCES
from jaxpack import executables
from jaxpack.report import print_table

MAKE = {"device": feeding.from_device, "host": feeding.from_host}
CHECKED_STEPS = 4
"""Steps after which the weights are compared."""
TOLERANCE = 0.2
"""How far apart they may be, as a share of how far they have come."""


@dataclasses.dataclass
class Flags(study.Flags):
    """The flags of this experiment."""

    optimizer: str = "adam"
    """The optimizer of all models."""
    models: int | None = None
    """Models in a pack; 16 by default."""


def run(flags: Flags) -> dict[str, Any]:
    """Measures every source and input, and gives the headline figures.

    Raises:
      RuntimeError: If the same models come to other weights by another input.
    """
    chosen = flags.configs([flags.optimizer])
    default = 4 if flags.smoke else 16
    models = default if flags.models is None else flags.models
    if models < 1:
        raise ValueError(f"models is {models}; a pack has at least 1")
    lab = study.laboratory(chosen, flags)
    runs = []
    with executables.disk_cache():
        for config in chosen:
            runs.append(measured(config, models, lab, flags))
            print_table(table(runs[-1]))
    headline = figures(runs)
    directory = measure.results_directory(flags.directory, flags.smoke)
    if directory is not None:
        path = measure.save(directory, "shared_input", headline, runs=runs)
        plot(runs, directory / "shared_input.png")
        print(f"\nresults: {path}, picture: {path.with_suffix('.png')}")
    return headline


def measured(
    config: study.Config, models: int, lab: study.Lab, flags: Flags
) -> dict[str, Any]:
    """Times one configuration by every source and input.

    Returns:
      Microseconds of a step of all models, by source and input, the bytes that a step
      takes from the host, and how far the weights are apart, as a share of their way.
    """
    pack = feeding.make_pack(config, models, lab)
    most = lab.feed.window * pack.program.steps_per_epoch({})
    timers, weights = {}, {}
    for source, make in MAKE.items():
        for name in INPUTS:
            train = make(pack, name)
            states = train(CHECKED_STEPS)[1]
            weights[source, name] = feeding.first(states, name).params
            timers[source, name] = timing.paced(
                lambda steps, train=train: train(steps)[0] / steps, flags.seconds, most
            )
    start, end = pack.states[0].params, weights["device", "alone"]
    apart = [distance(each, end) for each in weights.values()]
    difference = float(np.max(apart)) / distance(start, end)
    if not difference <= TOLERANCE:
        raise RuntimeError(
            f"{config}: the weights of one model are {difference:.2g} of their way "
            "apart by different inputs"
        )
    seconds = measure.interleave(timers, flags.repeats)
    scale = {"alone": models, "own": 1, "shared": 1}
    batch = config.batch_size * (lab.feed.train[0][0].nbytes + 4)
    return {
        "config": str(config),
        "models": models,
        "us": {
            source: {
                name: measure.significant(1e6 * scale[name] * seconds[source, name])
                for name in INPUTS
            }
            for source in SOURCES
        },
        "bytes": {"alone": models * batch, "own": models * batch, "shared": batch},
        "difference": measure.significant(difference),
    }


def distance(a: Any, b: Any) -> float:
    """The Euclidean distance of two trees of weights.

    Examples:
      >>> distance({"w": np.zeros(2)}, {"w": np.array([3.0, 4.0])})
      5.0
    """
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return float(sum(((np.asarray(x) - y) ** 2).sum() for x, y in pairs) ** 0.5)


def figures(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The headline figures: the share of the time that each of the two saves."""

    def saved(us: Mapping[str, float], before: str, after: str) -> float:
        return round(1 - us[after] / us[before], 4)

    found = {
        run["config"]: {
            source: {
                "sharing": saved(run["us"][source], "own", "shared"),
                "packing": saved(run["us"][source], "alone", "own"),
                "both": saved(run["us"][source], "alone", "shared"),
            }
            for source in SOURCES
        }
        for run in runs
    }
    return {
        "device": measure.device_name(),
        "models": runs[0]["models"],
        "saved": found,
        "difference": max(run["difference"] for run in runs),
    }


def table(run: Mapping[str, Any]) -> Table:
    """The times of one configuration."""
    result = Table(title=f"{run['config']}, {run['models']} models: us a step of all")
    result.add_column("batches from the")
    for name in INPUTS:
        result.add_column(name, justify="right")
    result.add_column("sharing saves", justify="right")
    for source, us in run["us"].items():
        share = 100 * (1 - us["shared"] / us["own"])
        times = [f"{us[name]:,.0f}" for name in INPUTS]
        result.add_row(source, *times, f"{share:.0f} %")
    megabytes = [f"{run['bytes'][name] / 1e6:.2f}" for name in INPUTS]
    result.add_row("MB from the host", *megabytes, "")
    return result


def plot(runs: Sequence[Mapping[str, Any]], path: pathlib.Path) -> None:
    """Draws the times of every configuration beside those of `alone`."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(3 + 1.2 * len(runs), 4), layout="constrained")
    panels = picture.subplots(1, len(SOURCES), sharey=True)
    for axes, source in zip(panels, SOURCES, strict=True):
        for i, name in enumerate(INPUTS):
            heights = [
                run["us"][source][name] / run["us"][source]["alone"] for run in runs
            ]
            axes.bar(np.arange(len(runs)) + (i - 1) * 0.27, heights, 0.27, label=name)
        names = [run["config"] for run in runs]
        axes.set_xticks(range(len(runs)), names, rotation=45, ha="right")
        axes.set_title(f"batches from the {source}")
    panels[0].set_ylabel("time of a step, x alone")
    handles, labels = panels[0].get_legend_handles_labels()
    picture.legend(handles, labels, loc="outside lower center", ncols=3)
    picture.suptitle(f"{runs[0]['models']} models, {measure.device_name()}")
    picture.savefig(path, dpi=150)


def main(args: Sequence[str] | None = None) -> None:
    """Runs the experiment that the command line asks for."""
    study.command("shared_input", Flags, run, __doc__, args)


if __name__ == "__main__":
    main()
