"""What the pictures have in common: colours, limits, the legend, and SVG for a page."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxpack.progress import format_number
from jaxpack.report.ranking import floats, scored, sign
from jaxpack.types import COMPLETE, STOPPED, TrialResult

# Slow to import, and only needed by who looks at results.
if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, LIGHT_BLUE, GREY = "#1f5fa8", "#86b6e3", "#a9a9a9"
ORANGE, RED, GREEN = "#d96b00", "#c0392b", "#3f8f5b"

DARK = {
    BLUE: "#6ea8ec",
    LIGHT_BLUE: "#3f6f9f",
    GREY: "#6f747b",
    ORANGE: "#ffa04a",
    RED: "#ff7a6b",
    GREEN: "#6cc08b",
}
"""What each colour becomes on a dark page."""

PROMOTED = "promoted, then stopped"
# How the line of a trial looks, by what became of it: colour and width in points.
LINES = {COMPLETE: (BLUE, 1.6), PROMOTED: (LIGHT_BLUE, 1.1), STOPPED: (GREY, 0.8)}


def fate(trial: TrialResult) -> str:
    """What became of a trial, in the words of `LINES`.

    Examples:
      >>> from jaxpack.types import HParams
      >>> fate(TrialResult(0, HParams({}), "STOPPED", rung=1))
      'promoted, then stopped'
    """
    if trial.status == COMPLETE:
        return COMPLETE
    return PROMOTED if trial.rung else STOPPED


def score_limits(
    trials: Sequence[TrialResult], metric: str, mode: str
) -> tuple[float, float]:
    """Limits that show every good score, and of the bad ones those near the others.

    Args:
      trials: The trials.
      metric: The metric whose readings are to be shown.
      mode: `"min"` if low values are good, `"max"` if high ones are.

    Returns:
      The lower and the upper limit; 0 and 1 if there is no reading.
    """
    rows = [row for trial in trials for row in scored(trial, metric)]
    good = sign(mode) * floats(row[metric] for row in rows)
    if not good.size:
        return 0.0, 1.0
    top = good.max()
    bottom = max(good.min(), top - 4 * (top - np.median(good)))
    # Room for the name of the best, and for the marks at the bottom.
    pad = (top - bottom) or max(abs(top), 1.0)
    low, high = sorted(sign(mode) * np.array([top + 0.15 * pad, bottom - 0.15 * pad]))
    return float(low), float(high)


def scale_resource(axes: Axes, trials: Sequence[TrialResult], unit: str) -> None:
    """Makes x the resource, on a log scale with a tick a rung where they are few.

    Args:
      axes: The axes.
      trials: The trials.
      unit: What resources are counted in, `"epochs"` or `"steps"`.
    """
    rows = [row for trial in trials for row in trial.history]
    # A trial that failed did so anywhere, and has no loss there.
    rungs = [row for row in rows if "rung" in row and "loss" in row]
    resources = sorted({row[unit] for row in rungs if row[unit] > 0})
    axes.set_xscale("log")
    if resources:
        axes.set_xlim(resources[0] / 1.5, resources[-1] * 1.5)
    if 0 < len(resources) <= 8:
        axes.set_xticks(resources, [format_number(x) for x in resources])
        axes.minorticks_off()


def add_legend(figure: Figure, columns: int, *, marks: bool = True) -> None:
    """Puts what the lines and marks of trials mean below a picture.

    Args:
      figure: The picture.
      columns: In how many columns.
      marks: Whether there are marks of scores beyond the edge and of failures.
    """
    from matplotlib.lines import Line2D

    lines = [
        Line2D([], [], marker=".", color=color, linewidth=width, label=what.lower())
        for what, (color, width) in LINES.items()
    ]
    shown = [
        Line2D([], [], linestyle="", marker=marker, color=color, label=label)
        for marker, color, label in (
            ("*", ORANGE, "best"),
            ("v", GREY, "worse than shown"),
            ("x", RED, "failed"),
        )
    ]
    shown = shown if marks else shown[:1]
    place = "outside lower center"
    figure.legend(
        handles=lines + shown, loc=place, ncols=columns, fontsize=8, frameon=False
    )


def to_svg(figure: Figure) -> str:
    """A picture as an `<svg>` element that goes into a page, light or dark.

    Black becomes the text colour of the page; white becomes its CSS variable
    `--paper`, the other colours `--c-<hex>`; all fall back to themselves. Ids are
    made unlike those of any other picture.
    """
    import matplotlib

    buffer = io.StringIO()
    # The same picture gives the same text; text stays text.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "jaxpack"}):
        nothing = {"Creator": None, "Date": None, "Format": None, "Type": None}
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    text = buffer.getvalue()
    text = text[text.index("<svg") :].strip()
    text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.DOTALL)
    prefix = "p" + hashlib.sha256(text.encode()).hexdigest()[:8]
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\1{prefix}-", text)
    text = re.sub(r"#000000\b", "currentColor", text)
    text = re.sub(r"#ffffff\b", "var(--paper, #ffffff)", text)
    for color in DARK:
        text = text.replace(color, f"var(--c-{color[1:]}, {color})")
    return text.replace("<svg ", '<svg role="img" fill="currentColor" ', 1)
