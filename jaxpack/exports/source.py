"""What every export begins with."""

from __future__ import annotations

import importlib
import os
from types import ModuleType

from jaxpack.load import load
from jaxpack.records import read_journal
from jaxpack.sweep import SweepResult

Source = SweepResult | str | os.PathLike
"""A sweep's result, or its directory."""


def result_of(source: Source) -> SweepResult:
    """The sweep itself: read anew from its directory, if `source` names that.

    Raises:
      ValueError: If it is neither a result nor the directory of a sweep.
    """
    if isinstance(source, SweepResult):
        return source
    if not isinstance(source, str | os.PathLike):
        raise ValueError(
            f"source is {source!r}; expected a SweepResult or a sweep's directory"
        )
    return load(source)


def require(name: str, extra: str) -> ModuleType:
    """Imports a package that only one kind of export needs.

    Raises:
      ImportError: If it is not installed; it says how to install it.

    Examples:
      >>> require("no_such_package", "optuna")
      Traceback (most recent call last):
      ImportError: no_such_package is needed ...: pip install 'jaxpack[optuna]'
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{name} is needed for this export and is not installed: "
            f"pip install 'jaxpack[{extra}]'"
        ) from error


def times_of(result: SweepResult) -> dict[tuple[int, int], float]:
    """When each reading was written, in seconds since 1970, by trial and steps.

    Empty for a sweep without a directory.
    """
    if result.directory is None:
        return {}
    return {
        (row["trial_id"], row["steps"]): row["time"]
        for row in read_journal(result.directory)
        if "steps" in row and "time" in row
    }
