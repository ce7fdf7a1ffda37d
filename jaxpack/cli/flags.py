"""The flags of a sweep, which the commands and the experiments share."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Annotated, Any, Literal

import tyro

from jaxpack.cli.errors import UsageError
from jaxpack.schedulers import Hyperband, Scheduler


def _shown(metavar: str) -> Any:
    """Shows an optional flag without its default, None, which its text explains."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint="")


Int = Annotated[int | None, _shown("INT")]
Float = Annotated[float | None, _shown("FLOAT")]
Name = Annotated[str | None, _shown("NAME")]
File = Annotated[pathlib.Path | None, _shown("FILE")]
Folder = Annotated[pathlib.Path | None, _shown("DIR")]
Mode = Annotated[Literal["min", "max"] | None, _shown("{min,max}")]
Policy = Annotated[
    Literal["none", "random", "equal_batch", "nearest"] | None,
    _shown("{none,random,equal_batch,nearest}"),
]

CONFIG = (tyro.conf.FlagCreatePairsOff,)
"""How all commands take their flags: a switch has no --no-switch."""
MAX_RESOURCE = 27
"""Epochs of the longest trials where nobody says how many."""


@dataclasses.dataclass
class PlanFlags:
    """What is trained, and how.

    Attributes:
      max_resource: What a trial gets that is never stopped, Hyperband's R:
        epochs, unless the scheduler counts steps. By default the scheduler's own,
        or 27 without one.
      reduction_factor: One in so many trials is promoted from rung to rung,
        Hyperband's eta. By default the scheduler's own, or 3 without one.
      seed: Fixes the trials, their weights, dropout and the order of the data.
      engine: Many trials in one program (packed), one in each (solo), unlike ones
        side by side (fused), or what suits (auto).
      max_lanes: Most trials to train in one program. By default what suits the
        device.
      workers: Threads that train. By default one a CPU core, or one a GPU.
    """

    max_resource: Int = None
    reduction_factor: Int = None
    seed: int = 0
    engine: Literal["auto", "packed", "solo", "fused"] = "auto"
    max_lanes: Int = None
    workers: Int = None

    def scheduler(self, scheduler: Scheduler | None = None) -> Scheduler:
        """The scheduler that the flags ask for.

        Args:
          scheduler: What the flags change; `Hyperband(27)` if None.

        Raises:
          UsageError: If it has no such setting.
          ValueError: If a value is not what it should be.

        Examples:
          >>> PlanFlags(max_resource=9).scheduler()
          Hyperband(max_resource=9, reduction_factor=3, ...)
        """
        scheduler = Hyperband(MAX_RESOURCE) if scheduler is None else scheduler
        asked = {
            "max_resource": self.max_resource,
            "reduction_factor": self.reduction_factor,
        }
        given = {name: value for name, value in asked.items() if value is not None}
        for name, value in given.items():
            if not hasattr(scheduler, name):
                raise UsageError(
                    f"--{name.replace('_', '-')} is {value}, but {scheduler!r} has no "
                    "such setting; leave it out"
                )
        # Every scheduler is a frozen dataclass.
        return dataclasses.replace(scheduler, **given)  # pyrefly: ignore

    def plan_options(self) -> dict[str, Any]:
        """The arguments of `jaxpack.explain` besides what is trained."""
        return {
            "seed": self.seed,
            "engine": self.engine,
            "max_lanes": self.max_lanes,
            "workers": self.workers,
        }


@dataclasses.dataclass
class Flags(PlanFlags):
    """The flags of a sweep.

    Attributes:
      directory: Where the results are written; the same command goes on with what
        is there. By default a new folder in runs/.
      policy: Which ready trials are packed together. By default the planner's
        order.
      metric: What trials are ranked by. By default the task's first metric.
      mode: Whether low or high values are good. By default told from the metric's
        name.
      keep: How many of the best trials keep their weights.
      max_seconds: End the sweep, or this part of it, after so long.
      target: End the sweep once a trial's score is as good.
      enqueue: Trials to try first: a JSON list of objects that map hparams to
        values.
      overwrite: Move the results of an earlier sweep in the directory aside, and
        begin anew.
      quiet: Show neither the plan nor the progress, only the results.
    """

    directory: Folder = None
    policy: Policy = None
    metric: Name = None
    mode: Mode = None
    keep: int = 1
    max_seconds: Float = None
    target: Float = None
    enqueue: File = None
    overwrite: bool = False
    quiet: bool = False

    def options(self) -> dict[str, Any]:
        """The arguments of `jaxpack.sweep` besides what is trained and where.

        Raises:
          UsageError: If the file to enqueue is not what it should be.
        """
        return self.plan_options() | {
            "policy": self.policy,
            "metric": self.metric,
            "mode": self.mode,
            "keep": self.keep,
            "max_seconds": self.max_seconds,
            "target": self.target,
            "enqueue": () if self.enqueue is None else read_trials(self.enqueue),
            "overwrite": self.overwrite,
            "progress": not self.quiet,
        }


def read_trials(path: pathlib.Path) -> list[dict[str, Any]]:
    """The hparams of trials in a JSON file.

    Raises:
      UsageError: If there is no such file, or it is no JSON list of objects.
    """
    try:
        trials = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--enqueue is {str(path)!r}: {error}") from None
    if not isinstance(trials, list) or not all(isinstance(t, dict) for t in trials):
        raise UsageError(
            f"--enqueue is {str(path)!r}, which holds {json.dumps(trials)[:60]}; "
            'expected a list of objects, such as [{"learning_rate": 0.01}]'
        )
    return trials
