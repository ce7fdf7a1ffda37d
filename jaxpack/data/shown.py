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
    """Shows by how many bytes a directory grows, while others write files into it.

    Args:
      directory: Where, which need not exist yet.
      total: Bytes it is going to grow by.
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
        progress.watch(directory)
        progress.add_task(text, total=total)
        yield


class _Watch(Progress):
    """A bar that looks for itself whenever it is drawn."""

    _directory: str | os.PathLike[str] | None = None
    _bytes_before = 0

    def watch(self, directory: str | os.PathLike[str]) -> None:
        self._bytes_before = bytes_in(directory)  # Failed downloads may be left.
        self._directory = directory

    def get_renderables(self) -> Iterable[RenderableType]:
        if self._directory is not None:
            for task in self.tasks:
                grown = bytes_in(self._directory) - self._bytes_before
                self.update(task.id, completed=min(max(grown, 0), task.total or 0))
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
