"""`sweep` and `explain`: what is said before and after, and the exit codes."""

from __future__ import annotations

import contextlib
import dataclasses
import json as json_format
import shlex
import sys
from collections.abc import Generator, Iterator
from typing import Annotated, Any, TypeVar

import tyro

from jaxpack.cli import modules, outcome
from jaxpack.cli.errors import DONE, SIGNALLED
from jaxpack.cli.flags import Flags, PlanFlags
from jaxpack.explain import explain as make_plan
from jaxpack.interrupt import Interrupted
from jaxpack.schedulers import Scheduler
from jaxpack.sweep import SweepResult
from jaxpack.sweep import sweep as run_sweep
from jaxpack.task import Task

SomeFlags = TypeVar("SomeFlags", bound=Flags)
Module = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODULE")]


def sweep(
    module: Module, flags: tyro.conf.OmitArgPrefixes[Flags], json: bool = False
) -> int:
    """Searches a module's space, many trials at once, and prints what it found.

    The module has a `task`, a `space` and, if need be, a `scheduler`; `python -m
    jaxpack init` writes one. Ctrl-C writes a checkpoint, and the command to go on.

        python -m jaxpack sweep task.py --directory runs/a
        python -m jaxpack sweep task.py --max-resource 81 --max-seconds 600

    Args:
      module: A Python file, or the dotted name of a module.
      flags: How to search it.
      json: End with a line of JSON: the figures that count.
    """
    defined = modules.load(module)
    with located(flags, defined.name) as flags:
        try:
            result = run(defined.task, defined.space, defined.scheduler, flags)
        except Interrupted as stop:
            modules.note(flags.directory, module)
            words = ["sweep", module, *_arguments(flags), *["--json"] * json]
            print(
                f"ended by {stop.received.name}; to go on:\n"
                f"  python -m jaxpack {shlex.join(words)}",
                file=sys.stderr,
            )
            return SIGNALLED + stop.received
        modules.note(flags.directory, module)
    if json:
        print_headline(result)
    return DONE


def explain(module: Module, flags: tyro.conf.OmitArgPrefixes[PlanFlags]) -> int:
    """Shows what a sweep would run, without training.

    Which trials train how long; which hparams may differ between the trials of one
    program, and which line of yours says so; which programs there are.

        python -m jaxpack explain task.py --max-resource 81

    Args:
      module: A Python file, or the dotted name of a module.
      flags: As for a sweep.
    """
    defined = modules.load(module)
    scheduler = flags.scheduler(defined.scheduler)
    plan = make_plan(defined.task, defined.space, scheduler, **flags.plan_options())
    print(f"{scheduler}\n{plan}")
    return DONE


def run(
    task: Task, space: Any, scheduler: Scheduler | None, flags: Flags
) -> SweepResult:
    """Runs a sweep as the flags say, and prints what came of it.

    Args:
      task: What is trained.
      space: The hparams to try.
      scheduler: What the flags may change; `Hyperband(27)` if None.
      flags: The flags.

    Raises:
      RuntimeError: If no trial has a score.
      Exception: Whatever `jaxpack.sweep` raises.
    """
    scheduler, options = flags.scheduler(scheduler), flags.options()
    result = run_sweep(task, space, scheduler, directory=flags.directory, **options)
    outcome.print_outcome(result)
    return result


@contextlib.contextmanager
def located(flags: SomeFlags, name: str) -> Generator[SomeFlags]:
    """The flags with a directory: a new one in `runs/` where they have none.

    It goes again if nothing has been written to it.
    """
    if flags.directory is not None:
        yield flags
        return
    directory = outcome.new_directory(name)
    try:
        yield dataclasses.replace(flags, directory=directory)
    finally:
        with contextlib.suppress(OSError):
            directory.rmdir()


def print_headline(result: SweepResult) -> None:
    """Prints the figures that count as a line of JSON."""
    print(json_format.dumps(outcome.headline(result)), flush=True)


def _arguments(flags: Flags) -> Iterator[str]:
    """The flags as they are typed, but for --overwrite, which begins anew."""
    for field in dataclasses.fields(flags):
        value = getattr(flags, field.name)
        if value == field.default or field.name == "overwrite":
            continue
        yield f"--{field.name.replace('_', '-')}"
        if value is not True:
            yield str(value)
