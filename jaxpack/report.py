"""Tables and pictures of trials."""

from __future__ import annotations

import math
import os
import pathlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from jaxpack.progress import format_number
from jaxpack.types import COMPLETE, FAILED, STOPPED, TrialResult

# Slow to import, and only needed by who looks at results.
if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# What a history row says besides metrics.
_PLACE = ("bracket", "rung", "epochs", "steps")

_BLUE, _LIGHT_BLUE, _GREY = "#1f5fa8", "#86b6e3", "#a9a9a9"
_ORANGE, _RED = "#d96b00", "#c0392b"
# How the line of a trial looks, by what became of it: colour and width in points.
_LINES = {
    COMPLETE: (_BLUE, 1.6),
    "promoted, then stopped": (_LIGHT_BLUE, 1.1),
    STOPPED: (_GREY, 0.8),
}


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
    sign = _sign(mode)
    return max(
        _scored(trial, metric),
        key=lambda row: (sign * row[metric], row["steps"]),
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
    sign = _sign(mode)
    rows = [(trial, best_row(trial, metric, mode)) for trial in trials]
    keys = [
        ((-sign * row[metric], -row["steps"], trial.trial_id), trial)
        for trial, row in rows
        if row is not None
    ]
    return [trial for _, trial in sorted(keys, key=lambda pair: pair[0])]


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
        "score": _floats(trial.score for trial in trials),
        "epochs": _floats(row.get("epochs") for row in last),
        "steps": np.array([trial.steps for trial in trials], np.int64),
        "bracket": pd.array([trial.bracket for trial in trials], "Int64"),
        "rung": pd.array([trial.rung for trial in trials], "Int64"),
        "seconds": _floats(trial.seconds for trial in trials),
        "reason": [trial.reason for trial in trials],
    }
    for name in hparams:
        columns[f"hparams_{name}"] = [
            trial.hparams.get(name, math.nan) for trial in trials
        ]
    for name in dict.fromkeys(["train_loss", "loss", *seen, metric]):
        columns[name] = _floats(row.get(name) for row in last)
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


def plot_rungs(
    trials: Sequence[TrialResult],
    metric: str,
    mode: str,
    path: str | os.PathLike,
    unit: str = "epochs",
) -> pathlib.Path:
    """Draws the scores of trials against resource, a panel a bracket.

    A trial is a line through its rungs that ends where it was stopped. Where scores
    are far worse than the others, the edge has a triangle with their number.

    Args:
      trials: The trials.
      metric: The metric to draw.
      mode: `"min"` if low values are good, `"max"` if high ones are.
      path: The picture file; its folder is made if need be.
      unit: What resources are counted in, `"epochs"` or `"steps"`.

    Returns:
      The path.
    """
    from matplotlib.figure import Figure

    panels: dict[int, list[TrialResult]] = defaultdict(list)
    for trial in trials:
        panels[-1 if trial.bracket is None else trial.bracket].append(trial)
    # At most five columns, and as few rows as that takes.
    rows = max(1, math.ceil(len(panels) / 5))
    columns = max(1, math.ceil(len(panels) / rows))
    size = (max(5.5, 0.8 + 2.5 * columns), 1.2 + 3.0 * rows)
    figure = Figure(size, layout="constrained")
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    grid[0, 0].set_ylim(*_y_limits(trials, metric, mode))
    _scale_x(grid[0, 0], trials, unit)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, (bracket, members) in zip(
        grid.flat, sorted(panels.items()), strict=False
    ):
        name = f"bracket {bracket}: " if bracket >= 0 else ""
        axes.set_title(f"{name}{len(members)} trials", fontsize=9)
        _draw_panel(axes, members, metric, unit)
    for best in ranked(trials, metric, mode)[:1]:
        place = sorted(panels).index(-1 if best.bracket is None else best.bracket)
        _mark_best(grid.flat[place], best, metric, mode, unit)
    figure.suptitle(f"{metric} of {len(trials)} trials", fontsize=11)
    _legend(figure, columns=6 if columns > 2 else 3)
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path


def _draw_panel(
    axes: Axes, trials: Sequence[TrialResult], metric: str, unit: str
) -> None:
    axes.set_xlabel(f"{unit} (log scale)", fontsize=8)
    axes.tick_params(labelbottom=True, labelsize=8)
    axes.grid(axis="y", alpha=0.3)
    # The trials that got furthest come last, over the others.
    for trial in sorted(trials, key=lambda trial: trial.steps):
        x, y = _points(trial, metric, unit)
        color, width = _LINES[_fate(trial)]
        axes.plot(x, y, ".-", color=color, linewidth=width, markersize=5, alpha=0.8)
        if trial.status != COMPLETE:
            axes.plot(x[-1:], y[-1:], ".", color=_GREY, markersize=5)
    _mark_bad(axes, trials, metric, unit)


def _points(
    trial: TrialResult, metric: str, unit: str
) -> tuple[np.ndarray, np.ndarray]:
    """What a trial had had and scored at each reading, both `[readings]` float64."""
    # A logarithmic axis has no zero.
    rows = [row for row in _scored(trial, metric) if row[unit] > 0]
    return _floats(row[unit] for row in rows), _floats(row[metric] for row in rows)


