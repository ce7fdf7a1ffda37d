"""How scores depend on hparams: one by one, and all at once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxpack.dimensions import Choice, Constant, Dimension, Integer, Uniform
from jaxpack.progress import format_number
from jaxpack.records import dims_of
from jaxpack.report.ranking import best_row, floats, ranked
from jaxpack.report.style import (
    BLUE,
    GREY,
    LINES,
    ORANGE,
    add_legend,
    fate,
    score_limits,
)
from jaxpack.types import TrialResult

# Slow to import, and only needed by who looks at results.
if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def varied(
    trials: Sequence[TrialResult], dims: Mapping[str, Dimension]
) -> dict[str, Dimension]:
    """The dimensions of the hparams that are worth an axis: no constants.

    Args:
      trials: The trials.
      dims: The dimensions of the space, as far as they are known.
    """
    held = dims_of([trial.hparams for trial in trials], dims)
    return {
        name: dim
        for name, dim in held.items()
        if not isinstance(dim, Constant)
        and not (isinstance(dim, Choice) and len(dim.options) < 2)
    }


def hparams_figure(
    trials: Sequence[TrialResult],
    metric: str,
    mode: str,
    dims: Mapping[str, Dimension],
) -> Figure:
    """Draws each trial's best score against each hparam, on the hparam's own scale.

    Args:
      trials: The trials; those without a score are left out.
      metric: The metric that they are ranked by.
      mode: `"min"` if low values are good, `"max"` if high ones are.
      dims: The dimensions of the space, as far as they are known.
    """
    from matplotlib.figure import Figure

    axes_of = varied(trials, dims)
    # At most four columns, and rows of about one length.
    rows = max(1, math.ceil(len(axes_of) / 4))
    columns = max(1, math.ceil(len(axes_of) / rows))
    size = (max(5.5, 2.9 * columns), 2.6 * rows + 0.6)
    figure = Figure(size, layout="constrained")
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
    grid[0, 0].set_ylim(*score_limits(trials, metric, mode))
    order = ranked(trials, metric, mode)
    for axes in grid.flat[len(axes_of) :]:
        axes.set_visible(False)
    for axes, (name, dim) in zip(grid.flat, axes_of.items(), strict=False):
        _scatter(axes, order, metric, mode, name, dim)
    for axes in grid[:, 0]:
        axes.set_ylabel(f"best {metric}", fontsize=8)
    add_legend(figure, columns=6, marks=False)
    return figure


def _scatter(
    axes: Axes,
    order: Sequence[TrialResult],
    metric: str,
    mode: str,
    name: str,
    dim: Dimension,
) -> None:
    """One panel; `order` has the best trial first."""
    axes.set_xlabel(name, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
    with_it = [trial for trial in order if name in trial.hparams]
    if isinstance(dim, Constant):
        return
    if isinstance(dim, Choice):
        # Trials of one choice side by side: by chance, but always the same one.
        spread = np.random.default_rng(0).uniform(-0.25, 0.25, 1 + len(with_it))
        axes.set_xticks(range(len(dim.options)), _labels(dim.options))
        axes.set_xlim(-0.5, len(dim.options) - 0.5)
    else:
        spread = np.zeros(1 + len(with_it))
        _scale(axes, dim)
    places = [_position(dim, trial.hparams[name]) for trial in with_it]
    places = [x + spread[i] for i, x in enumerate(places)]
    for what, (color, _) in LINES.items():
        points = [
            (x, (best_row(trial, metric, mode) or {})[metric])
            for x, trial in zip(places, with_it, strict=True)
            if fate(trial) == what
        ]
        axes.plot(*_columns(points), ".", color=color, ms=7, alpha=0.75, mew=0)
    if with_it and with_it[0] is order[0]:
        best = (best_row(order[0], metric, mode) or {})[metric]
        axes.plot(places[0], best, "*", color=ORANGE, ms=13, mec="white")


def _scale(axes: Axes, dim: Uniform | Integer) -> None:
    """Shows all of a numeric dimension."""
    if dim.log:
        axes.set_xscale("log")
        if dim.hi / dim.lo < 100:  # Too short for powers of ten.
            axes.set_xticks(*zip(*_ticks(dim), strict=True))
            axes.minorticks_off()
        pad = (dim.hi / dim.lo) ** 0.05
        axes.set_xlim(dim.lo / pad, dim.hi * pad)
    else:
        if isinstance(dim, Integer):
            axes.locator_params(axis="x", integer=True, nbins=6)
        pad = 0.05 * (dim.hi - dim.lo)
        axes.set_xlim(dim.lo - pad, dim.hi + pad)


def parallel_figure(
    trials: Sequence[TrialResult],
    metric: str,
    mode: str,
    dims: Mapping[str, Dimension],
) -> Figure:
    """Draws each trial as a line through an axis a hparam, and its score at the end.

    The best tenth of the trials is coloured; the best trial stands out.

    Args:
      trials: The trials; those without a score are left out.
      metric: The metric that they are ranked by.
      mode: `"min"` if low values are good, `"max"` if high ones are.
      dims: The dimensions of the space, as far as they are known.
    """
    from matplotlib.collections import LineCollection
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    axes_of = varied(trials, dims)
    order = ranked(trials, metric, mode)
    size = (max(6.0, 1.5 * (len(axes_of) + 1)), 3.8)
    figure = Figure(size, layout="constrained")
    axes = figure.subplots()
    count = len(axes_of)
    for place, (name, dim) in enumerate(axes_of.items()):
        _upright(axes, place, name, [(_height(dim, v), t) for v, t in _ticks(dim)])
    low, high = score_limits(trials, metric, mode)
    ticks = [y for y in MaxNLocator(5).tick_values(low, high) if low <= y <= high]
    heights = [((y - low) / (high - low), format_number(float(y))) for y in ticks]
    _upright(axes, count, metric, heights)
    lines = []
    for trial in order:
        score = (best_row(trial, metric, mode) or {})[metric]
        end = min(max((score - low) / (high - low), 0), 1)
        line = [
            (place, _height(dim, trial.hparams[name]) + _spread(dim, end))
            for place, (name, dim) in enumerate(axes_of.items())
            if name in trial.hparams
        ]
        lines.append([*line, (count, end)])
    top = max(1, len(order) // 10)
    for members, color, width, alpha in (
        (lines[top:], GREY, 0.7, max(0.15, min(0.7, 40 / max(1, len(lines))))),
        (lines[1:top], BLUE, 1.0, 0.7),
        (lines[:1], ORANGE, 2.2, 1.0),
    ):
        axes.add_collection(
            LineCollection(members, colors=color, linewidths=width, alpha=alpha)
        )
    axes.set_xlim(-0.3, count + 0.5)
    axes.set_ylim(-0.04, 1.04)
    axes.set_xticks(range(count + 1), [*axes_of, metric], fontsize=8)
    axes.set_yticks([])
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    tenth = ", the best tenth in blue" * (top > 1)
    axes.set_title(f"{len(order)} trials: the best in orange{tenth}", fontsize=9)
    return figure


def _upright(
    axes: Axes, place: int, name: str, ticks: Sequence[tuple[float, str]]
) -> None:
    """An axis of the parallel coordinates."""
    axes.plot([place, place], [0, 1], "-", color="#000000", lw=0.8, zorder=3)
    for height, text in ticks:
        axes.plot(place, height, "_", color="#000000", ms=5, zorder=3)
        axes.annotate(
            text,
            (place, height),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=7,
            zorder=4,
            bbox={"facecolor": "#ffffff", "alpha": 0.7, "linewidth": 0, "pad": 0.5},
        )


def _ticks(dim: Dimension) -> list[tuple[Any, str]]:
    """Values to mark on the axis of a dimension, with their names."""
    if isinstance(dim, Constant):
        return [(dim.value, str(dim.value))]
    if isinstance(dim, Choice):
        return list(zip(dim.options, _labels(dim.options), strict=True))
    return [(x, format_number(x)) for x in (dim.lo, dim.typical(), dim.hi)]


def _labels(options: Sequence[Any]) -> list[str]:
    texts = [format_number(x) if isinstance(x, float) else str(x) for x in options]
    return [
        text if len(text) <= 12 else f"{text[:11]}\N{HORIZONTAL ELLIPSIS}"
        for text in texts
    ]


def _position(dim: Dimension, value: Any) -> float:
    """Where a value is on the axis of its dimension."""
    if isinstance(dim, Choice):
        return float([str(option) for option in dim.options].index(str(value)))
    return float(value)


def _height(dim: Dimension, value: Any) -> float:
    """Where a value is on an axis from 0 to 1.

    Examples:
      >>> from jaxpack.dimensions import LogUniform
      >>> round(_height(LogUniform(1e-4, 1e-2), 1e-3), 6)
      0.5
    """
    if isinstance(dim, Constant):
        return 0.5
    if isinstance(dim, Choice):
        return (_position(dim, value) + 0.5) / len(dim.options)
    lo, hi, x = float(dim.lo), float(dim.hi), float(value)
    if dim.log:
        lo, hi, x = math.log(lo), math.log(hi), math.log(x)
    return (x - lo) / (hi - lo)


def _spread(dim: Dimension, end: float) -> float:
    """What sets trials of one choice apart, by where their lines end, from 0 to 1."""
    return 0.6 * (end - 0.5) / len(dim.options) if isinstance(dim, Choice) else 0.0


def _columns(points: Sequence[tuple[float, float]]) -> tuple[np.ndarray, np.ndarray]:
    return floats(x for x, _ in points), floats(y for _, y in points)
