"""Ranking, tables and the picture of a sweep's trials."""

from __future__ import annotations

import dataclasses
import io
import math
import re
import sys

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from jaxpack.report import (
    best_row,
    plot_rungs,
    print_table,
    ranked,
    to_pandas,
    trials_table,
)
from jaxpack.schedulers import Hyperband, RandomSearch
from jaxpack.types import HParams, TrialResult

NAN, INF = math.nan, math.inf


def trial(trial_id, *scores, status="STOPPED", **more):
    """A trial with an accuracy an epoch of 10 steps; its loss is NaN where that is."""
    rows = tuple(
        {
            "bracket": 0,
            "rung": i,
            "epochs": i + 1,
            "steps": 10 * (i + 1),
            "train_loss": 0.5,
            "loss": NAN if math.isnan(score) else 1 - score,
            "accuracy": score,
        }
        for i, score in enumerate(scores)
    )
    known = {
        "score": scores[-1] if scores else None,
        "history": rows,
        "steps": 10 * len(rows),
        "bracket": 0,
        "rung": max(0, len(rows) - 1),
    }
    hparams = HParams({"learning_rate": 3e-6, "width": 64, "nesterov": True})
    return TrialResult(trial_id, hparams, status, **(known | more))


def swept(scheduler, score, mode="max", metric="accuracy"):
    """The trials of a sweep in which `score(trial_id, resource)` tells the scores."""
    state = scheduler.start(mode)
    history = {i: [] for i in range(scheduler.num_trials)}
    waiting = state.ready()
    while waiting:
        given = waiting.pop()
        value = score(given.trial_id, given.resource)
        row = {"bracket": given.bracket, "rung": given.rung, "epochs": given.resource}
        row |= {"steps": 10 * given.resource, "train_loss": 0.5}
        if not math.isnan(value):
            row |= {"loss": 0.5, metric: value}
        history[given.trial_id].append(row)
        waiting += state.report(given.trial_id, value)
    return [
        TrialResult(
            i,
            HParams({"width": i}),
            status,
            history=tuple(history[i]),
            steps=history[i][-1]["steps"],
            bracket=state.bracket_of(i),
            rung=state.rung_of(i),
        )
        for i, status in state.statuses.items()
    ]


@pytest.mark.parametrize(
    "scores, mode, epochs",
    [
        ([0.5, 0.9, 0.7], "max", 2),
        ([0.5, 0.9, 0.7], "min", 1),
        ([0.9, 0.5, 0.9], "max", 3),
        ([0.5, NAN], "max", 1),
        ([0.5, INF], "max", 1),
        ([0.5, -INF], "min", 1),
        ([NAN], "max", None),
        ([], "min", None),
    ],
)
def test_best_row(scores, mode, epochs):
    row = best_row(trial(0, *scores), "accuracy", mode)
    assert (row and row["epochs"]) == epochs


def test_best_row_ignores_the_metric_of_a_failed_trial():
    failed = trial(0, 0.5, 0.9)
    failed.history[1]["loss"] = INF
    row = best_row(failed, "accuracy", "max")
    assert row is not None and row["accuracy"] == 0.5


@pytest.mark.parametrize("mode, order", [("max", [3, 4, 0, 1]), ("min", [1, 3, 4, 0])])
def test_ranked(mode, order):
    trials = [
        trial(0, 0.8),
        trial(1, 0.1, 0.2),
        trial(2, NAN),
        trial(3, 0.3, 0.8),
        trial(4, 0.3, 0.8),
        trial(5),
    ]
    assert [t.trial_id for t in ranked(trials, "accuracy", mode)] == order


def test_mode_is_checked():
    with pytest.raises(ValueError, match="mode is 'maximum'; expected 'min' or 'max'"):
        ranked([trial(0, 0.5)], "accuracy", "maximum")


