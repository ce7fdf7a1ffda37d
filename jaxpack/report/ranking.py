"""Which readings of a trial count, and which trials are the best."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jaxpack.types import TrialResult


def best_row(trial: TrialResult, metric: str, mode: str) -> dict[str, Any] | None:
    """The history row with a trial's best finite value of a metric.

    A row whose loss is not finite does not count, whatever its metric says: the trial
    had failed by then. Of equal values the one after more steps is taken.

    Args:
      trial: The trial.
      metric: The metric.
      mode: `"min"` if low values are good, `"max"` if high ones are.

    Returns:
      The row, or None if there is none.

    Examples:
      >>> from jaxpack.types import HParams
      >>> rows = {"steps": 1, "loss": 0.5}, {"steps": 2, "loss": 0.7}
      >>> trial = TrialResult(0, HParams({}), "STOPPED", history=rows)
      >>> best_row(trial, "loss", "min")
      {'steps': 1, 'loss': 0.5}
    """
    better = sign(mode)
    return max(
        scored(trial, metric),
        key=lambda row: (better * row[metric], row["steps"]),
        default=None,
    )


def ranked(trials: Sequence[TrialResult], metric: str, mode: str) -> list[TrialResult]:
    """The trials that have a finite value of a metric, by their best, the best first.

    Equal values are sorted by more steps, then by trial id.

    Args:
      trials: The trials.
      metric: The metric.
      mode: `"min"` if low values are good, `"max"` if high ones are.

    Examples:
      >>> from jaxpack.types import HParams
      >>> history = [{"steps": 1, "loss": loss} for loss in (0.5, 0.4, float("nan"))]
      >>> trials = [
      ...     TrialResult(i, HParams({}), "COMPLETE", history=(row,))
      ...     for i, row in enumerate(history)
      ... ]
      >>> [trial.trial_id for trial in ranked(trials, "loss", "min")]
      [1, 0]
    """
    better = sign(mode)
    rows = [(trial, best_row(trial, metric, mode)) for trial in trials]
    keys = [
        ((-better * row[metric], -row["steps"], trial.trial_id), trial)
        for trial, row in rows
        if row is not None
    ]
    return [trial for _, trial in sorted(keys, key=lambda pair: pair[0])]


def scored(trial: TrialResult, metric: str) -> list[dict[str, Any]]:
    """The rows of a trial's history that have a score, from before it failed."""
    return [
        row
        for row in trial.history
        if math.isfinite(row.get(metric, math.nan))
        and math.isfinite(row.get("loss", 0.0))
    ]


def sign(mode: str) -> int:
    """What to multiply a score by so that high values are good.

    Raises:
      ValueError: If `mode` is neither `"min"` nor `"max"`.

    Examples:
      >>> sign("min")
      -1
    """
    if mode not in ("min", "max"):
        raise ValueError(f"mode is {mode!r}; expected 'min' or 'max'")
    return 1 if mode == "max" else -1


def floats(values: Iterable[float | None]) -> np.ndarray:
    """Makes a float64 array, with NaN for None."""
    return np.array([math.nan if value is None else value for value in values], float)
