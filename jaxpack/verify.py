"""Trials of a sweep, trained again alone: do they come to the same scores?"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxpack import checks, executables, resume
from jaxpack.groups import kinds_of_dims
from jaxpack.pack import Reading
from jaxpack.planner import plan
from jaxpack.plans import Plan
from jaxpack.records import read_asked
from jaxpack.sweep import SweepResult
from jaxpack.task import Task
from jaxpack.train import in_steps, make_ready, steps_per_epoch
from jaxpack.types import COMPLETE, STOPPED, Trial, TrialResult
from jaxpack.worker import Pool

TOLERANCE = 5e-5
"""By how much losses may differ between engines, ..."""
TOLERANCE_STEPS = 100
"""... and after how many steps; after more they may differ by as much more."""
NUDGE = 1e-6
"""Relative change of the hparams that shows how unstable a trial is, ..."""
UNSTABLE = 10.0
"""... and how many times its effect rounding may have: both are draws of chance."""


class Check(NamedTuple):
    """One trial's comparison.

    Attributes:
      trial_id: The trial.
      steps: Steps that it has trained.
      engine: The engine that the sweep trained it with.
      recorded: Its score in the sweep.
      alone: Its score when trained alone; NaN if that failed.
      loss_difference: By how much its two validation losses differ, relative to the
        loss where that is above 1.
      tolerance: By how much they may; where it is 0, the scores must be equal, too.
      note: Why the tolerance is what it is, or what went wrong.
    """

    trial_id: int
    steps: int
    engine: str
    recorded: float
    alone: float
    loss_difference: float
    tolerance: float
    note: str

    @property
    def difference(self) -> float:
        """By how much the scores differ."""
        return abs(self.alone - self.recorded)

    @property
    def ok(self) -> bool:
        """Whether the trial came to the same, within the tolerance."""
        same = self.difference == 0 or self.tolerance > 0
        return same and self.loss_difference <= self.tolerance


@dataclasses.dataclass(frozen=True)
class Verification:
    """What `verify` has found. `print(verification)` shows it.

    Attributes:
      metric: What the scores are.
      checks: One a trial.
    """

    metric: str
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Whether all trials came to the same, within the tolerance."""
        return all(check.ok for check in self.checks)

    def __str__(self) -> str:
        rows = [
            (
                "trial",
                "steps",
                "engine",
                self.metric,
                "alone",
                "differ by",
                "loss by",
                "",
            )
        ]
        rows += [
            (
                str(check.trial_id),
                str(check.steps),
                check.engine,
                f"{check.recorded:.9g}",
                f"{check.alone:.9g}",
                f"{check.difference:.2g}",
                f"{check.loss_difference:.2g}",
                f"{'ok' if check.ok else 'NOT OK'}: {check.note}",
            )
            for check in self.checks
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        widths[-1] = 0
        return "\n".join(
            "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows
        )


@executables.disk_cache()
def verify(
    result: SweepResult,
    k: int = 3,
    task: Task | None = None,
    *,
    seed: int = 0,
    workers: int | None = None,
) -> Verification:
    """Trains some of a sweep's trials again, each alone, and compares the scores.

    Every trial has the result it would have had alone. With engine "solo", on a device
    of the same kind and with the same versions, it is the same to the bit. Otherwise
    rounding differs, and the validation losses may differ by `TOLERANCE` for every
    `TOLERANCE_STEPS` steps begun. High learning rates make more of it: such a trial is
    trained a second time with its hparams changed by `NUDGE`, and the losses may
    differ by `UNSTABLE` times what that does. A score that counts, such as accuracy,
    moves by whole examples and is shown, but does not decide.

    Args:
      result: The sweep's result.
      k: How many trials, drawn from those that are COMPLETE or STOPPED; all of them
        if there are fewer.
      task: What was trained. Not needed where `result` comes from `jaxpack.sweep`.
      seed: Of the draw.
      workers: Worker threads; a core each on a CPU, one a device elsewhere.

    Returns:
      For each trial the recorded score, the one alone, and whether they agree.

    Raises:
      ValueError: If an argument is not what it should be, no trial has been trained to
        its end, or the task is not the one of the sweep.

    Examples:
      >>> import jaxpack as jp, optax
      >>> task = jp.Task(
      ...     model=lambda hp: jp.models.MLP(width=16, depth=1),
      ...     optimizer=lambda hp: optax.sgd(hp.learning_rate),
      ...     dataset=jp.data.load("digits"),
      ... )
      >>> space = jp.Space(learning_rate=jp.log_uniform(1e-3, 1e-1))
      >>> result = jp.sweep(
      ...     task, space, jp.Hyperband(3), engine="solo", progress=False
      ... )
      >>> [check.difference for check in jp.verify(result, k=2).checks]
      [0.0, 0.0]
    """
    task = _task(result, task)
    drawn = _draw(result, k, checks.seed(seed))
    trials = [Trial(trial.trial_id, trial.hparams) for trial in drawn]
    spes = [steps_per_epoch(task, trial.hparams) for trial in trials]
    totals = [in_steps(result.max_resource, result.unit, spe) for spe in spes]
    kinds = kinds_of_dims(result.dims, trials)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # The sweep has given these.
        made = plan(task, trials, kinds, totals, engine="solo", workers=workers)
    changed = _check_same(result, task, made)
    unlike = {}
    for trial in drawn:
        engine = _engine(result, trial)
        named = [f"engine {engine} in the sweep"] * (engine != "solo")
        unlike[trial.trial_id] = [*named, *changed]
    nudged = {i for i, reasons in unlike.items() if reasons}
    read = _train(result, task, drawn, made, totals, nudged)
    found = [_check(trial, result, unlike[trial.trial_id], read) for trial in drawn]
    return Verification(result.metric, tuple(found))


def _check(
    trial: TrialResult,
    result: SweepResult,
    unlike: Sequence[str],
    read: Mapping[tuple[int, bool], Reading],
) -> Check:
    """Compares a trial's last reading with those of now.

    Args:
      trial: The trial, as it was in the sweep.
      result: The sweep.
      unlike: What was not the same then, so that rounding may differ.
      read: The readings of now, by trial and whether its hparams were nudged.
    """
    then, now = trial.history[-1], read[trial.trial_id, False]
    tolerance, note = 0.0, "to the bit"
    if unlike:
        usual = TOLERANCE * math.ceil(trial.steps / TOLERANCE_STEPS)
        swing = _apart(now.metrics, read[trial.trial_id, True].metrics)
        tolerance = max(usual, UNSTABLE * swing)
        note = f"within {tolerance:.2g}: {unlike[0]}"
        if tolerance > usual:
            note += f"; unstable, hparams nudged by {NUDGE:g} move it by {swing:.2g}"
    if now.first_bad_step is not None:
        note = f"training loss was not finite at step {now.first_bad_step}"
    return Check(
        trial_id=trial.trial_id,
        steps=trial.steps,
        engine=_engine(result, trial),
        recorded=then[result.metric],
        alone=now.metrics.get(result.metric, math.nan),
        loss_difference=_apart(then, now.metrics),
        tolerance=tolerance,
        note=now.reason or note,
    )


def _apart(then: Mapping[str, float], now: Mapping[str, float]) -> float:
    """By how much two losses differ, relative to the first where it is above 1."""
    a, b = then.get("loss", math.nan), now.get("loss", math.nan)
    return abs(a - b) / max(1.0, abs(a))


def _task(result: Any, task: Any) -> Task:
    if not isinstance(result, SweepResult):
        raise ValueError(
            f"result is {result!r}; expected what jaxpack.sweep or jaxpack.load gives"
        )
    task = result.task if task is None else task
    if task is None:
        raise ValueError(
            "task is None, and a sweep read from disk does not hold its task; give the "
            "one that it was run with: verify(result, task=...)"
        )
    if not isinstance(task, Task):
        raise ValueError(f"task is {task!r}; make one with jaxpack.Task")
    return task


def _draw(result: SweepResult, k: int, seed: int) -> list[TrialResult]:
    """The trials to train again, by number."""
    checks.whole("k", k)
    whole = [trial for trial in result.trials if trial.status in (COMPLETE, STOPPED)]
    if not whole:
        raise ValueError("no trial of the sweep is COMPLETE or STOPPED yet; wait")
    rng = np.random.Generator(np.random.Philox(seed))
    chosen = rng.choice(len(whole), min(k, len(whole)), replace=False)
    return [whole[i] for i in sorted(chosen)]


def _check_same(result: SweepResult, task: Task, made: Plan) -> list[str]:
    """What has changed since the sweep that scores may depend on, but not the task.

    Raises:
      ValueError: If the task computes something else, or on other data.
    """
    changed: list[str] = []
    if result.plan is not None and result.task is not None:
        data = result.task.dataset.content_hash
        programs = {pack.spec.program.fingerprint for pack in result.plan.packs}
        programs.update(*(pack.apart for pack in result.plan.packs))
    else:
        asked = read_asked(result.directory or "")
        data = asked["dataset"]["content_hash"]
        programs = {row["program"] for row in asked["plan"]}
        programs.update(*(row.get("apart", ()) for row in asked["plan"]))
        changed = resume.changes(asked, made)
    wrong = []
    if task.dataset.content_hash != data:
        wrong.append("its data have another content")
    wrong += [
        f"it computes something else for {dict(pack.key) or 'all trials'}"
        for pack in made.packs
        if pack.spec.program.fingerprint not in programs
    ]
    wrong += [f"trial {i} cannot be built: {why}" for i, why in made.failed.items()]
    if wrong:
        raise ValueError(
            "task is not the one of the sweep:\n  "
            + "\n  ".join([*wrong, *changed])
            + "\ngive the task that the sweep was run with"
        )
    return changed


def _train(
    result: SweepResult,
    task: Task,
    trials: Sequence[TrialResult],
    made: Plan,
    totals: Sequence[int],
    nudged: Collection[int],
) -> dict[tuple[int, bool], Reading]:
    """The readings of trials after their last steps, and of those with nudged hparams.

    The keys are trial ids, and whether the hparams were nudged.
    """
    ready = []
    for trial, total in zip(trials, totals, strict=True):
        same = make_ready(
            Trial(trial.trial_id, trial.hparams),
            made,
            order=(-trial.steps, trial.trial_id),
            stops=(trial.steps,),
            total_steps=total,
        )
        ready.append(same)
        if trial.trial_id in nudged:
            other = len(result.trials) + trial.trial_id
            ready.append(same._replace(trial_id=other, lane=_nudge(same.lane)))
    longest = max(math.ceil(trial.history[-1]["epochs"]) for trial in trials)
    read = {}
    with Pool(task.dataset, trials[0].seed, longest, made.workers) as pool:
        pool.submit(ready)
        while len(read) < len(ready):
            reading = pool.get()
            assert reading is not None
            other, trial_id = divmod(reading.trial_id, len(result.trials))
            read[trial_id, bool(other)] = reading
    return read


def _nudge(lane: Mapping[str, np.generic]) -> dict[str, Any]:
    """A lane's hparams, those that are floats changed a little."""
    return {
        name: np.float32(value.item() * (1 + NUDGE))
        if value.dtype == np.float32
        else value
        for name, value in lane.items()
    }


def _engine(result: SweepResult, trial: TrialResult) -> str:
    """The engine that a sweep trained a trial with."""
    for pack in result.stats.packs:
        static = pack.get("static", {})
        if all(trial.hparams.get(name) == value for name, value in static.items()):
            return pack["engine"]
    return "unknown"
