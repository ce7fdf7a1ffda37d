"""Shows how a sweep goes on: a live table, a line in a notebook, or plain lines.

Which of them is chosen once, by where the output goes. A terminal gets a table that is
redrawn in place. A notebook gets one line, updated in place. Anything else (a file, a
pipe, a batch job) gets plain lines through `logging`: one for each finished rung, and
one a minute in between.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import logging
import math
import sys
from collections import deque
from typing import Any, NamedTuple, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from jaxpack.schedulers.brackets import Rung
from jaxpack.worker import Stats

SPEED_SECONDS = 10.0
"""The speed shown is the mean over this time."""
LINE_SECONDS = 60.0
"""Longest time between two plain lines."""
REDRAW_SECONDS = 0.25
"""Shortest time between two redraws, which take time from the training."""


class RungCount(NamedTuple):
    """How many of a rung's trials are done.

    Attributes:
      bracket: The bracket.
      rung: The rung in it.
      resource: What a trial has had at its end, in the scheduler's unit.
      num_trials: Trials the rung has, or is going to have.
      num_done: Those that have a score, or failed.
    """

    bracket: int
    rung: int
    resource: int
    num_trials: int
    num_done: int

    @classmethod
    def of(cls, rung: Rung) -> RungCount:
        """That of a scheduler's rung."""
        return cls(*(getattr(rung, name) for name in cls._fields))


class Snapshot(NamedTuple):
    """What there is to show.

    Attributes:
      stats: What the sweep has cost so far.
      total_lane_steps: What it needs in total, as far as is known.
      rungs: All rungs of all brackets.
      unit: What resources are counted in, "epochs" or "steps".
      metric: The name of the score.
      best: The best score so far, or None.
      best_trial: The trial that has it, or None.
    """

    stats: Stats
    total_lane_steps: int
    rungs: tuple[RungCount, ...]
    unit: str
    metric: str
    best: float | None = None
    best_trial: int | None = None


class Progress:
    """Shows snapshots and messages, until closed; also as a context manager.

    It goes quiet, rather than raise, when what it writes to is broken or closed.

    Args:
      enabled: Whether to show anything.
    """

    def __init__(self, enabled: bool | None = True):
        self._view = _choose_view() if enabled else None
        # Time in seconds and lane-steps, the oldest first.
        self._samples: deque[tuple[float, int]] = deque([(0.0, 0)])
        self._shown = -math.inf
        self._latest: Snapshot | None = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def message(self, text: str) -> None:
        """Shows a text that stays."""
        self._show("message", text)

    def update(self, snapshot: Snapshot) -> None:
        """Shows how far the sweep is; at the latest when it is closed."""
        now = snapshot.stats.wall_seconds
        self._latest = snapshot
        if now - self._shown >= REDRAW_SECONDS:
            self._shown = now
            self._show_latest()

    def close(self) -> None:
        """Shows the last snapshot, and leaves the output to others."""
        self._show_latest()
        view, self._view = self._view, None
        if view is not None:
            # What is broken may not close either.
            with contextlib.suppress(Exception):
                view.close()

    def _show_latest(self) -> None:
        snapshot, self._latest = self._latest, None
        if snapshot is not None:
            self._show("update", snapshot, self._speed(snapshot.stats))

    def _show(self, method: str, *args: Any) -> None:
        if self._view is None:
            return
        try:
            getattr(self._view, method)(*args)
        except (OSError, ValueError):  # a ValueError is how a closed file answers
            self.close()

    def _speed(self, stats: Stats) -> float | None:
        """Lane-steps per second of late, or all along if there were none of late."""
        now, steps = stats.wall_seconds, stats.lane_steps
        while len(self._samples) > 1 and self._samples[1][0] <= now - SPEED_SECONDS:
            self._samples.popleft()
        self._samples.append((now, steps))
        since, steps_then = self._samples[0]
        if steps == steps_then:
            since, steps_then = 0.0, 0
        return (steps - steps_then) / (now - since) if steps and now > since else None


class _Terminal:
    """A table that is redrawn in place."""

    def __init__(self, console: Console):
        # Redrawn when updated, so that no thread is needed. What others print goes
        # above the table, but not if it has been sent elsewhere.
        self._live = Live(
            console=console,
            auto_refresh=False,
            redirect_stdout=_is_terminal(sys.stdout),
        )

    def message(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False)

    def update(self, snapshot: Snapshot, speed: float | None) -> None:
        table, line = rung_table(snapshot), Text(status_line(snapshot, speed))
        self._live.start()
        self._live.update(Group(table, line), refresh=True)

    def close(self) -> None:
        self._live.stop()


class _Notebook:
    """One line, updated in place."""

    def __init__(self, display: Any):
        self._display, self._handle = display, None

    def message(self, text: str) -> None:
        print(text, flush=True)

    def update(self, snapshot: Snapshot, speed: float | None) -> None:
        data = {
            "text/plain": f"{_rungs_line(snapshot)}; {status_line(snapshot, speed)}"
        }
        if self._handle is None:
            self._handle = self._display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)

    def close(self) -> None:
        pass


