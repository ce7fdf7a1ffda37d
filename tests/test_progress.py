"""Progress on a terminal, in a notebook, and as plain lines."""

from __future__ import annotations

import io
import logging
import sys
import types

import pytest

from jaxpack.progress import (
    Progress,
    RungCount,
    Snapshot,
    format_number,
    rung_table,
    status_line,
)
from jaxpack.schedulers import Hyperband
from jaxpack.worker import Stats

PLAN = Hyperband(27).brackets()
NUM_RUNGS = sum(len(bracket) for bracket in PLAN)


class Terminal(io.StringIO):
    """A terminal that breaks after some writes."""

    def __init__(self, writes=None, error=BrokenPipeError):
        super().__init__()
        self.writes, self.error = writes, error

    def isatty(self):
        return True

    def write(self, text):
        if self.writes is not None:
            if not self.writes:
                raise self.error
            self.writes -= 1
        return super().write(text)


def snapshot(seconds, share=0.0, steps=None, plan=PLAN, **more):
    """A sweep of 45,000 steps after some seconds, of whose rungs a share is done."""
    rungs = [
        RungCount(b, r, resource, trials, int(trials * min(1.0, share * 2 - r / 4)))
        for b, bracket in enumerate(plan)
        for r, (trials, resource) in enumerate(bracket)
    ]
    rungs = tuple(rung._replace(num_done=max(0, rung.num_done)) for rung in rungs)
    steps = int(45_000 * share) if steps is None else steps
    stats = Stats(lane_steps=steps, wall_seconds=seconds, compiles=8, occupancy=0.971)
    best = {"best": 0.94216, "best_trial": 12} if share else {}
    return Snapshot(stats, 45_000, rungs, "epochs", "accuracy", **(best | more))


# These are no fixtures, because pytest sets stderr and its handler after those ran.


