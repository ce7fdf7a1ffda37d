"""The picture of a sweep: scores by rung, a panel a bracket."""

from __future__ import annotations

import math
import os
import pathlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxpack.progress import format_number
from jaxpack.report.ranking import best_row, floats, ranked, scored
from jaxpack.report.style import (
    GREY,
    LINES,
    ORANGE,
    RED,
    add_legend,
    fate,
    scale_resource,
    score_limits,
)
from jaxpack.types import COMPLETE, FAILED, TrialResult

# Slow to import, and only needed by who looks at results.
if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def rungs_figure(
    trials: Sequence[TrialResult], metric: str, mode: str, unit: str = "epochs"
) -> Figure:
    """Draws the scores of trials against resource, a panel a bracket.

    A trial is a line through its rungs that ends where it was stopped. Where scores
    are far worse than the others, the edge has a triangle with their number.

    Args:
      trials: The trials.
      metric: The metric to draw.
      mode: `"min"` if low values are good, `"max"` if high ones are.
      unit: What resources are counted in, `"epochs"` or `"steps"`.
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
    grid[0, 0].set_ylim(*score_limits(trials, metric, mode))
    scale_resource(grid[0, 0], trials, unit)
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
    add_legend(figure, columns=6 if columns > 2 else 3)
    return figure


def plot_rungs(
    trials: Sequence[TrialResult],
    metric: str,
    mode: str,
    path: str | os.PathLike,
    unit: str = "epochs",
) -> pathlib.Path:
    """Saves `rungs_figure` as a picture file.

    Args:
      trials: The trials.
      metric: The metric to draw.
      mode: `"min"` if low values are good, `"max"` if high ones are.
      path: The picture file; its folder is made if need be.
      unit: What resources are counted in, `"epochs"` or `"steps"`.

    Returns:
      The path.
    """
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    rungs_figure(trials, metric, mode, unit).savefig(path, dpi=150)
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
        color, width = LINES[fate(trial)]
        axes.plot(x, y, ".-", color=color, linewidth=width, markersize=5, alpha=0.8)
        if trial.status != COMPLETE:
            axes.plot(x[-1:], y[-1:], ".", color=GREY, markersize=5)
    _mark_bad(axes, trials, metric, unit)


def _points(
    trial: TrialResult, metric: str, unit: str
) -> tuple[np.ndarray, np.ndarray]:
    """What a trial had had and scored at each reading, both `[readings]` float64."""
    # A logarithmic axis has no zero.
    rows = [row for row in scored(trial, metric) if row[unit] > 0]
    return floats(row[unit] for row in rows), floats(row[metric] for row in rows)


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
    _mark_counts(axes, below, 0.025, "v", GREY)
    _mark_counts(axes, above, 0.975, "^", GREY)
    _mark_counts(axes, failed, 0.085, "x", RED)


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
    axes.plot(x, y, "*", color=ORANGE, markersize=13, markeredgecolor="white")
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
        color=ORANGE,
        fontsize=9,
    )