def _y_limits(
    trials: Sequence[TrialResult], metric: str, mode: str
) -> tuple[float, float]:
    """Limits that show every good score, and of the bad ones those near the others."""
    rows = [row for trial in trials for row in _scored(trial, metric)]
    good = _sign(mode) * _floats(row[metric] for row in rows)
    if not good.size:
        return 0.0, 1.0
    top = good.max()
    bottom = max(good.min(), top - 4 * (top - np.median(good)))
    # Room for the name of the best, and for the marks at the bottom.
    pad = (top - bottom) or max(abs(top), 1.0)
    low, high = sorted(_sign(mode) * np.array([top + 0.15 * pad, bottom - 0.15 * pad]))
    return float(low), float(high)


def _scale_x(axes: Axes, trials: Sequence[TrialResult], unit: str) -> None:
    rows = [row for trial in trials for row in trial.history]
    resources = sorted({row[unit] for row in rows if "rung" in row and row[unit] > 0})
    axes.set_xscale("log")
    if resources:
        axes.set_xlim(resources[0] / 1.5, resources[-1] * 1.5)
    if 0 < len(resources) <= 8:
        axes.set_xticks(resources, [format_number(x) for x in resources])
        axes.minorticks_off()


def _mark_bad(
    axes: Axes, trials: Sequence[TrialResult], metric: str, unit: str
) -> None:
    """Marks at the edges where scores are off them, and where trials failed."""
    low, high = axes.get_ylim()
    left, right = axes.get_xlim()
    below, above = Counter[float](), Counter[float]()
    for x, y in (_points(trial, metric, unit) for trial in trials):
        below.update(x[y < low])
        above.update(x[y > high])
    failed = Counter(
        min(max(trial.history[-1][unit] if trial.history else 0, left), right)
        for trial in trials
        if trial.status == FAILED
    )
    _mark_counts(axes, below, 0.025, "v", _GREY)
    _mark_counts(axes, above, 0.975, "^", _GREY)
    _mark_counts(axes, failed, 0.085, "x", _RED)


def _mark_counts(
    axes: Axes, counts: Mapping[float, int], height: float, marker: str, color: str
) -> None:
    """Puts marks at a height, in axes from 0 to 1, with their number if it is not 1."""
    transform = axes.get_xaxis_transform()
    for x, count in counts.items():
        at = (x, height)
        axes.plot(*at, marker, color=color, markersize=5, transform=transform)
        if count > 1:
            axes.annotate(
                f"{count}",
                at,
                xytext=(5, -3),
                xycoords=transform,
                textcoords="offset points",
                color=color,
                fontsize=8,
            )


def _mark_best(
    axes: Axes, trial: TrialResult, metric: str, mode: str, unit: str
) -> None:
    row = best_row(trial, metric, mode)
    assert row is not None
    x, y = row[unit], row[metric]
    axes.plot(x, y, "*", color=_ORANGE, markersize=13, markeredgecolor="white")
    low, high = axes.get_ylim()
    up = y > (low + high) / 2
    left = x > math.sqrt(math.prod(axes.get_xlim()))
    axes.annotate(
        f"trial {trial.trial_id}: {format_number(y)}",
        (x, y),
        xytext=(8 if left else -8, 8 if up else -8),
        textcoords="offset points",
        ha="right" if left else "left",
        va="bottom" if up else "top",
        color=_ORANGE,
        fontsize=9,
    )


def _fate(trial: TrialResult) -> str:
    if trial.status == COMPLETE:
        return COMPLETE
    return "promoted, then stopped" if trial.rung else STOPPED


def _legend(figure: Figure, columns: int) -> None:
    from matplotlib.lines import Line2D

    lines = [
        Line2D([], [], marker=".", color=color, linewidth=width, label=fate.lower())
        for fate, (color, width) in _LINES.items()
    ]
    marks = [
        Line2D([], [], linestyle="", marker=marker, color=color, label=label)
        for marker, color, label in (
            ("*", _ORANGE, "best"),
            ("v", _GREY, "worse than shown"),
            ("x", _RED, "failed"),
        )
    ]
    place = "outside lower center"
    figure.legend(
        handles=lines + marks, loc=place, ncols=columns, fontsize=8, frameon=False
    )


def _scored(trial: TrialResult, metric: str) -> list[dict[str, Any]]:
    """The rows of a trial's history that have a score, from before it failed."""
    return [
        row
        for row in trial.history
        if math.isfinite(row.get(metric, math.nan))
        and math.isfinite(row.get("loss", 0.0))
    ]


def _sign(mode: str) -> int:
    if mode not in ("min", "max"):
        raise ValueError(f"mode is {mode!r}; expected 'min' or 'max'")
    return 1 if mode == "max" else -1


def _floats(values: Iterable[float | None]) -> np.ndarray:
    """Makes a float64 array, with NaN for None."""
    return np.array([math.nan if value is None else value for value in values], float)


def _cell(value: Any) -> str:
    return format_number(value) if isinstance(value, float) else str(value)
