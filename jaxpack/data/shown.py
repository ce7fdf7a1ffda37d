"""Shows how far slow things are, in terminals and notebooks; elsewhere nothing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Iterable
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    track,
)


def shown(items: Iterable[Any], total: int, text: str) -> Iterable[Any]:
    """Goes through `total` items, showing how far it is and the text.

    Examples:
      >>> list(shown("ab", total=2, text="counting"))
      ['a', 'b']
    """
    console, seen = _console()
    return track(items, text, total, console=console, transient=True, disable=not seen)


@contextlib.contextmanager
def download_shown(
    directory: str | os.PathLike[str], total: int, text: str
) -> Generator[None]:
    """Shows how many bytes the files in a directory have, while others write them.

    Args:
      directory: Where, which need not exist yet.
      total: Bytes they are going to have.
      text: What it is about.
    """
    console, seen = _console()
    columns = BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with _Watch(
        TextColumn("{task.description}"),
        *columns,
        console=console,
        transient=True,
        disable=not seen,
    ) as progress:
        progress.directory = directory
        progress.add_task(text, total=total)
        yield


class _Watch(Progress):
    """A bar that looks for itself whenever it is drawn."""

    directory: str | os.PathLike[str] | None = None

    def get_renderables(self) -> Iterable[RenderableType]:
        if self.directory is not None:
            for task in self.tasks:
                size = min(bytes_in(self.directory), int(task.total or 0))
                self.update(task.id, completed=size)
        return super().get_renderables()


def bytes_in(directory: str | os.PathLike[str]) -> int:
    """Returns the size of all files in a directory and below it; 0 if there is none.

    Examples:
      >>> bytes_in("nowhere")
      0
    """
    size = 0
    for parent, _, files in os.walk(directory):
        for file in files:
            with contextlib.suppress(OSError):  # It may have been renamed meanwhile.
                size += os.path.getsize(os.path.join(parent, file))
    return size


def _console() -> tuple[Console, bool]:
    console = Console(stderr=True)
    return console, console.is_terminal or console.is_jupyter
