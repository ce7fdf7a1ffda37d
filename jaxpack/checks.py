"""Checks of arguments: each returns the value as it is used, or says what is wrong."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

SEEDS = 2**32
"""Seeds are below it."""


def whole(name: str, value: Any, least: int = 1, below: int | None = None) -> int:
    """Returns a whole number.

    Args:
      name: The argument, for the error.
      value: What was given for it.
      least: The least it may be.
      below: What it must be less than, if anything.

    Raises:
      ValueError: If it is none; a bool is none, nor is a float.

    Examples:
      >>> whole("keep", np.int64(3))
      3
      >>> whole("keep", True)
      Traceback (most recent call last):
      ValueError: keep is True; it must be a whole number >= 1
    """
    number = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not number or value < least or (below is not None and value >= below):
        most = "" if below is None else f" and < {below}"
        raise ValueError(
            f"{name} is {value!r}; it must be a whole number >= {least}{most}"
        )
    return int(value)


def seed(value: Any, name: str = "seed") -> int:
    """Returns a seed.

    Raises:
      ValueError: If it is no whole number from 0 to 2**32 - 1.

    Examples:
      >>> seed(-1)
      Traceback (most recent call last):
      ValueError: seed is -1; it must be a whole number from 0 to 2**32 - 1
    """
    try:
        return whole(name, value, 0, SEEDS)
    except ValueError:
        raise ValueError(
            f"{name} is {value!r}; it must be a whole number from 0 to 2**32 - 1"
        ) from None


def number(name: str, value: Any, above: float = -math.inf) -> float:
    """Returns a number that is not NaN, and more than `above`.

    Raises:
      ValueError: If it is none; a bool is none.

    Examples:
      >>> number("max_seconds", 0, above=0)
      Traceback (most recent call last):
      ValueError: max_seconds is 0; it must be a number above 0
    """
    real = isinstance(value, int | float | np.integer | np.floating)
    if not real or isinstance(value, bool) or not value > above:
        least = "" if above == -math.inf else f" above {above}"
        raise ValueError(f"{name} is {value!r}; it must be a number{least}")
    return float(value)


def flag(name: str, value: Any) -> bool:
    """Returns a bool.

    Raises:
      ValueError: If it is none: the text "False", say, would count as true.

    Examples:
      >>> flag("overwrite", "False")
      Traceback (most recent call last):
      ValueError: overwrite is 'False'; it must be True or False
    """
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name} is {value!r}; it must be True or False")
    return bool(value)


def word(name: str, value: Any, words: Sequence[str]) -> str:
    """Returns one of some words.

    Raises:
      ValueError: If it is another, or no word at all.

    Examples:
      >>> word("mode", "minimum", ("min", "max"))
      Traceback (most recent call last):
      ValueError: mode is 'minimum'; it must be 'min' or 'max'
    """
    if not isinstance(value, str) or value not in words:
        raise ValueError(
            f"{name} is {value!r}; it must be {' or '.join(map(repr, words))}"
        )
    return value


def function(name: str, value: Any) -> Any:
    """Returns what can be called.

    Raises:
      ValueError: If it cannot.

    Examples:
      >>> function("model", 3)
      Traceback (most recent call last):
      ValueError: model is 3; it must be a function
    """
    if not callable(value):
        raise ValueError(f"{name} is {value!r}; it must be a function")
    return value


def path(name: str, value: Any) -> Path:
    """Returns a path.

    Raises:
      ValueError: If it is neither text nor a path, or empty.

    Examples:
      >>> path("directory", 3)
      Traceback (most recent call last):
      ValueError: directory is 3; it must be a path
    """
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise ValueError(f"{name} is {value!r}; it must be a path")
    return Path(value)
