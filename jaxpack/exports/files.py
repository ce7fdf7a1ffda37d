"""A sweep's table as a file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from jaxpack import checks
from jaxpack.exports.source import Source, require, result_of

# Slow to import, and only needed by who exports.
if TYPE_CHECKING:
    import pandas as pd


def to_csv(source: Source, path: str | os.PathLike, *, readings: bool = False) -> Path:
    """Writes a row a trial to a CSV file: the columns of `SweepResult.to_pandas`.

    Args:
      source: A sweep's result, or its directory.
      path: The file; its folder is made if need be.
      readings: Whether to write a row a reading in place of a row a trial.

    Returns:
      The path.
    """
    path = _file(path)
    _frame(source, readings).to_csv(path)
    return path


def to_parquet(
    source: Source, path: str | os.PathLike, *, readings: bool = False
) -> Path:
    """Writes what `to_csv` does to a Parquet file, which keeps the types.

    An hparam whose values are of several types is written as JSON texts.

    Args:
      source: A sweep's result, or its directory.
      path: The file; its folder is made if need be.
      readings: Whether to write a row a reading in place of a row a trial.

    Returns:
      The path.

    Raises:
      ImportError: If pyarrow is not installed.
    """
    require("pyarrow", "parquet")
    path = _file(path)
    frame = _frame(source, readings)
    for name in map(str, frame.columns):
        # Parquet has one type a column.
        if len({type(value) for value in frame[name] if value is not None}) > 1:
            frame[name] = [json.dumps(value) for value in frame[name]]
    frame.to_parquet(path)
    return path


def _file(path: str | os.PathLike) -> Path:
    path = checks.path("path", path)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _frame(source: Source, readings: bool) -> pd.DataFrame:
    result = result_of(source)
    if not readings:
        return result.to_pandas()
    import pandas as pd

    rows = [{"trial_id": t.trial_id, **row} for t in result.trials for row in t.history]
    columns = None if rows else ["trial_id"]
    return pd.DataFrame(rows, columns=columns).set_index("trial_id")