def use_terminal(monkeypatch, *breaks):
    """Puts a terminal in the place of stderr."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "stderr", Terminal(*breaks))
    return sys.stderr


def unconfigure_logging(monkeypatch):
    """Makes logging what it is in a program that never mentions it."""
    monkeypatch.setattr(logging.root, "handlers", [])
    logger = logging.getLogger("jaxpack")
    assert not logger.handlers and logger.level == logging.NOTSET
    return logger


@pytest.mark.parametrize(
    "number, text",
    [
        (3e-6, "3e-06"),
        (0.000123456, "0.0001235"),
        (0.94216, "0.9422"),
        (-0.5, "-0.5"),
        (100.0, "100"),
        (9999.7, "10000"),
        (12345.6, "12346"),
        (1.5e9, "1.5e+09"),
        (44625, "44625"),
        (0.0, "0"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
        (None, "-"),
    ],
)
def test_format_number(number, text):
    assert format_number(number) == text


def test_status_line_without_speed_or_score():
    line = status_line(snapshot(0.1), None)
    assert line == "- lane-steps/s, lanes 97 % busy, - left, 8 compiled"


def test_time_left_follows_the_total():
    shown = snapshot(10, steps=5000)
    assert "0:00:40 left" in status_line(shown, 1000)
    # Failures leave less to do, and the total may even fall short of what is done.
    assert "0:00:05 left" in status_line(shown._replace(total_lane_steps=10_000), 1000)
    assert "0:00:00 left" in status_line(shown._replace(total_lane_steps=1), 1000)
    assert "1 day, 3:46:40 left" in status_line(
        shown._replace(total_lane_steps=105_000), 1
    )


def test_rung_table_has_a_column_a_bracket():
    table = rung_table(snapshot(1, 0.25))
    columns = {c.header: [str(cell) for cell in c.cells] for c in table.columns}
    assert columns["rung"] == ["0", "1", "2", "3"]
    assert columns["bracket 0"] == ["13/27 x 1", "2/9 x 3", "0/3 x 9", "0/1 x 27"]
    assert columns["bracket 3"] == ["2/4 x 27", "", "", ""]


def test_rung_table_adds_up_repeats():
    table = rung_table(snapshot(1, 0.25, plan=Hyperband(27, repeats=3).brackets()))
    assert [c.header for c in table.columns] == [
        "rung",
        *(f"bracket {i} (x3)" for i in range(4)),
    ]
    assert str(next(iter(table.columns[1].cells))) == "39/81 x 1"


def test_terminal_shows_messages_and_the_last_snapshot(monkeypatch):
    terminal = use_terminal(monkeypatch)
    with Progress() as progress:
        progress.message("the plan [of brackets]")
        progress.update(snapshot(0.1))
        for i in range(100):
            progress.update(snapshot(1 + i / 1000, i / 200))
        progress.update(snapshot(1.1, 1.0))
    text = terminal.getvalue()
    assert text.startswith("the plan [of brackets]\n")
    last = text[text.rindex("bracket 0") :]
    assert "27/27 x 1" in last and "1/1 x 27" in last
    assert "best accuracy 0.9422 (trial 12)" in last
    # Redrawn in place, but not a hundred times in a tenth of a second.
    assert text.count("\x1b[2K") > 0
    assert 2 <= text.count("lane-steps/s") <= 4
    # The cursor is back.
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert sys.stderr is terminal


def test_terminal_leaves_a_redirected_stdout_alone(monkeypatch, capsys):
    terminal = use_terminal(monkeypatch)
    with Progress() as progress:
        progress.update(snapshot(0.1))
        print("for the file")
    assert capsys.readouterr().out == "for the file\n"
    assert "for the file" not in terminal.getvalue()


@pytest.mark.parametrize("error", [BrokenPipeError, OSError, ValueError])
@pytest.mark.parametrize("writes", range(8))
def test_broken_terminal_does_no_harm(monkeypatch, writes, error):
    stdout, terminal = sys.stdout, use_terminal(monkeypatch, writes, error)
    with Progress() as progress:
        for i in range(5):
            progress.update(snapshot(i, i / 5))
            progress.message("a note")
    assert sys.stderr is terminal and sys.stdout is stdout


def test_speed_is_that_of_the_last_seconds(caplog):
    caplog.set_level(logging.INFO, "jaxpack")
    with Progress() as progress:
        # Slow at first, while programs are compiled; then 1000 a second.
        for second in range(100):
            progress.update(snapshot(second, steps=max(0, second - 50) * 1000))
        progress.update(snapshot(130, steps=49_000))
    lines = [record.getMessage() for record in caplog.records]
    assert "- lane-steps/s" not in lines[0] and "1,000 lane-steps/s" in lines[0]
    # None of late: the mean since the start.
    assert "377 lane-steps/s" in lines[1]


def test_lines_for_finished_rungs_and_at_least_every_minute(caplog):
    caplog.set_level(logging.INFO, "jaxpack")
    times = []
    with Progress() as progress:
        for i in range(2401):  # twenty minutes
            before = len(caplog.records)
            progress.update(snapshot(i / 2, i / 2400))
            times += [i / 2] * (len(caplog.records) - before)
    lines = [record.getMessage() for record in caplog.records]
    assert all("\n" not in line for line in lines)
    assert sum(" done: " in line for line in lines) == NUM_RUNGS
    assert lines[-1].count("bracket 3 rung 0") == 0
    assert any(
        line.startswith("bracket 1 rung 2 done: 1 trial at 27 epochs; ")
        for line in lines
    )
    gaps = [b - a for a, b in zip([0, *times], [*times, 1200], strict=True)]
    assert max(gaps) <= 60
    assert NUM_RUNGS < len(lines) < 60


def test_lines_leave_out_rungs_that_nobody_reached(caplog):
    caplog.set_level(logging.INFO, "jaxpack")
    rungs = (RungCount(0, 0, 1, 3, 3), RungCount(0, 1, 3, 0, 0))
    with Progress() as progress:
        progress.update(snapshot(1)._replace(rungs=rungs))
        progress.update(snapshot(2)._replace(rungs=rungs))
    assert len(caplog.records) == 1


def test_lines_are_seen_without_configured_logging(monkeypatch, capsys):
    logger = unconfigure_logging(monkeypatch)
    with Progress() as progress:
        progress.message("the plan")
        progress.update(snapshot(1, 1.0))
    out, err = capsys.readouterr()
    assert not out
    assert err.splitlines()[0].endswith(" the plan")
    assert len(err.splitlines()) == 1 + NUM_RUNGS
    assert not logger.handlers and logger.level == logging.NOTSET


def test_lines_obey_configured_logging(caplog, capsys):
    logger = logging.getLogger("jaxpack")
    with caplog.at_level(logging.WARNING, "jaxpack"), Progress() as progress:
        assert not logger.handlers
        progress.update(snapshot(1, 1.0))
    assert not caplog.records
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("kind", ["closed", "none", "broken"])
def test_broken_stderr_does_no_harm(monkeypatch, kind):
    logger = unconfigure_logging(monkeypatch)
    stderr = io.StringIO()
    if kind == "closed":
        stderr.close()
    if kind == "broken":
        stderr = Terminal(0)
        stderr.isatty = lambda: False
    monkeypatch.setattr(sys, "stderr", None if kind == "none" else stderr)
    with Progress() as progress:
        progress.message("the plan")
        progress.update(snapshot(1, 1.0))
    assert not logger.handlers


def test_notebook_updates_one_line(monkeypatch, capsys):
    shown = []

    def display(data, *, raw, display_id):
        assert raw and display_id
        shown.append([data["text/plain"]])
        handle = types.SimpleNamespace()
        handle.update = lambda data, raw: shown[-1].append(data["text/plain"])
        return handle

    ipython = types.ModuleType("IPython")
    ipython.get_ipython = lambda: types.SimpleNamespace(kernel=object())
    ipython.display = types.ModuleType("IPython.display")
    ipython.display.display = display
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", ipython.display)
    with Progress() as progress:
        progress.message("the plan")
        for i in range(5):
            progress.update(snapshot(i, i / 5))
    ((*_, last),) = shown
    assert len(shown[0]) == 5
    assert "\n" not in last and last.startswith("80 % done, ")
    assert "best accuracy 0.9422 (trial 12)" in last
    assert capsys.readouterr() == ("the plan\n", "")


def test_ipython_in_a_terminal_is_no_notebook(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "jaxpack")
    ipython = types.ModuleType("IPython")
    ipython.get_ipython = lambda: types.SimpleNamespace()
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    with Progress() as progress:
        progress.message("the plan")
    assert caplog.messages == ["the plan"]


def test_disabled_shows_nothing(monkeypatch, capsys, caplog):
    terminal = use_terminal(monkeypatch)
    caplog.set_level(logging.INFO, "jaxpack")
    with Progress(False) as progress:
        progress.message("the plan")
        progress.update(snapshot(1, 1.0))
    assert not terminal.getvalue() and not caplog.records
    assert capsys.readouterr().out == ""
