"""Hyperband run in the ways that the paper compares: one by one, by packs, all at once.

Each way trains the trials of one seed and promotes by the same rule; what is timed is
training and evaluation, from the workers' start to the last reading.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jaxpack as jp
from jaxpack import executables, policies
from jaxpack.explain import draw, plan_sweep
from jaxpack.plans import Plan
from jaxpack.schedulers import Assignment, Scheduler
from jaxpack.train import make_ready, steps_per_epoch
from jaxpack.types import Trial
from jaxpack.worker import Pool

Scores = dict[tuple[int, int], tuple[float, float] | None]
"""Accuracy and loss by trial and rung; None where the trial failed."""


class Run(NamedTuple):
    """What came of a sweep.

    Attributes:
      scores: Every reading.
      seconds: Time of training and evaluation.
      lane_epochs: Epochs trained, every trial's counted.
      compile_seconds: Time spent compiling, which `seconds` includes.
    """

    scores: Scores
    seconds: float
    lane_epochs: float
    compile_seconds: float

    @property
    def best(self) -> float:
        """The best accuracy read at any rung, or NaN if there is none."""
        read = [score[0] for score in self.scores.values() if score is not None]
        return max(read, default=math.nan)

    @property
    def promoted(self) -> frozenset[tuple[int, int]]:
        """Trials and the rungs, from 1, that they were promoted to."""
        return frozenset(place for place in self.scores if place[1] > 0)


def across_brackets(
    task: jp.Task, space: jp.Space, scheduler: Scheduler, **options: Any
) -> Run:
    """All brackets at once, as `jp.sweep` runs them; the options are its own."""
    result = jp.sweep(task, space, scheduler, progress=False, **options)
    scores = {(row["trial_id"], row["rung"]): score_of(row) for row in result.history}
    stats = result.stats
    return Run(scores, stats.wall_seconds, stats.lane_epochs, stats.compile_seconds)


@executables.disk_cache()
def by_rungs(
    task: jp.Task,
    space: jp.Space,
    scheduler: Scheduler,
    *,
    size: int = 9,
    restart: bool = False,
    policy: str | None = None,
    engine: str = "auto",
    workers: int | None = None,
    seed: int = 0,
) -> Run:
    """One bracket after the other, one rung after the other, in packs.

    Every pack is trained to the end before the next one starts, as in the paper: of
    one trial, this is Hyperband one by one.

    Args:
      task: What is trained.
      space: The hparams to try.
      scheduler: Decides which trial trains to which epoch.
      size: Trials of a pack.
      restart: Whether a promoted trial is trained afresh, as the original Hyperband
        does, or goes on from where it was.
      policy: Puts the trials of a rung into packs; None takes them in their order.
      engine: The engine within a pack.
      workers: Worker threads.
      seed: The sweep's seed.
    """
    trials = draw(space, scheduler.num_trials, seed)
    brackets = scheduler.start("max", len(trials))
    made = plan_sweep(task, space, scheduler, trials, engine, size, workers)
    choose = None if policy is None else policies.named(policy, space, seed)
    states: dict[int, Any] = {}
    scores: Scores = {}
    epochs = scheduler.max_resource
    with Pool(task.dataset, seed, epochs, made.workers, made.fused) as pool:
        for index in range(len(brackets.plan)):
            rung = [given for given in brackets.ready() if given.bracket == index]
            while rung:
                promoted: list[Assignment] = []
                for pack in packed(rung, trials, made, choose, size):
                    read = _train(pool, task, trials, made, pack, epochs, states)
                    for trial_id, (score, state) in read.items():
                        scores[trial_id, brackets.rung_of(trial_id)] = score
                        states[trial_id] = None if restart else state
                        accuracy = math.nan if score is None else score[0]
                        promoted += brackets.report(trial_id, accuracy)
                rung = promoted
        stats = pool.stats()
    return Run(scores, stats.wall_seconds, stats.lane_epochs, stats.compile_seconds)


def packed(
    rung: Sequence[Assignment],
    trials: Sequence[Trial],
    made: Plan,
    choose: policies.Policy | None,
    size: int,
) -> list[list[Assignment]]:
    """Puts the trials of a rung into packs, by a policy or in their order."""
    if choose is None:
        return [list(rung[i : i + size]) for i in range(0, len(rung), size)]
    candidates = [
        policies.Candidate(trials[given.trial_id].hparams, made.pack_of(given.trial_id))
        for given in rung
    ]
    packs = policies.packs(choose, candidates, size)
    return [[rung[i] for i in places] for places in packs]


def score_of(metrics: Mapping[str, Any]) -> tuple[float, float] | None:
    """Accuracy and loss, or None unless both are finite.

    Examples:
      >>> score_of({"accuracy": 0.5, "loss": 1.0}), score_of({"loss": math.nan})
      ((0.5, 1.0), None)
    """
    score = metrics.get("accuracy", math.nan), metrics.get("loss", math.nan)
    return score if all(map(math.isfinite, score)) else None


def _train(
    pool: Pool,
    task: jp.Task,
    trials: Sequence[Trial],
    made: Plan,
    pack: Sequence[Assignment],
    max_epochs: int,
    states: Mapping[int, Any],
) -> dict[int, tuple[tuple[float, float] | None, Any]]:
    """Trains a pack to the end; the score and the state of each trial, by id."""
    ready = []
    for given in pack:
        spe = steps_per_epoch(task, trials[given.trial_id].hparams)
        ready.append(
            make_ready(
                trials[given.trial_id],
                made,
                order=(given.trial_id,),
                stops=(given.resource * spe,),
                total_steps=max_epochs * spe,
                state=states.get(given.trial_id),
            )
        )
    pool.submit(ready)
    read = {}
    for _ in ready:
        reading = pool.get()
        assert reading is not None
        read[reading.trial_id] = score_of(reading.metrics), reading.state
    # In the order of the pack, not that of the threads.
    return {given.trial_id: read[given.trial_id] for given in pack}
