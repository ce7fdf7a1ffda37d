"""A table of configurations: what many seeds of one come to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxpack.report.ranking import floats, sign
from jaxpack.types import FAILED, TrialResult

if TYPE_CHECKING:
    import pandas as pd


def by_configuration(trials: Sequence[TrialResult], mode: str = "max") -> pd.DataFrame:
    """Mean and spread over the trials whose hparams differ in nothing but `seed`.

    Args:
      trials: The trials, such as those that `train` returned.
      mode: `"min"` if low scores are good, `"max"` if high ones are.

    Returns:
      A row a configuration, the best mean first, with `hparams_<name>` for each hparam
      but the seed, then the `mean` of the trials' last scores, their sample standard
      deviation `std` (NaN for one trial alone), the `count` of these, how many trials
      have `failed` and count in neither, and `steps`, the fewest that one of the trials
      has had: where trials were stopped early, scores were read after unlike numbers.

    Examples:
      >>> from jaxpack.types import HParams
      >>> trials = [
      ...     TrialResult(i, HParams({"width": 8, "seed": i}), "COMPLETE", score)
      ...     for i, score in enumerate((0.75, 0.25))
      ... ]
      >>> by_configuration(trials)[["hparams_width", "mean", "count"]]
                     hparams_width  mean  count
      configuration
      0                          8   0.5      2
    """
    import pandas as pd

    if isinstance(trials, str) or not all(isinstance(t, TrialResult) for t in trials):
        raise ValueError(
            f"trials is {trials!r}; give a list of TrialResults, such as "
            "jaxpack.train returns or the trials of a sweep's result"
        )
    direction = sign(mode)
    names = dict.fromkeys(name for trial in trials for name in trial.hparams)
    names.pop("seed", None)
    groups: dict[Any, list[TrialResult]] = {}
    for trial in trials:
        key = tuple((name, _typed(trial.hparams.get(name))) for name in names)
        groups.setdefault(key, []).append(trial)
    rows = [_row(members, names) for members in groups.values()]
    rows.sort(key=lambda row: -direction * row["mean"] if row["count"] else math.inf)
    columns = [*(f"hparams_{name}" for name in names), "mean", "std", "count"]
    table = pd.DataFrame(rows, columns=[*columns, "failed", "steps"])
    return table.rename_axis("configuration")


def _typed(value: Any) -> tuple[type, Any]:
    """True is not 1."""
    return type(value), value


def _row(members: Sequence[TrialResult], names: Any) -> dict[str, Any]:
    hparams = members[0].hparams
    scores = floats(trial.score for trial in members if trial.status != FAILED)
    scores = scores[np.isfinite(scores)]
    return {
        **{f"hparams_{name}": hparams.get(name, math.nan) for name in names},
        "mean": scores.mean() if scores.size else math.nan,
        "std": scores.std(ddof=1) if scores.size > 1 else math.nan,
        "count": scores.size,
        "failed": sum(trial.status == FAILED for trial in members),
        "steps": min(trial.steps for trial in members),
    }