def test_to_pandas():
    trials = [
        trial(0, 0.5, 0.9, seconds=1.5),
        trial(1, status="FAILED", reason="no memory", bracket=None, rung=None),
    ]
    frame = to_pandas(trials, "accuracy")
    assert list(frame.columns) == [
        *("status", "score", "epochs", "steps", "bracket", "rung"),
        *("seconds", "reason"),
        *("hparams_learning_rate", "hparams_width", "hparams_nesterov"),
        *("train_loss", "loss", "accuracy"),
    ]
    assert frame.index.name == "trial_id" and list(frame.index) == [0, 1]
    good, failed = frame.loc[0], frame.loc[1]
    assert good["score"] == good["accuracy"] == 0.9 and good["loss"] == 1 - 0.9
    assert (good["epochs"], good["steps"], good["seconds"]) == (2, 20, 1.5)
    assert (good["bracket"], good["rung"], good["hparams_width"]) == (0, 1, 64)
    assert failed["reason"] == "no memory" and failed["status"] == "FAILED"
    empty = ["score", "epochs", "bracket", "rung", "train_loss", "loss", "accuracy"]
    assert failed[empty].isna().all()
    assert frame["steps"].dtype == "int64" and frame["bracket"].dtype == "Int64"


@pytest.mark.parametrize("trials", [[], [trial(0)]])
def test_to_pandas_has_the_metric_without_a_reading(trials):
    frame = to_pandas(trials, "accuracy")
    assert list(frame.columns[-3:]) == ["train_loss", "loss", "accuracy"]
    assert len(frame) == len(trials)


def test_trials_table_shows_the_best_readings():
    trials = [trial(0, 0.5), trial(1, 0.91237, 0.7), trial(2, NAN), trial(3, 0.6)]
    table = trials_table(trials, "accuracy", "max", k=2)
    cells = {column.header: list(column.cells) for column in table.columns}
    assert cells == {
        "trial": ["1", "3"],
        "accuracy": ["0.9124", "0.6"],
        "status": ["STOPPED", "STOPPED"],
        "epochs": ["1", "1"],
        "learning_\nrate": ["3e-06", "3e-06"],
        "width": ["64", "64"],
        "nesterov": ["True", "True"],
    }
    narrow = trials_table(trials, "accuracy", "max", k=2, narrow=True)
    hparams = next(iter(narrow.columns[-1].cells))
    assert hparams == "learning_rate=3e-06 width=64 nesterov=True"


@pytest.mark.parametrize("columns, is_terminal", [(20, False), (50, True), (80, True)])
def test_print_table_cuts_nothing_off(monkeypatch, columns, is_terminal):
    stream = io.StringIO()
    stream.isatty = lambda: is_terminal
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    trials = [trial(0, 0.91237)], "accuracy", "max"
    print_table(trials_table(*trials), trials_table(*trials, narrow=True))
    text = re.sub("\x1b[^m]*m", "", stream.getvalue())
    assert "0.9124" in text and "\N{HORIZONTAL ELLIPSIS}" not in text
    assert ("width=64" in text) == (columns == 50)
    if is_terminal:
        assert max(map(len, text.splitlines())) <= columns


