"""Unlike architectures under one Hyperband: MLP, ResNet, MobileNetV2 and DenseNet.

Claim: architectures can be mixed in one sweep. Each is found to be a program of its
own and all are under one scheduler, and every trial has the score that it would have
had alone.

    python -m experiments.mixed
    python -m experiments.mixed --smoke
    python -m experiments.mixed --engine fused --check
    python -m experiments.mixed --time

`--check` trains every trial of the sweep again, one at a time in the engine `solo`, to
where it stopped, and compares the scores. With the engine `fused` unlike trials have
been side by side in one program. Expect scores equal to the bit where the sweep has
chosen `solo` itself, as on a CPU, and else equal but for single examples.

`--time` also measures a step of one trial of each family, all in one `fused` program
against each in its own, with one worker and with all, and says which of the two the
planner takes. Expect 1.0 to 1.3 times the speed with one worker and less than the speed
of `solo` with two.

The models are narrow and begin with the strides for large images, so that it takes
some minutes on two CPU cores.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import optax
from flax import linen as nn

import jaxpack as jp
from experiments import measure, study
from jaxpack.forecast import Work
from jaxpack.groups import kinds_of_trials
from jaxpack.planner import plan
from jaxpack.report import print_table
from jaxpack.train import steps_per_epoch
from jaxpack.types import FAILED, HParams, Trial

if TYPE_CHECKING:
    from rich.table import Table

MODELS = ("mlp", "resnet", "mobilenet", "densenet")

STAGES = ((1, 8, 1, 1), (6, 8, 1, 2), (6, 16, 1, 2), (6, 24, 1, 2))
"""Of the MobileNetV2: expansion, channels, repetitions and stride."""

LONG = 10**7
"""Steps for which the planner finds it worth to measure a fused program."""

SPACE = jp.Space(
    jp.when(model=("mlp", "densenet"))(dropout=jp.uniform(0.0, 0.3)),
    model=jp.choice(*MODELS),
    learning_rate=jp.log_uniform(1e-3, 1e-1),
    momentum=jp.uniform(0.5, 0.95),
)


@dataclasses.dataclass
class Flags:
    """The flags of this experiment."""

    smoke: bool = False
    """One training image in 30, fused, checked and timed."""
    max_resource: int = 9
    """Epochs that a trial gets which is never stopped, Hyperband's R."""
    every: int = 1
    """Only one in so many training images is used."""
    engine: Literal["auto", "packed", "solo", "fused"] = "auto"
    """The sweep's engine."""
    check: bool = False
    """Train every trial again, alone, and compare the scores."""
    time: bool = False
    """Measure a step of all families in one program against each alone."""
    tolerance: float = 0.01
    """Largest difference of accuracy that the check lets pass."""
    seed: int = 0
    """Fixes the trials, their weights and the order of the data."""
    directory: pathlib.Path | None = None
    """Where to write results. By default a folder of the device's in results/."""


def make_model(hp: jp.HParams) -> nn.Module:
    """A narrow model of the family asked for."""
    if hp.model == "mlp":
        return jp.models.MLP(64, dropout=hp.dropout, num_classes=9)
    if hp.model == "resnet":
        return jp.models.ResNet(8, width=8, stem="imagenet", num_classes=9)
    if hp.model == "mobilenet":
        return jp.models.MobileNetV2(
            stages=STAGES, features=64, stem="imagenet", num_classes=9
        )
    return jp.models.DenseNet(
        10, growth=8, stem="imagenet", dropout=hp.dropout, num_classes=9
    )


def make_optimizer(hp: jp.HParams) -> optax.GradientTransformation:
    """SGD with momentum."""
    return optax.sgd(hp.learning_rate, momentum=hp.momentum)


def make_task(every: int = 1) -> jp.Task:
    """The task, on one in `every` of the training images."""
    data = jp.data.load("photos")
    x, y = data.train
    name = data.name if every == 1 else f"photos/{every}"
    thinned = jp.data.Dataset.from_arrays(
        (x[::every], y[::every]), data.validation, name=name
    )
    return jp.Task(make_model, make_optimizer, thinned)


