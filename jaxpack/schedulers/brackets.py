"""The state of brackets while they run, and promotion."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxpack import checks
from jaxpack.types import COMPLETE, FAILED, PAUSED, RUNNING, STOPPED

Bracket = tuple[tuple[int, int], ...]
"""Rungs of `(num_trials, resource)`; a plan is a tuple of brackets."""

MODES = ("min", "max")


class Rung(NamedTuple):
    """How far one rung of a bracket is.

    Attributes:
      bracket: The bracket.
      rung: The rung.
      resource: What its trials have had in total when they report.
      step: What each trains for it: `resource` less that of the rung before.
      num_trials: The trials in it, or planned for it as long as nobody knows better.
      num_done: The trials that have reported.
    """

    bracket: int
    rung: int
    resource: int
    step: int
    num_trials: int
    num_done: int


class Assignment(NamedTuple):
    """A trial that is ready to train, and how far.

    Attributes:
      trial_id: The trial.
      bracket: The bracket it belongs to.
      rung: The rung it trains for.
      resource: The resource it will have had in total at that rung.
      remaining: What the trial has yet to train if it is promoted to the last rung.
        Its bracket cannot end sooner, so where lanes are few the trials with the most
        remaining go first, then by id.
    """

    trial_id: int
    bracket: int
    rung: int
    resource: int
    remaining: int


def promote(scores: Mapping[int, float], k: int, mode: str) -> list[int]:
    """Picks the best `k` trials by score; NaN and infinities are never among them.

    Args:
      scores: The score of each trial by its id.
      k: How many to keep at most, at least 0.
      mode: `"min"` if low scores are good, `"max"` if high ones are.

    Returns:
      Trial ids, the best first, equal scores in the order of the ids. Fewer than
      `k` when fewer scores are finite.

    Raises:
      ValueError: If `k` is not such an int, `mode` is another word, or a score is
        not a number.

    Examples:
      >>> promote({0: 0.3, 1: float("nan"), 2: 0.5, 3: 0.3}, k=2, mode="max")
      [2, 0]
    """
    check_int("k", k, least=0)
    checks.word("mode", mode, MODES)
    if not isinstance(scores, Mapping):
        raise ValueError(f"scores is {scores!r}; expected scores by trial id")
    numbers = {trial: _number(trial, score) for trial, score in scores.items()}
    finite = [trial for trial, score in numbers.items() if math.isfinite(score)]
    sign = 1 if mode == "min" else -1
    return sorted(finite, key=lambda trial: (sign * numbers[trial], trial))[:k]


class Brackets:
    """The state of a scheduler that runs: which trial trains to what, and who stays.

    Trials are numbered from 0, through the first bracket, then the next. A bracket
    promotes when the last trial of its rung has reported; the brackets do not wait
    for each other. The decisions follow from the scores alone, never from the order
    in which they arrive.

    Args:
      plan: The brackets.
      mode: `"min"` if low scores are good, `"max"` if high ones are.
      num_trials: How many trials there are, when fewer than planned: the last
        brackets go short, and one without trials goes altogether. None takes all.

    Raises:
      ValueError: If `mode` is another word or `num_trials` is not from 1 to what the
        plan starts.

    Examples:
      >>> state = Brackets((((3, 1), (1, 3)),), mode="min")
      >>> [trial.trial_id for trial in state.ready()]
      [0, 1, 2]
      >>> state.report(0, 0.5), state.report(1, 0.2)
      ([], [])
      >>> state.report(2, float("nan"))
      [Assignment(trial_id=1, bracket=0, rung=1, resource=3, remaining=2)]
      >>> dict(state.statuses)
      {0: 'STOPPED', 1: 'RUNNING', 2: 'FAILED'}
    """

    def __init__(
        self, plan: Sequence[Bracket], mode: str, num_trials: int | None = None
    ):
        checks.word("mode", mode, MODES)
        planned = sum(bracket[0][0] for bracket in plan)
        available = planned if num_trials is None else num_trials
        check_int("num_trials", available, least=1, most=planned)
        self.mode = mode
        self.plan = _cut(plan, available)
        self._bracket: dict[int, int] = {}
        self._rung: dict[int, int] = {}
        self._statuses: dict[int, str] = {}
        self._scores: list[dict[int, float]] = [{} for _ in self.plan]
        for index, bracket in enumerate(self.plan):
            for _ in range(bracket[0][0]):
                trial = len(self._statuses)
                self._bracket[trial] = index
                self._rung[trial] = 0
                self._statuses[trial] = RUNNING
        self._waited_for = [bracket[0][0] for bracket in self.plan]
        self._sizes = [[trials for trials, _ in bracket] for bracket in self.plan]
        self._reported = [[0] * len(bracket) for bracket in self.plan]

    @property
    def statuses(self) -> Mapping[int, str]:
        """The status of every trial by its id: a read-only view of the present.

        RUNNING trials have yet to report; PAUSED ones have, and wait for the others
        of their rung; STOPPED ones were not promoted; COMPLETE ones reached the last
        rung; FAILED ones reported NaN or an infinity.
        """
        return MappingProxyType(self._statuses)

    @property
    def done(self) -> bool:
        """Whether nothing is left to train."""
        return not any(self._waited_for)

    def ready(self) -> list[Assignment]:
        """All trials that have yet to report, by id: at first the first rungs."""
        statuses = self._statuses.items()
        return [self._assign(trial) for trial, status in statuses if status == RUNNING]

    def report(self, trial_id: int, score: float) -> list[Assignment]:
        """Takes the score of a trial at its rung.

        Args:
          trial_id: The trial.
          score: Its score; NaN if it failed.

        Returns:
          The trials promoted by it, the best first: none unless the rung is complete.

        Raises:
          ValueError: If the trial is not RUNNING or the score is not a number.
        """
        status = self._statuses.get(trial_id, "unknown")
        if status != RUNNING:
            raise ValueError(
                f"trial_id is {trial_id!r}, which is {status}; expected a RUNNING "
                "trial: each reports once a rung"
            )
        score = _number(trial_id, score)
        index = self._bracket[trial_id]
        last = self._rung[trial_id] + 1 == len(self.plan[index])
        reported = COMPLETE if last else PAUSED
        self._statuses[trial_id] = reported if math.isfinite(score) else FAILED
        self._scores[index][trial_id] = score
        self._waited_for[index] -= 1
        self._reported[index][self._rung[trial_id]] += 1
        if last or self._waited_for[index]:
            return []
        return self._halve(index, self._rung[trial_id] + 1)

    def rungs(self) -> list[Rung]:
        """How far every rung of every bracket is.

        Examples:
          >>> state = Brackets((((3, 1), (1, 3)),), mode="min")
          >>> _ = state.report(0, 0.5)
          >>> [(rung.num_done, rung.num_trials) for rung in state.rungs()]
          [(1, 3), (0, 1)]
        """
        rungs = []
        for index, bracket in enumerate(self.plan):
            before = 0
            for rung, (_, resource) in enumerate(bracket):
                size, done = self._sizes[index][rung], self._reported[index][rung]
                step = resource - before
                rungs.append(Rung(index, rung, resource, step, size, done))
                before = resource
        return rungs

    def bracket_of(self, trial_id: int) -> int:
        """The bracket a trial belongs to."""
        return self._bracket[trial_id]

    def rung_of(self, trial_id: int) -> int:
        """The rung a trial trains for, or the last one it reported at."""
        return self._rung[trial_id]

    def _halve(self, index: int, rung: int) -> list[Assignment]:
        """Promotes the best of a complete rung to the next and stops the others."""
        scores, self._scores[index] = self._scores[index], {}
        promoted = promote(scores, self.plan[index][rung][0], self.mode)
        for trial in scores:
            if self._statuses[trial] == PAUSED:
                self._statuses[trial] = STOPPED
        for trial in promoted:
            self._statuses[trial] = RUNNING
            self._rung[trial] = rung
        self._waited_for[index] = len(promoted)
        # Trials that failed leave this rung, and those after it, short.
        later = self._sizes[index][rung:]
        self._sizes[index][rung:] = [min(size, len(promoted)) for size in later]
        return [self._assign(trial) for trial in promoted]

    def _assign(self, trial: int) -> Assignment:
        index, rung = self._bracket[trial], self._rung[trial]
        bracket = self.plan[index]
        trained = bracket[rung - 1][1] if rung else 0
        remaining = bracket[-1][1] - trained
        return Assignment(trial, index, rung, bracket[rung][1], remaining)


def check_int(name: str, value: Any, least: int, most: int | None = None) -> None:
    """Raises ValueError unless `value` is an int from `least` to `most`.

    Examples:
      >>> check_int("max_resource", 2.5, least=1)
      Traceback (most recent call last):
      ValueError: max_resource is 2.5; expected an int of at least 1
    """
    most_too = "" if most is None else f" and at most {most}"
    if type(value) is not int or value < least or (most is not None and value > most):
        raise ValueError(
            f"{name} is {value!r}; expected an int of at least {least}{most_too}"
        )


def _cut(plan: Sequence[Bracket], num_trials: int) -> tuple[Bracket, ...]:
    """Leaves the trials after the first `num_trials` out of a plan."""
    kept = []
    for bracket in plan:
        mine = min(bracket[0][0], num_trials)
        num_trials -= mine
        if mine:
            kept.append(tuple((min(trials, mine), r) for trials, r in bracket))
    return tuple(kept)


def _number(trial: int, score: Any) -> float:
    try:
        return float(score)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the score of trial {trial} is {score!r}; expected a number"
        ) from error
