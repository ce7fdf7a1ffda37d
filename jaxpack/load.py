"""A sweep from its directory, without the code of its task."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxpack import report, weights
from jaxpack.records import dims_from, read_asked, read_journal
from jaxpack.schedulers import Brackets
from jaxpack.schedulers.brackets import Rung
from jaxpack.sweep import SweepResult
from jaxpack.types import FAILED, PAUSED, RUNNING, HParams, TrialResult
from jaxpack.worker import Stats

# What a journal line says besides the row of its trial's history.
_BESIDES = ("trial_id", "score", "seconds", "reason", "first_bad_step", "hparams")
_BESIDES += ("time",)
_PLACE = ("bracket", "rung", "epochs", "steps")


def load(directory: str | os.PathLike) -> SweepResult:
    """Reads a sweep that has ended, was stopped, or is still running.

    The statuses come from playing the journal back to the scheduler's brackets.

    Args:
      directory: What the sweep was given as its directory; it may have been moved.

    Returns:
      What the sweep has found so far. Its plan is None, and `best` has weights only
      if they are in the directory.

    Raises:
      ValueError: If there is no sweep in the directory, or its files are damaged.
    """
    asked, path = read_asked(directory), Path(directory)
    lines = read_journal(path)
    outcome = asked.get("outcome")
    ended = isinstance(outcome, dict)
    metric, mode = asked["metric"], asked["mode"]
    trials = _trials(asked, lines, ended)
    kept = weights.read_best(path)
    rows = _rows(lines, asked.get("metrics"))
    return SweepResult(
        trials=trials,
        incumbents=_incumbents(report.ranked(trials, metric, mode), metric, mode, kept),
        history=rows,
        stats=_stats(outcome["stats"]) if ended else _stats_so_far(trials, asked),
        plan=None,
        metric=metric,
        mode=mode,
        unit=asked.get("unit", "epochs"),
        stopped=outcome["stopped"] if ended else None,
        test_metrics=outcome["test_metrics"] if ended else None,
        directory=path,
        dims=dims_from(asked.get("dims", {})),
        ended=ended,
        max_resource=max(r for bracket in asked["brackets"] for _, r in bracket),
    )


def rungs(directory: str | os.PathLike) -> list[Rung]:
    """How far every rung of every bracket of a sweep is, after its journal.

    Raises:
      ValueError: If there is no sweep in the directory, or its files are damaged.
    """
    asked, lines = read_asked(directory), read_journal(directory)
    numbers = [line["trial_id"] for line in lines]
    count = max(len(asked.get("trials", ())), *(n + 1 for n in numbers), 1)
    return _replay(asked, lines, count).rungs()


def _incumbents(
    order: Sequence[TrialResult],
    metric: str,
    mode: str,
    kept: Mapping[int, Mapping[str, Any]],
) -> list[TrialResult]:
    """The best trials at their best readings: the first, and those with weights.

    Weights from another reading, as of a sweep that died in between, are left out.
    """
    found = []
    for place, trial in enumerate(order):
        row = report.best_row(trial, metric, mode) or {}
        state = kept.get(trial.trial_id, {})
        mine = state if state.get("step") == row["steps"] else {}
        if mine or place == 0:
            own = {name: value for name, value in mine.items() if name != "step"}
            steps = row["steps"]
            found.append(
                dataclasses.replace(trial, score=row[metric], steps=steps, **own)
            )
    return found


def _trials(
    asked: Mapping[str, Any], lines: Sequence[Mapping[str, Any]], ended: bool
) -> list[TrialResult]:
    hparams = dict(enumerate(asked.get("trials", ())))
    last: dict[int, Mapping[str, Any]] = {}
    for line in lines:
        last[line["trial_id"]] = line
        hparams.setdefault(line["trial_id"], line.get("hparams", {}))
    if not hparams:
        return []
    brackets = _replay(asked, lines, 1 + max(hparams))
    rows: dict[int, list[dict[str, Any]]] = {}
    for row in _rows(lines, asked.get("metrics")):
        rows.setdefault(row.pop("trial_id"), []).append(row)
    trials = []
    for i in range(1 + max(hparams)):
        status, line = brackets.statuses[i], last.get(i, {})
        if line.get("reason") is not None:
            status = FAILED
        history = rows.get(i, [])
        scores = [r[asked["metric"]] for r in history if asked["metric"] in r]
        trials.append(
            TrialResult(
                trial_id=i,
                hparams=HParams(hparams.get(i, {})),
                status=PAUSED if ended and status == RUNNING else status,
                score=scores[-1] if scores else None,
                history=tuple(history),
                steps=history[-1]["steps"] if history else 0,
                first_bad_step=line.get("first_bad_step"),
                reason=line.get("reason"),
                bracket=brackets.bracket_of(i),
                rung=brackets.rung_of(i),
                seconds=line.get("seconds", 0.0),
                seed=asked["seed"],
            )
        )
    return trials


def _replay(
    asked: Mapping[str, Any], lines: Sequence[Mapping[str, Any]], num_trials: int
) -> Brackets:
    """The scheduler's state after the journal."""
    plan = tuple(tuple(map(tuple, bracket)) for bracket in asked["brackets"])
    brackets = Brackets(plan, asked["mode"], num_trials)
    for line in lines:
        running = brackets.statuses.get(line["trial_id"]) == RUNNING
        if running and line.get("rung") == brackets.rung_of(line["trial_id"]):
            score = line.get("score")
            brackets.report(line["trial_id"], math.nan if score is None else score)
    return brackets


def _rows(
    lines: Sequence[Mapping[str, Any]], metrics: Sequence[str] | None
) -> list[dict[str, Any]]:
    """The history: what the lines say of evaluations, with None back to NaN."""
    rows = []
    for line in lines:
        if "steps" not in line:  # The trial could not even be built.
            continue
        known = [*_PLACE, "train_loss", *(metrics or set(line) - {*_BESIDES})]
        row = {
            name: math.nan if value is None and name not in _PLACE else value
            for name, value in line.items()
            if name in known
        }
        rows.append({"trial_id": line["trial_id"], **row})
    return rows


def _stats(saved: Mapping[str, Any]) -> Stats:
    known = {field.name for field in dataclasses.fields(Stats)}
    stats = Stats(**{name: value for name, value in saved.items() if name in known})
    stats.packs = tuple(stats.packs)
    return stats


def _stats_so_far(trials: Sequence[TrialResult], asked: Mapping[str, Any]) -> Stats:
    """What the readings tell of the cost, while the sweep has not said it."""
    rows = [trial.history[-1] for trial in trials if trial.history]
    return Stats(
        lane_steps=sum(trial.steps for trial in trials),
        lane_epochs=round(sum(row["epochs"] for row in rows), 6),
        train_seconds=sum(trial.seconds for trial in trials),
        workers=asked.get("workers", 1),
        packs=tuple(asked.get("plan", ())),
    )