def check(task: jp.Task, result: jp.SweepResult, max_resource: int, seed: int) -> float:
    """Trains every trial of a sweep alone, to where it stopped.

    Args:
      task: The sweep's task.
      result: The sweep.
      max_resource: Its scheduler's, in epochs.
      seed: Its seed.

    Returns:
      The largest difference of a trial's score from that it has alone; infinity if a
      trial failed in one way and not in the other.
    """
    epochs = [
        round(trial.steps / steps_per_epoch(task, trial.hparams))
        for trial in result.trials
    ]
    alone = jp.train(
        task,
        [trial.hparams for trial in result.trials],
        epochs=epochs,
        horizon=max_resource,
        engine="solo",
        seed=seed,
    )
    largest = 0.0
    for together, single in zip(result.trials, alone, strict=True):
        if FAILED in (together.status, single.status):
            largest += 0.0 if together.status == single.status else float("inf")
            continue
        assert together.score is not None and single.score is not None
        largest = max(largest, abs(together.score - single.score))
    return largest


def fused_of_all(task: jp.Task) -> dict[str, dict[str, Any]]:
    """A step of one trial of each family, in one program and each alone.

    Returns:
      For one worker and for all of them: microseconds of a step of every trial, each
      alone and all together, the share of the time that fusing saves, and whether the
      planner fuses them.
    """
    values = {"learning_rate": 0.01, "momentum": 0.9}
    dropout = {"mlp": {"dropout": 0.1}, "densenet": {"dropout": 0.1}}
    trials = [
        Trial(i, HParams({"model": model} | values | dropout.get(model, {})))
        for i, model in enumerate(MODELS)
    ]
    steps = [LONG] * len(trials)
    found = {}
    for workers in sorted({1, measure.num_workers()}):
        made = plan(
            task,
            trials,
            kinds_of_trials(trials),
            steps,
            Work.of(steps),
            workers=workers,
        )
        measured = dict(made.packs[0].measured)
        alone, together = measured["each alone"], measured[f"fused of {len(trials)}"]
        found[f"{workers} worker{'s' if workers > 1 else ''}"] = {
            "us_alone": measure.significant(alone * len(trials)),
            "us_together": measure.significant(together * len(trials)),
            "improvement": round(study.improvement([alone], together), 4),
            "fused": bool(made.packs[0].fused),
        }
    return found


def run(flags: Flags) -> dict[str, Any]:
    """Runs the sweep, checks it if asked to, and returns the headline figures."""
    if flags.smoke:
        small: dict[str, Any] = {"max_resource": 9, "every": 30, "check": True}
        flags = dataclasses.replace(flags, engine="fused", time=True, **small)
    task = make_task(flags.every)
    result = jp.sweep(
        task,
        SPACE,
        jp.Hyperband(flags.max_resource),
        engine=flags.engine,
        seed=flags.seed,
        progress=not flags.smoke,
    )
    stats = result.stats
    figures: dict[str, Any] = {
        "trials": len(result.trials),
        "failed": sum(trial.status == FAILED for trial in result.trials),
        "models": sorted({trial.hparams.model for trial in result.trials}),
        "engines": sorted({pack["engine"] for pack in stats.packs}),
        "lane_epochs": stats.lane_epochs,
        "best_score": result.best_score,
        "best_model": result.best_hparams.model,
        "wall_seconds": round(stats.wall_seconds, 3),
        "compile_seconds": round(stats.compile_seconds, 3),
    }
    if flags.check:
        largest = check(task, result, flags.max_resource, flags.seed)
        figures |= {
            "largest_difference": round(largest, 6),
            "same_scores": largest <= flags.tolerance,
        }
    if flags.time:
        figures["fused_of_all"] = fused_of_all(task)
    print_table(table(result))
    directory = measure.results_directory(flags.directory, flags.smoke)
    if directory is not None:
        rows = result.history
        path = measure.save(directory, "mixed", figures, history=rows)
        result.plot(path.with_suffix(".png"))
        print(f"results: {path}")
    return figures


def table(result: jp.SweepResult) -> Table:
    """A row a family: its trials, how far the best got, and its best score."""
    from rich.table import Table

    rows = Table(title="unlike models in one sweep", title_justify="left")
    rows.add_column("model")
    for column in ("trials", "steps", "best"):
        rows.add_column(column, justify="right")
    for model in MODELS:
        trials = [t for t in result.trials if t.hparams.model == model]
        scores = [t.score for t in trials if t.score is not None]
        steps = sum(trial.steps for trial in trials)
        best = f"{max(scores):.3f}" if scores else ""
        rows.add_row(model, str(len(trials)), str(steps), best)
    return rows


def main(args: Sequence[str] | None = None) -> None:
    """Runs the experiment that the command line asks for."""
    import tyro

    program = "python -m experiments.mixed"
    flags = tyro.cli(Flags, prog=program, args=args, description=__doc__)
    figures = run(flags)
    print(json.dumps(figures), flush=True)
    if not figures.get("same_scores", True):
        sys.exit(f"{program}: scores differ by {figures['largest_difference']}")


if __name__ == "__main__":
    main()
