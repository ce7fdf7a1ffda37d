"""Arrays on disk, complete or not at all, read back as memory maps."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

_FACTS = "facts.json"


def cache_directory() -> pathlib.Path:
    """Where arrays are kept: `jaxpack/data` in the user's cache directory."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
    return pathlib.Path(home).expanduser() / "jaxpack" / "data"


def read(
    directory: pathlib.Path,
) -> tuple[dict[str, np.ndarray], dict[str, Any]] | None:
    """Returns the arrays and facts that `write` has put there.

    Args:
      directory: Where.

    Returns:
      Read-only memory maps by name, and the facts; None if they are not there or
      damaged.
    """
    try:
        facts = json.loads((directory / _FACTS).read_text(encoding="utf-8"))
        arrays = {
            name: np.load(directory / f"{name}.npy", mmap_mode="r")
            for name in facts["arrays"]
        }
    except (OSError, ValueError, EOFError, KeyError):
        return None
    return arrays, facts["facts"]


def write(
    directory: pathlib.Path,
    shapes: Mapping[str, tuple[tuple[int, ...], Any]],
    facts: Mapping[str, Any],
    fill: Callable[[dict[str, np.ndarray]], None],
) -> None:
    """Makes arrays on disk, has them filled, and only then puts them into place.

    Args:
      directory: Where; what is there is replaced.
      shapes: Shape and dtype of every array by its name.
      facts: What to keep with them, as JSON.
      fill: Called with the arrays, which it fills in place. If it raises, nothing is
        kept.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    made = pathlib.Path(
        tempfile.mkdtemp(prefix=f"{directory.name}.tmp", dir=directory.parent)
    )
    try:
        arrays: dict[str, np.ndarray] = {
            name: np.lib.format.open_memmap(
                made / f"{name}.npy", mode="w+", dtype=dtype, shape=shape
            )
            for name, (shape, dtype) in shapes.items()
        }
        fill(arrays)
        del arrays  # Which writes what is not written yet.
        content = {"arrays": list(shapes), "facts": dict(facts)}
        (made / _FACTS).write_text(json.dumps(content), encoding="utf-8")
        if read(directory) is None:
            shutil.rmtree(directory, ignore_errors=True)
            # Another process may have been faster; then its arrays are as good.
            with contextlib.suppress(OSError):
                made.rename(directory)
    finally:
        shutil.rmtree(made, ignore_errors=True)