@pytest.fixture
def figures(monkeypatch):
    """The figures that are saved."""
    saved = []
    save = Figure.savefig

    def savefig(figure, *args, **kwargs):
        saved.append(figure)
        return save(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return saved


def texts(axes):
    return [text.get_text() for text in axes.texts]


@pytest.mark.parametrize(
    "scheduler, panels",
    [
        (RandomSearch(5, max_resource=4), 1),
        (Hyperband(3), 2),
        (Hyperband(81), 5),
        (Hyperband(9, repeats=3), 9),
    ],
)
def test_plot_has_a_panel_a_bracket(tmp_path, figures, scheduler, panels):
    trials = swept(scheduler, lambda i, resource: 0.9 - 1 / (resource + 1 + i))
    path = plot_rungs(trials, "accuracy", "max", tmp_path / "new" / "rungs.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    (figure,) = figures
    shown = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title() for axes in shown] == [
        f"bracket {i}: {bracket[0][0]} trials"
        for i, bracket in enumerate(scheduler.brackets())
    ]
    assert len(shown) == panels
    assert figure.get_suptitle() == f"accuracy of {len(trials)} trials"
    assert all(axes.get_xscale() == "log" for axes in shown)
    resources = sorted({r for b in scheduler.brackets() for _, r in b})
    assert list(shown[0].get_xticks()) == resources
    best = ranked(trials, "accuracy", "max")[0]
    named = [text for axes in shown for text in texts(axes) if not text.isdigit()]
    assert len(named) == 1 and named[0].startswith(f"trial {best.trial_id}: 0.")


def test_plot_lines_end_where_trials_were_stopped(tmp_path, figures):
    trials = swept(Hyperband(9), lambda i, resource: 0.5 + 0.01 * resource - i / 100)
    plot_rungs(trials, "accuracy", "max", tmp_path / "rungs.png")
    lines = [line for line in figures[0].axes[0].lines if line.get_linestyle() == "-"]
    drawn = [(len(line.get_xdata()), line.get_color()) for line in lines]
    counts = [drawn.count(each) for each in sorted(set(drawn))]
    # 9 start, 3 of them are promoted, 1 of those to the end; each has its colour.
    assert sorted(length for length, _ in drawn) == [1] * 6 + [2] * 2 + [3]
    assert counts == [6, 2, 1] and len({color for _, color in drawn}) == 3


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("outlier", [100.0, 1e38, 1e300])
def test_plot_limits_are_robust(tmp_path, figures, mode, outlier):
    sign = 1 if mode == "min" else -1
    trials = swept(
        RandomSearch(30, max_resource=1),
        lambda i, _: sign * (outlier if i < 3 else 1 + i / 100),
        mode,
    )
    plot_rungs(trials, "accuracy", mode, tmp_path / "rungs.png")
    (axes,) = figures[0].axes
    low, high = sorted(sign * limit for limit in axes.get_ylim())
    assert 0.5 < low < 1.03 and 1.29 < high < 2
    # The three are counted at the edge.
    assert "3" in texts(axes)


def test_plot_marks_failures(tmp_path, figures):
    trials = swept(Hyperband(9), lambda i, r: NAN if i in (1, 2, 13) else 0.5 + r / 100)
    plot_rungs(trials, "accuracy", "max", tmp_path / "rungs.png")
    marks = [
        [line.get_xdata()[0] for line in axes.lines if line.get_marker() == "x"]
        for axes in figures[0].axes
    ]
    assert marks == [[1], [3], []]
    assert "2" in texts(figures[0].axes[0])


@pytest.mark.parametrize(
    "trials",
    [
        [],
        [trial(0, status="FAILED", bracket=None, rung=None)],
        [trial(0, NAN, status="FAILED")],
        [trial(0, 0.5, bracket=None), trial(1, 0.5, 0.5, bracket=None)],
    ],
    ids=["none", "unbuilt", "failed", "alike"],
)
def test_plot_of_little(tmp_path, trials):
    path = plot_rungs(trials, "accuracy", "max", str(tmp_path / "rungs.png"))
    assert path.stat().st_size > 0


def test_plot_by_steps_without_brackets(tmp_path, figures):
    # As from `train`: no bracket or rung, and a reading at step 0.
    start = {"epochs": 0, "steps": 0, "train_loss": NAN, "loss": 2.3, "accuracy": 0.1}
    rows = [
        {"epochs": i, "steps": 10 * i, "loss": 0.5, "accuracy": i / 30}
        for i in range(1, 21)
    ]
    one = TrialResult(0, HParams({}), "COMPLETE", history=(start, *rows), steps=200)
    short = (start, *rows[:9])
    other = dataclasses.replace(one, trial_id=1, history=short, steps=90)
    plot_rungs([one, other], "accuracy", "max", tmp_path / "rungs.png", unit="steps")
    (axes,) = figures[0].axes
    assert axes.get_title() == "2 trials" and axes.get_xlabel().startswith("steps")
    assert [len(line.get_xdata()) for line in axes.lines] == [9, 20, 1]


def test_tables_render():
    console = Console(file=io.StringIO(), width=100)
    console.print(trials_table([], "accuracy", "max"))
    assert "accuracy" in console.file.getvalue()
