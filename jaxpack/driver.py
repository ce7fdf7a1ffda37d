"""The driver: hands ready trials to the workers and scores to the scheduler."""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxpack import resume
from jaxpack.interrupt import Interrupts
from jaxpack.ledger import Ledger
from jaxpack.pack import Reading, Ready
from jaxpack.plans import Plan
from jaxpack.progress import Progress, RungCount, Snapshot
from jaxpack.schedulers import Assignment, Brackets, Scheduler
from jaxpack.store import Store
from jaxpack.train import in_steps, make_ready
from jaxpack.types import PAUSED, RUNNING, LaneState, Trial
from jaxpack.worker import Pool

TICK_SECONDS = 0.5
"""How often progress is shown while no reading comes."""
HAND_IN_SECONDS = 10.0
"""How long a checkpoint waits for a worker, which may be compiling."""
EARLY_SECONDS = 5.0
"""Shortest time between two checkpoints, ..."""
EARLY_SHARE = 0.05
"""... and the share of time that early ones, at the end of a rung, may take."""

_log = logging.getLogger("jaxpack")


class Driver:
    """One sweep while it runs.

    Args:
      scheduler: The scheduler.
      brackets: Its state.
      trials: The trials.
      spes: Steps in an epoch of each trial.
      totals: The schedule horizon of each trial, in steps.
      plan: What is run.
      ledger: Where readings are booked.
      store: Where they are written, if anywhere.
      on_record: Called with each journal line.
      checkpoint_seconds: Longest time between two checkpoints.

    Attributes:
      history: A row a reading.
      stopped: The limit that ended the sweep early, or None.
      interrupted: The signal that did, or None.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        brackets: Brackets,
        trials: Sequence[Trial],
        spes: Sequence[int],
        totals: Sequence[int],
        plan: Plan,
        ledger: Ledger,
        store: Store | None,
        on_record: Callable[[dict[str, Any]], None] | None,
        checkpoint_seconds: float = 60.0,
    ):
        self.scheduler, self.brackets, self.trials = scheduler, brackets, trials
        self.spes, self.totals, self.plan = spes, totals, plan
        self.ledger, self.store, self.on_record = ledger, store, on_record
        self.checkpoint_seconds = checkpoint_seconds
        self.history: list[dict[str, Any]] = []
        self.stopped: str | None = None
        self.interrupted: str | None = None
        # Trials whose best weights have been lost, and up to where they are trained
        # again; what the scheduler wants of them waits until they are there.
        self._recovering: dict[int, int] = {}
        self._deferred: dict[int, Assignment] = {}
        self._start = self._saved = time.monotonic()
        self._asked: float | None = None  # When states were asked for.
        self._news = False

    @property
    def done(self) -> bool:
        """Whether nothing is left to train."""
        return self.brackets.done and not self._recovering

    def resume(self) -> None:
        """Takes up what the store has of the sweep.

        Raises:
          ValueError: If the journal contradicts itself.
        """
        assert self.store is not None
        self.history = resume.replay(self.store.records, self.brackets, self.ledger)
        expected = {
            trial.trial_id: self.plan.pack_of(trial.trial_id).state
            for trial in self.trials
            if trial.trial_id not in self.plan.failed
        }
        found = [self.store.load_best(expected), self.store.load(expected)]
        for states in found:
            for i, state in states.items():
                self.ledger.supply(state, i)
        for incumbent in self.ledger.incumbents:
            if incumbent.state is None:
                self._recovering[incumbent.trial_id] = incumbent.steps
        for i in expected:
            for state in (states[i] for states in found if i in states):
                self._take(i, state)

    def drive(
        self,
        pool: Pool,
        shown: Progress,
        interrupts: Interrupts,
        max_seconds: float | None,
        target: float | None,
    ) -> None:
        """Runs the sweep until the scheduler is done or something ends it early."""
        self._start = self._saved = time.monotonic()
        if not self._reached(target):
            self._recover(pool)
            self._submit(pool, self.brackets.ready())
        while not self.done:
            shown.update(self._snapshot(pool))
            reading = pool.get(TICK_SECONDS)
            if reading is not None:
                self._submit(pool, self._read(reading))
            self._checkpoint(pool)
            self.interrupted = interrupts.received
            if self.done and not self.interrupted:
                break
            if self._reached(target):
                self.stopped = "target"
            elif max_seconds is not None and self._elapsed() > max_seconds:
                self.stopped = "max_seconds"
            if self.stopped or self.interrupted:
                self._stop(pool)
                break
        shown.update(self._snapshot(pool))

    def save(self) -> None:
        """Starts a checkpoint of all that is known."""
        if self.store is None:
            return
        records = self.ledger.records
        states = {i: records[i].state for i in records if self._may_train_on(i)}
        best = {inc.trial_id: inc.state for inc in self.ledger.incumbents}
        self.store.save(_known(states), _known(best))
        self._saved, self._news = time.monotonic(), False

    def ready(self, trial_id: int, target: int, order: tuple[float, ...]) -> Ready:
        """A trial as the workers take it, to be trained to a step."""
        return make_ready(
            self.trials[trial_id],
            self.plan,
            order=order,
            stops=(target,),
            total_steps=self.totals[trial_id],
            state=self.ledger.records[trial_id].state,
        )

    def place(self, trial_id: int) -> dict[str, int]:
        """Where a trial is."""
        return {
            "bracket": self.brackets.bracket_of(trial_id),
            "rung": self.brackets.rung_of(trial_id),
        }

    def _submit(self, pool: Pool, assignments: Sequence[Assignment]) -> None:
        """Hands trials to the workers; those that cannot be built fail here."""
        waiting = list(assignments)
        ready = []
        while waiting:
            given = waiting.pop()
            i = given.trial_id
            if i in self.plan.failed:
                self.ledger.fail(i, self.plan.failed[i])
                self._record({"trial_id": i, **self.place(i)}, math.nan)
                waiting += self._report(i, math.nan)
            elif i in self._recovering:
                self._deferred[i] = given
            else:
                target = in_steps(given.resource, self.scheduler.unit, self.spes[i])
                ready.append(self.ready(i, target, (-given.remaining, i)))
        pool.submit(ready)

    def _recover(self, pool: Pool) -> None:
        """Trains the best trials again whose weights have been lost."""
        for i, steps in self._recovering.items():
            _log.warning(
                "the weights of trial %d after %d steps, among the best, are lost: "
                "they are trained again",
                i,
                steps,
            )
            ready = self.ready(i, steps, (-math.inf, i))
            if ready.step > steps:  # It is further on already.
                ready = ready._replace(state=None, step=0)
            pool.submit([ready])

    def _read(self, reading: Reading) -> list[Assignment]:
        """Books a reading and lets the scheduler decide."""
        i = reading.trial_id
        if i in self._recovering:
            return self._recovered(reading)
        best = self._best_reading()
        score = self.ledger.read(reading, self.spes[i], self.place(i))
        self._news |= best != self._best_reading()
        row = {"trial_id": i, **self.ledger.records[i].rows[-1]}
        self.history.append(row)
        self._record(row, score)
        return self._report(i, score)

    def _recovered(self, reading: Reading) -> list[Assignment]:
        """Takes the weights of a trial whose reading is on record already."""
        i = reading.trial_id
        del self._recovering[i]
        state = reading.state
        if reading.reason is not None or state is None:
            _log.warning("the weights of trial %d stay lost: %s", i, reading.reason)
        else:
            self.ledger.supply(state, i)
            self._take(i, state)
            self._news = True
        return [self._deferred.pop(i)] if i in self._deferred else []

    def _report(self, trial_id: int, score: float) -> list[Assignment]:
        promoted = self.brackets.report(trial_id, score)
        self._news |= bool(promoted)
        for trial in self.brackets.statuses:
            if not self._may_train_on(trial):
                self.ledger.records[trial].state = None
        return promoted

    def _record(self, row: Mapping[str, Any], score: float) -> None:
        record = self.ledger.records[row["trial_id"]]
        line = {
            **row,
            "score": score,
            "seconds": round(record.seconds, 6),
            "first_bad_step": record.first_bad_step,
            "reason": record.reason,
            "hparams": dict(record.trial.hparams),
            "time": round(time.time(), 3),
        }
        if self.store is not None:
            self.store.append(line)
        if self.on_record is not None:
            try:
                self.on_record(line)
            except Exception as error:
                self.on_record = None
                warnings.warn(
                    f"on_record raised {type(error).__name__}: {error}; it is not "
                    "called again",
                    stacklevel=2,
                )

    def _checkpoint(self, pool: Pool) -> None:
        """Starts a checkpoint if it is time for one, and never waits for anything."""
        if self.store is None or self.store.busy:
            return
        self.store.wait()  # Raises what the last one has met with.
        now = time.monotonic()
        since = now - self._saved
        if self._asked is not None:
            if self._collect(pool) or now - self._asked > HAND_IN_SECONDS:
                self._asked = None
                self.save()
        elif since > self.checkpoint_seconds:
            self._asked = now
            pool.ask()
        elif self._news and since > EARLY_SECONDS and self._cheap():
            self.save()  # Without what the lanes train: rungs may end often.

    def _cheap(self) -> bool:
        assert self.store is not None
        return self.store.usage.seconds < EARLY_SHARE * self._elapsed()

    def _stop(self, pool: Pool) -> None:
        """Lets the segments that run end, and keeps what has been trained."""
        if self.store is not None:
            pool.ask()
        pool.close()
        while (reading := pool.get(0)) is not None:
            self._read(reading)
        if self.store is not None:
            self._collect(pool)
            self.save()
            self.store.wait()

    def _collect(self, pool: Pool) -> bool:
        """Takes what the workers have handed in; returns whether that is all."""
        states, complete = pool.handed()
        for i, state in states.items():
            self._take(i, state)
        return complete

    def _take(self, trial_id: int, state: LaneState) -> None:
        """Notes a trial's state, if it is of use and newer than the one known."""
        known = self.ledger.records[trial_id].state
        step = int(state.step)
        newer = known is None or int(known.step) < step
        if self._may_train_on(trial_id) and newer and step <= self._latest(trial_id):
            self.ledger.records[trial_id].state = state

    def _may_train_on(self, trial_id: int) -> bool:
        status = self.brackets.statuses[trial_id]
        return status in (PAUSED, RUNNING) or trial_id in self._recovering

    def _latest(self, trial_id: int) -> int:
        """The last step that a trial's state can be of."""
        status = self.brackets.statuses[trial_id]
        if status == PAUSED:
            return self.ledger.records[trial_id].steps
        if status != RUNNING:
            return self._recovering[trial_id]
        bracket = self.brackets.plan[self.brackets.bracket_of(trial_id)]
        _, resource = bracket[self.brackets.rung_of(trial_id)]
        return in_steps(resource, self.scheduler.unit, self.spes[trial_id])

    def _reached(self, target: float | None) -> bool:
        best = self.ledger.incumbents[:1]
        if target is None:
            return False
        if self.ledger.mode == "min":
            return any(incumbent.score <= target for incumbent in best)
        return any(incumbent.score >= target for incumbent in best)

    def _best_reading(self) -> list[tuple[int, int]]:
        return [(inc.trial_id, inc.steps) for inc in self.ledger.incumbents[:1]]

    def _elapsed(self) -> float:
        return time.monotonic() - self._start

    def _snapshot(self, pool: Pool) -> Snapshot:
        stats = pool.stats()
        rungs = self.brackets.rungs()
        ahead = sum((rung.num_trials - rung.num_done) * rung.step for rung in rungs)
        mean_spe = sum(self.spes) / len(self.spes)
        steps_ahead = ahead * (mean_spe if self.scheduler.unit == "epochs" else 1)
        best = self.ledger.incumbents[0] if self.ledger.incumbents else None
        return Snapshot(
            stats=stats,
            total_lane_steps=stats.lane_steps + round(steps_ahead),
            rungs=tuple(map(RungCount.of, rungs)),
            unit=self.scheduler.unit,
            metric=self.ledger.metric,
            best=None if best is None else best.score,
            best_trial=None if best is None else best.trial_id,
        )


def _known(states: Mapping[int, LaneState | None]) -> dict[int, LaneState]:
    return {i: state for i, state in states.items() if state is not None}
