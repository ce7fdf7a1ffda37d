"""Learning curves: every reading of every trial, in one set of axes a metric."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxpack.report.ranking import floats, ranked
from jaxpack.report.style import (
    LINES,
    ORANGE,
    add_legend,
    fate,
    scale_resource,
    score_limits,
)
from jaxpack.types import TrialResult

# Slow to import, and only needed by who looks at results.
if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POINTS = 60_000
"""About how many points are drawn at most; beyond, curves are thinned."""


def curves_figure(
    trials: Sequence[TrialResult], metric: str, mode: str, unit: str = "epochs"
) -> Figure:
    """Draws the metric, the validation loss and the training loss against resource.

    The validation loss is left out where the metric is the same. Resources are on a
    log scale where trials were read at their rungs only.

    Args:
      trials: The trials.
      metric: The metric that they are ranked by.
      mode: `"min"` if low values are good, `"max"` if high ones are.
      unit: What resources are counted in, `"epochs"` or `"steps"`.
    """
    from matplotlib.figure import Figure

    rows = [row for trial in trials for row in trial.history]
    alike = all(row.get(metric) == row.get("loss") for row in rows)
    names = [metric, *(["loss"] * (not alike)), "train_loss"]
    at_rungs = bool(rows) and all("rung" in row for row in rows)
    figure = Figure((3.6 * len(names), 3.8), layout="constrained")
    panels = figure.subplots(1, len(names), sharex=True, squeeze=False)[0]
    best = [trial.trial_id for trial in ranked(trials, metric, mode)[:1]]
    every = max(1, math.ceil(len(rows) * len(names) / POINTS))
    if at_rungs:
        scale_resource(panels[0], trials, unit)
    for axes, name in zip(panels, names, strict=True):
        _draw(axes, trials, name, unit, best, every)
        better = mode if name == metric else "min"
        axes.set_ylim(*score_limits(trials, name, better))
        axes.set_title(_TITLES.get(name, name), fontsize=9)
        axes.set_xlabel(f"{unit} (log scale)" if at_rungs else unit, fontsize=8)
        if not at_rungs:
            axes.locator_params(axis="x", integer=True)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3)
    add_legend(figure, columns=6, marks=False)
    return figure


_TITLES = {"loss": "validation loss", "train_loss": "training loss"}


def _draw(
    axes: Axes,
    trials: Sequence[TrialResult],
    name: str,
    unit: str,
    best: Sequence[int],
    every: int,
) -> None:
    # The trials that got furthest come over the others, and the best over them all.
    for trial in sorted(trials, key=lambda t: (t.trial_id in best, t.steps)):
        x = floats(row[unit] for row in trial.history)
        y = floats(row.get(name) for row in trial.history)
        keep = np.isfinite(y)
        x, y = _thinned(x[keep], every), _thinned(y[keep], every)
        color, width = LINES[fate(trial)]
        if trial.trial_id in best:
            color, width = ORANGE, 2.0
        marker = "." if len(x) < 20 else ""
        axes.plot(x, y, f"{marker}-", color=color, lw=width, ms=4, alpha=0.8)


def _thinned(values: np.ndarray, every: int) -> np.ndarray:
    """Every so many-th value, and the last one."""
    if every == 1 or not len(values):
        return values
    return np.append(values[:-1:every], values[-1])
