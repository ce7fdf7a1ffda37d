"""Where the time of a sweep went, and how full its lanes were."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxpack.progress import format_number
from jaxpack.report.style import BLUE, GREEN, GREY, LIGHT_BLUE, ORANGE
from jaxpack.worker import Stats

# Slow to import, and only needed by who looks at results.
if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS = {"compile": ORANGE, "train": BLUE, "evaluate": LIGHT_BLUE, "swap": GREEN}
# By the names of `Stats`.
_SECONDS = {
    "compile": "compile_seconds",
    "train": "train_seconds",
    "evaluate": "eval_seconds",
    "swap": "swap_seconds",
}


def time_split(stats: Stats) -> dict[str, float]:
    """Seconds by activity, summed over the workers; what is left of them is `idle`.

    Examples:
      >>> time_split(Stats(train_seconds=3.0, wall_seconds=2.5, workers=2))
      {'compile': 0.0, 'train': 3.0, 'evaluate': 0.0, 'swap': 0.0, 'idle': 2.0}
    """
    split = {name: getattr(stats, field) for name, field in _SECONDS.items()}
    idle = stats.wall_seconds * stats.workers - sum(split.values())
    return {**split, "idle": max(0.0, idle)}


def work_figure(stats: Stats) -> Figure:
    """Draws the time split in all and over time, and the lanes' occupancy over time.

    Args:
      stats: What the sweep cost. Without a timeline only the first is drawn.
    """
    from matplotlib.figure import Figure

    timeline = stats.timeline
    known = bool(timeline.get("train_seconds"))
    figure = Figure((8.0, 5.6 if known else 1.7), layout="constrained")
    if known:
        total, split, occupancy = figure.subplots(3, 1, height_ratios=(1, 3, 2))
        _over_time(split, timeline, stats.workers)
        _occupancy(occupancy, timeline)
    else:
        total = figure.subplots()
    _total(total, time_split(stats))
    return figure


def _total(axes: Axes, split: Mapping[str, float]) -> None:
    left = 0.0
    for name, seconds in split.items():
        label = f"{name} {format_number(round(seconds, 3))} s"
        axes.barh(0, seconds, left=left, color=_COLORS.get(name, GREY), label=label)
        left += seconds
    axes.set_xlim(0, left or 1.0)
    axes.set_yticks([])
    axes.set_title("seconds of all workers", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, -0.35),
        ncols=5,
        fontsize=8,
        frameon=False,
    )


def _over_time(axes: Axes, timeline: Mapping[str, Any], workers: int) -> None:
    edges = _edges(timeline)
    base = np.zeros(len(edges) - 1)
    for name, color in _COLORS.items():
        share = _padded(timeline.get(_SECONDS[name], ()), len(base))
        share = share / (timeline["bin_seconds"] * workers)
        axes.stairs(base + share, edges, baseline=base, fill=True, color=color)
        base = base + share
    axes.set_ylim(0, 1.05)
    axes.set_ylabel("share of workers", fontsize=8)
    axes.set_title("what the workers did", fontsize=9)
    _finish(axes, edges)


def _occupancy(axes: Axes, timeline: Mapping[str, Any]) -> None:
    edges = _edges(timeline)
    done = _padded(timeline["lane_steps"], len(edges) - 1)
    computed = _padded(timeline["computed"], len(edges) - 1)
    # Where nothing was trained, there is nothing to be full.
    share = np.divide(
        done, computed, out=np.full_like(done, np.nan), where=computed > 0
    )
    axes.stairs(np.nan_to_num(share), edges, fill=True, color=LIGHT_BLUE)
    axes.stairs(share, edges, color=BLUE, baseline=None)
    axes.set_ylim(0, 1.05)
    axes.set_ylabel("share of lanes", fontsize=8)
    axes.set_title("lanes that trained a trial", fontsize=9)
    axes.set_xlabel("seconds since the start", fontsize=8)
    _finish(axes, edges)


def _finish(axes: Axes, edges: np.ndarray) -> None:
    axes.set_xlim(0, edges[-1])
    axes.set_yticks([0, 0.5, 1], ["0", "50 %", "100 %"])
    axes.tick_params(labelsize=8)
    axes.grid(axis="y", alpha=0.3)


def _edges(timeline: Mapping[str, Any]) -> np.ndarray:
    bins = max(len(v) for v in timeline.values() if isinstance(v, list | tuple))
    return np.arange(bins + 1) * timeline["bin_seconds"]


def _padded(values: Any, length: int) -> np.ndarray:
    padded = np.zeros(length)
    padded[: len(values)] = values
    return padded
