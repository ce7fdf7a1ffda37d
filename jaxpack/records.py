"""Reads a sweep's directory back, and writes dimensions as JSON."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxpack import checks, journal, store
from jaxpack.dimensions import (
    Choice,
    Constant,
    Dimension,
    Integer,
    LogUniform,
    Uniform,
)
from jaxpack.store import ASKED, JOURNAL

_NEEDED = ("metric", "mode", "seed", "brackets")
"""What every `sweep.json` says."""

_KINDS = {kind.kind: kind for kind in (Uniform, LogUniform, Integer, Choice, Constant)}


def read_asked(directory: str | os.PathLike) -> dict[str, Any]:
    """What `sweep.json` says: what was asked and, once it has ended, the outcome.

    Raises:
      ValueError: If there is no such file, or it is damaged, or not all of one.
    """
    asked = store.read_asked(checks.path("directory", directory))
    if not asked:
        raise ValueError(
            f"directory is {str(directory)!r}, which holds no {ASKED}; expected the "
            "directory that a sweep was given"
        )
    if missing := [name for name in _NEEDED if name not in asked]:
        raise ValueError(
            f"{str(Path(directory) / ASKED)!r} lacks {', '.join(missing)}; restore the "
            "file"
        )
    return asked


def read_journal(directory: str | os.PathLike) -> list[dict[str, Any]]:
    """The readings in `journal.jsonl`, each once, in the order they were written.

    A last line that has not been written to its end is left out.

    Raises:
      ValueError: If another line is damaged; it names the line.
    """
    path = Path(directory) / JOURNAL
    return journal.read(path) if path.is_file() else []


def dim_rows(dims: Mapping[str, Dimension]) -> dict[str, dict[str, Any]]:
    """Dimensions as plain records.

    Examples:
      >>> dim_rows({"dropout": Uniform(0.0, 0.5)})
      {'dropout': {'kind': 'uniform', 'lo': 0.0, 'hi': 0.5, 'static': None}}
    """
    return {
        name: {"kind": dim.kind, **dataclasses.asdict(dim)}
        for name, dim in dims.items()
    }


def dims_from(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Dimension]:
    """The dimensions that `dim_rows` wrote; those of unknown kinds are left out.

    Examples:
      >>> dims_from({"width": {"kind": "choice", "options": [64, 128]}})
      {'width': choice(64, 128)}
    """
    dims: dict[str, Dimension] = {}
    for name, row in rows.items():
        kind = _KINDS.get(row.get("kind", ""))
        if kind is None:
            continue
        known = {field.name for field in dataclasses.fields(kind)}
        values = {key: value for key, value in row.items() if key in known}
        if kind is Choice:
            values["options"] = tuple(values["options"])
        dims[name] = kind(**values)
    return dims


def dims_of(
    hparams: Iterable[Mapping[str, Any]], dims: Mapping[str, Dimension]
) -> dict[str, Dimension]:
    """A dimension for each hparam of some trials that holds all of its values.

    It is the one in `dims` where that holds them, and else made from the values.

    Args:
      hparams: The hparams of the trials, which need not have the same names.
      dims: The dimensions of the space, as far as they are known.

    Examples:
      >>> dims_of([{"rate": 0.1, "act": "relu"}, {"rate": 0.5}], {})
      {'rate': uniform(0.1, 0.5), 'act': 'relu'}
    """
    values: dict[str, dict[Any, None]] = {}
    for trial in hparams:
        for name, value in trial.items():
            values.setdefault(name, {})[value] = None
    return {
        name: dims[name]
        if name in dims and all(map(dims[name].contains, seen))
        else _guess(list(seen))
        for name, seen in values.items()
    }


def _guess(values: Sequence[Any]) -> Dimension:
    numbers = [v for v in values if isinstance(v, int | float) and type(v) is not bool]
    if len(values) == 1:
        return Constant(values[0])
    if len(numbers) < len(values):
        return Choice(tuple(values))
    lo, hi = min(numbers), max(numbers)
    log = lo > 0 and math.log10(hi / lo) >= 2
    if isinstance(lo, int) and isinstance(hi, int) and float not in map(type, numbers):
        return Integer(lo, hi, log=log)
    return LogUniform(lo, hi) if log else Uniform(lo, hi)