class _Lines:
    """Plain lines through `logging`, on stderr where no handler is configured."""

    def __init__(self):
        self._logger = logging.getLogger("jaxpack")
        self._level, self._handler = self._logger.level, None
        self._finished: set[tuple[int, int]] = set()
        self._last = 0.0
        if not self._logger.hasHandlers():
            self._handler = logging.StreamHandler()
            self._handler.setFormatter(
                logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S")
            )
            self._logger.addHandler(self._handler)
            # A package that sets up logging meanwhile would say each line again.
            self._logger.propagate = False
            if self._level == logging.NOTSET:
                self._logger.setLevel(logging.INFO)

    def message(self, text: str) -> None:
        self._logger.info("%s", text)

    def update(self, snapshot: Snapshot, speed: float | None) -> None:
        status, now = status_line(snapshot, speed), snapshot.stats.wall_seconds
        for count in snapshot.rungs:
            rung = count.bracket, count.rung
            if not 0 < count.num_trials <= count.num_done or rung in self._finished:
                continue
            self._finished.add(rung)
            self._line(now, f"{_finished_line(count, snapshot.unit)}; {status}")
        if now - self._last >= LINE_SECONDS:
            self._line(now, f"{_rungs_line(snapshot)}; {status}")

    def close(self) -> None:
        if self._handler is not None:
            self._logger.removeHandler(self._handler)
            self._logger.propagate = True
            self._logger.setLevel(self._level)

    def _line(self, now: float, text: str) -> None:
        self._last = now
        self._logger.info("%s", text)


def format_number(x: float | None) -> str:
    """Writes a number with four significant digits, for a table.

    Examples:
      >>> [format_number(x) for x in (0.96251, 3e-6, 100.0, 12345.6, 44625, None)]
      ['0.9625', '3e-06', '100', '12346', '44625', '-']
    """
    if x is None:
        return "-"
    if isinstance(x, int):
        return str(x)
    # From here on four digits would bring an exponent.
    return f"{x:.0f}" if 9999.5 <= abs(x) < 1e7 else f"{x:.4g}"


def status_line(snapshot: Snapshot, speed: float | None) -> str:
    """Says in a line how fast a sweep is, how long it will take, and what it found.

    Args:
      snapshot: The sweep.
      speed: Lane-steps per second; None if not known.

    Examples:
      >>> stats = Stats(lane_steps=2000, compiles=3, occupancy=0.97)
      >>> print(status_line(Snapshot(stats, 12000, (), "epochs", "loss", 0.25, 7), 500))
      500 lane-steps/s, lanes 97 % busy, 0:00:20 left, 3 compiled,
      best loss 0.25 (trial 7)
    """
    stats = snapshot.stats
    left = max(0, snapshot.total_lane_steps - stats.lane_steps)
    parts = [
        f"{'-' if speed is None else f'{speed:,.0f}'} lane-steps/s",
        f"lanes {100 * stats.occupancy:.0f} % busy",
        f"{_duration(left / speed) if speed else '-'} left",
        f"{stats.compiles} compiled",
    ]
    if snapshot.best is not None:
        best = format_number(snapshot.best)
        parts.append(f"best {snapshot.metric} {best} (trial {snapshot.best_trial})")
    return ", ".join(parts)


def rung_table(snapshot: Snapshot) -> Table:
    """A table of the trials done: a row a rung number, a column a bracket.

    Brackets with the same resources, which repeats have, share a column.
    """
    brackets: dict[int, list[RungCount]] = {}
    for count in snapshot.rungs:
        brackets.setdefault(count.bracket, []).append(count)
    columns: dict[tuple[int, ...], list[list[RungCount]]] = {}
    for counts in brackets.values():
        resources = tuple(count.resource for count in counts)
        columns.setdefault(resources, []).append(counts)
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("rung", justify="right")
    for alike in columns.values():
        times = f" (x{len(alike)})" if len(alike) > 1 else ""
        table.add_column(f"bracket {alike[0][0].bracket}{times}", justify="right")
    for rung in range(max(map(len, columns), default=0)):
        cells = [
            _cell([counts[rung] for counts in alike]) if rung < len(resources) else ""
            for resources, alike in columns.items()
        ]
        table.add_row(str(rung), *cells)
    table.caption = f"trials done/all x {snapshot.unit}"
    table.caption_justify = "left"
    return table


def _cell(counts: list[RungCount]) -> Text:
    done = sum(count.num_done for count in counts)
    trials = sum(count.num_trials for count in counts)
    style = "dim" if not done else "green" if done >= trials else "yellow"
    return Text(f"{done}/{trials} x {counts[0].resource}", style)


def _finished_line(count: RungCount, unit: str) -> str:
    trials = f"{count.num_trials} trial{'s' if count.num_trials > 1 else ''}"
    return (
        f"bracket {count.bracket} rung {count.rung} done: {trials} at "
        f"{count.resource} {unit if count.resource != 1 else unit[:-1]}"
    )


def _rungs_line(snapshot: Snapshot) -> str:
    stats, rungs = snapshot.stats, snapshot.rungs
    done = sum(0 < rung.num_trials <= rung.num_done for rung in rungs)
    share = stats.lane_steps / max(1, snapshot.total_lane_steps)
    return f"{100 * min(1, share):.0f} % done, {done} of {len(rungs)} rungs"


def _duration(seconds: float) -> str:
    return str(datetime.timedelta(seconds=math.ceil(min(seconds, 1e9))))


def _choose_view() -> _Terminal | _Notebook | _Lines:
    # A notebook's kernel has imported IPython, so nobody else needs to have it.
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if getattr(shell, "kernel", None) is not None:
        return _Notebook(importlib.import_module("IPython.display").display)
    console = _Stderr(stderr=True, force_jupyter=False)
    if (
        _is_terminal(sys.stderr)
        and console.is_terminal
        and not console.is_dumb_terminal
    ):
        return _Terminal(console)
    return _Lines()


class _Stderr(Console):
    """A console that says so when it is broken, where rich would end the process."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # closed
        return False
