"""What the sweeps among the experiments share: their flags and how they end."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, TypeVar

import tyro

import jaxpack as jp
from jaxpack.cli import flags as shared
from jaxpack.cli.flags import CONFIG
from jaxpack.cli.running import located, print_headline
from jaxpack.cli.running import run as run_sweep

Int = Annotated[int | None, tyro.conf.arg(metavar="INT")]
SomeFlags = TypeVar("SomeFlags")


@dataclasses.dataclass
class Flags(shared.Flags):
    """The flags of a sweep."""

    max_resource: Int = 27
    """Epochs that a trial gets which is never stopped, Hyperband's R."""
    reduction_factor: Int = 3
    """One in so many trials is promoted from rung to rung, Hyperband's eta."""


def run(name: str, task: jp.Task, space: jp.Space, flags: Flags) -> jp.SweepResult:
    """Runs Hyperband as the flags say, and prints what came of it.

    Args:
      name: Names the folder in `runs/`, if no directory is given.
      task: What is trained.
      space: The hparams to try.
      flags: The flags.
    """
    with located(flags, name) as flags:
        result = run_sweep(task, space, None, flags)
    print_headline(result)
    return result


def parse(
    kind: type[SomeFlags], name: str, text: str | None, args: Sequence[str] | None
) -> SomeFlags:
    """Reads a command line.

    Args:
      kind: The flags there are.
      name: The experiment's name.
      text: What `--help` says of it.
      args: The arguments; those of the process if None.
    """
    program = f"python -m experiments.{name}"
    return tyro.cli(kind, prog=program, args=args, description=text, config=CONFIG)
