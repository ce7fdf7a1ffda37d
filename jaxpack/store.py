"""One directory a sweep: what was asked, and a journal of what came of it."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ASKED = "sweep.json"
JOURNAL = "journal.jsonl"


class Store:
    """Writes a sweep's directory as the sweep goes.

    `sweep.json` holds what was asked and, at the end, how it went; `journal.jsonl` a
    line for every reading of every trial, on disk before the next one is looked at.

    Args:
      directory: The directory, made if need be.
      asked: What `sweep.json` says.
      overwrite: Moves a sweep that is already there aside, to a name with the time.

    Raises:
      ValueError: If the directory holds a sweep already, or is a file.
    """

    def __init__(
        self, directory: str | os.PathLike, asked: Mapping[str, Any], overwrite: bool
    ):
        self.directory = check_directory(directory, overwrite)
        if (self.directory / ASKED).exists():
            _move_aside(self.directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._asked = dict(asked)
        self._write()
        self._journal = (self.directory / JOURNAL).open("a", encoding="utf-8")

    def append(self, record: Mapping[str, Any]) -> None:
        """Adds a line to the journal, and to the disk."""
        self._journal.write(json.dumps(plain(record)) + "\n")
        self._journal.flush()
        os.fsync(self._journal.fileno())

    def finish(self, outcome: Mapping[str, Any]) -> None:
        """Adds how the sweep went to `sweep.json`."""
        self._asked["outcome"] = dict(outcome)
        self._write()

    def close(self) -> None:
        """Closes the journal."""
        self._journal.close()

    def _write(self) -> None:
        path = self.directory / ASKED
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(plain(self._asked), indent=2) + "\n")
        os.replace(temporary, path)


def plain(value: Any) -> Any:
    """`value` as JSON can hold it: NaN and infinities become None.

    Examples:
      >>> plain({"score": float("nan"), "static": (("width", 64),)})
      {'score': None, 'static': [['width', 64]]}
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return repr(value)


def check_directory(directory: str | os.PathLike, overwrite: bool) -> Path:
    """Returns a sweep's directory as a path, or says why it cannot be that.

    Raises:
      ValueError: If it is a file, or holds a sweep and `overwrite` is False.
    """
    path = Path(directory)
    if path.exists() and not path.is_dir():
        raise ValueError(f"directory is {str(path)!r}, which is a file")
    if (path / ASKED).exists() and not overwrite:
        raise ValueError(
            f"directory {str(path)!r} already holds a sweep; name another one, or "
            "give overwrite=True, which moves the old one aside"
        )
    return path


def _move_aside(directory: Path) -> None:
    directory = directory.resolve()  # "." has no name to put a time behind.
    stamp = time.strftime("%Y%m%d-%H%M%S")
    aside = directory.with_name(f"{directory.name}.{stamp}")
    count = 0
    while aside.exists():
        count += 1
        aside = directory.with_name(f"{directory.name}.{stamp}-{count}")
    os.replace(directory, aside)
