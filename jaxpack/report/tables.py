"""Tables of trials, as a data frame and in a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from jaxpack.progress import format_number
from jaxpack.report.ranking import best_row, floats, ranked
from jaxpack.types import TrialResult

# Slow to import, and only needed by who looks at results.
if TYPE_CHECKING:
    import pandas as pd

# What a history row says besides metrics.
_PLACE = ("bracket", "rung", "epochs", "steps")


def to_pandas(trials: Sequence[TrialResult], metric: str) -> pd.DataFrame:
    """A table with a row a trial.

    Args:
      trials: The trials.
      metric: The metric that `score` is; it has a column even if no trial was
        evaluated.

    Returns:
      A frame with the index `trial_id` and the columns `status`, `score`, `epochs`,
      `steps`, `bracket`, `rung`, `seconds`, `reason`, then `hparams_<name>` for each
      hparam, NaN for trials that have none, then `train_loss`, `loss` and each other
      metric at the last evaluation.

    Examples:
      >>> from jaxpack.types import HParams
      >>> row = {"epochs": 1, "steps": 38, "train_loss": 0.5, "loss": 0.4}
      >>> trial = TrialResult(0, HParams({"width": 64}), "COMPLETE", 0.4, (row,))
      >>> to_pandas([trial], "loss")[["score", "epochs", "hparams_width", "loss"]]
                score  epochs  hparams_width  loss
      trial_id
      0           0.4     1.0             64   0.4
    """
    import pandas as pd

    last = [trial.history[-1] if trial.history else {} for trial in trials]
    rows = [row for trial in trials for row in trial.history]
    seen = [name for row in rows for name in row if name not in _PLACE]
    hparams = dict.fromkeys(name for trial in trials for name in trial.hparams)
    columns: dict[str, Any] = {
        "status": [trial.status for trial in trials],
        "score": floats(trial.score for trial in trials),
        "epochs": floats(row.get("epochs") for row in last),
        "steps": np.array([trial.steps for trial in trials], np.int64),
        "bracket": pd.array([trial.bracket for trial in trials], "Int64"),
        "rung": pd.array([trial.rung for trial in trials], "Int64"),
        "seconds": floats(trial.seconds for trial in trials),
        "reason": [trial.reason for trial in trials],
    }
    for name in hparams:
        columns[f"hparams_{name}"] = [
            trial.hparams.get(name, math.nan) for trial in trials
        ]
    for name in dict.fromkeys(["train_loss", "loss", *seen, metric]):
        columns[name] = floats(row.get(name) for row in last)
    index = pd.Index([trial.trial_id for trial in trials], name="trial_id", dtype=int)
    return pd.DataFrame(columns, index=index)


def trials_table(
    trials: Sequence[TrialResult],
    metric: str,
    mode: str,
    k: int = 10,
    narrow: bool = False,
) -> Table:
    """A table of the best trials, each at its best reading.

    Args:
      trials: The trials.
      metric: The metric they are ranked by.
      mode: `"min"` if low values are good, `"max"` if high ones are.
      k: How many to show at most.
      narrow: Whether all hparams share a column, in as many lines as they need.
    """
    names = list(dict.fromkeys(name for trial in trials for name in trial.hparams))
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("trial", metric, "status", "epochs", *(() if narrow else names)):
        justify = "left" if name == "status" else "right"
        # In two lines if it has two words: the numbers below are shorter.
        table.add_column(name.replace("_", "_\n"), justify=justify, no_wrap=True)
    if narrow:
        table.add_column("hparams", overflow="fold")
    for trial in ranked(trials, metric, mode)[:k]:
        row = best_row(trial, metric, mode) or {}
        hparams = {name: _cell(value) for name, value in trial.hparams.items()}
        together = " ".join(f"{name}={cell}" for name, cell in hparams.items())
        table.add_row(
            str(trial.trial_id),
            format_number(row[metric]),
            trial.status,
            format_number(row.get("epochs")),
            *([together] if narrow else [hparams.get(name, "-") for name in names]),
        )
    return table


def print_table(table: Table, narrow: Table | None = None) -> None:
    """Prints a table to stdout.

    Args:
      table: The table. Its lines are not broken where stdout is no terminal.
      narrow: What to print in its place if the terminal is too narrow for it.
    """
    console = Console()
    unbounded = console.options.update(width=10_000)
    width = console.measure(table, options=unbounded).maximum
    if not console.is_terminal:
        console = Console(width=width)
    fits = width <= console.width
    console.print(table if fits or narrow is None else narrow)


def _cell(value: Any) -> str:
    return format_number(value) if isinstance(value, float) else str(value)
