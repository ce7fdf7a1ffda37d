"""Training a list of trials: the paper's pack, for any number of trials at once."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxpack import checks, executables, step
from jaxpack.engines import PackSpec
from jaxpack.forecast import Work
from jaxpack.groups import kinds_of_trials
from jaxpack.ledger import Ledger, choose_metric, trial_seed, weights
from jaxpack.pack import Ready
from jaxpack.planner import check, plan
from jaxpack.plans import Plan
from jaxpack.task import Task, check_batch_size
from jaxpack.types import (
    COMPLETE,
    FAILED,
    STOPPED,
    HParams,
    LaneState,
    Trial,
    TrialResult,
    check_hparam,
)
from jaxpack.worker import Pool


@executables.disk_cache()
def train(
    task: Task,
    trials: Sequence[Mapping[str, Any] | TrialResult],
    *,
    epochs: int | Sequence[int] | None = None,
    steps: int | Sequence[int] | None = None,
    horizon: int | Sequence[int] | None = None,
    engine: str = "auto",
    seed: int | None = None,
    max_lanes: int | None = None,
    workers: int | None = None,
    metric: str | None = None,
    mode: str | None = None,
    evaluate_every: int | None = None,
    patience: int | None = None,
) -> list[TrialResult]:
    """Trains trials together, each as if it were alone.

    Args:
      task: What is trained.
      trials: The hparams of each trial, or a `TrialResult` with its weights, which
        goes on from there to `epochs` in total. They are numbered from 0.
      epochs: How long to train, one number for all or one a trial. 0 gives the
        initial state.
      steps: The same in steps. Exactly one of `epochs` and `steps` is given.
      horizon: The `hp.total_steps` that schedules see, in the same unit and before
        the conversion to steps; how long the trial trains if None.
      engine: "packed", "solo", "fused", or "auto" for what suits the device.
      seed: Fixes the weights, the dropout masks and the order of the data; 0 if
        None, or for trials that go on, the seed they have been trained with.
      max_lanes: Widest pack allowed; for "fused", the most trials of one program,
        4 if None.
      workers: Worker threads; a core each on a CPU, one a device elsewhere.
      metric: What `score` is; the task's first metric if None.
      mode: "min" or "max"; told from the metric's name if None.
      evaluate_every: Evaluate every so many epochs (or steps), not only at the end.
      patience: Stop a trial after so many evaluations in a row without a new best
        score. Every trial is then returned as it was at its best evaluation.

    Returns:
      A result a trial, in the order given, with its weights.

    Raises:
      ValueError: If an argument is not what it should be.
      Exception: Whatever the task's own functions raise for every trial alike.

    Examples:
      >>> import jaxpack as jp, optax
      >>> task = jp.Task(
      ...     model=lambda hp: jp.models.MLP(width=16, depth=1),
      ...     optimizer=lambda hp: optax.sgd(hp.learning_rate),
      ...     dataset=jp.data.load("digits"),
      ... )
      >>> results = jp.train(
      ...     task, [{"learning_rate": 0.1}, {"learning_rate": 0.01}], epochs=1
      ... )
      >>> [result.status for result in results]
      ['COMPLETE', 'COMPLETE']
    """
    if not isinstance(task, Task):
        raise ValueError(f"task is {task!r}; make one with jaxpack.Task")
    metric, mode = choose_metric(task, metric, mode, ranked=patience is not None)
    if evaluate_every is not None:
        checks.whole("evaluate_every", evaluate_every)
    _check_patience(patience, evaluate_every)
    check(engine, max_lanes, workers)
    numbered = _numbered(trials)
    seed = _seed(seed, trials)
    if not numbered:
        return []
    unit, amounts = _amounts(epochs, steps, len(numbered))
    horizons = amounts if horizon is None else _spread("horizon", horizon, len(trials))
    spes = [steps_per_epoch(task, trial.hparams) for trial in numbered]
    targets = [in_steps(a, unit, spe) for a, spe in zip(amounts, spes, strict=True)]
    total = [in_steps(h, unit, spe) for h, spe in zip(horizons, spes, strict=True)]
    made = plan(
        task,
        numbered,
        kinds_of_trials(numbered),
        total,
        Work.of(targets),
        engine=engine,
        max_lanes=max_lanes,
        workers=workers,
    )
    ledger = Ledger(numbered, metric, mode, 0 if patience is None else len(numbered))
    for trial, given in zip(numbered, trials, strict=True):
        if isinstance(given, TrialResult):
            rows = [row for row in given.history if row["steps"] <= given.steps]
            ledger.records[trial.trial_id].rows += rows
    for trial_id, reason in made.failed.items():
        ledger.fail(trial_id, reason)
    ready = [
        make_ready(
            trial,
            made,
            order=(-target, trial.trial_id),
            stops=_stops(target, evaluate_every, unit, spe, _steps_had(given)),
            total_steps=horizon_steps,
            going_on=given if isinstance(given, TrialResult) else None,
        )
        for trial, given, target, spe, horizon_steps in zip(
            numbered, trials, targets, spes, total, strict=True
        )
        if trial.trial_id not in made.failed
    ]
    longest = max(-(-t // spe) for t, spe in zip(targets, spes, strict=True))
    with Pool(task.dataset, seed, longest, made.workers, made.fused) as pool:
        stopped = _run(pool, ready, ledger, spes, patience)
    best = {incumbent.trial_id: incumbent for incumbent in ledger.incumbents}
    results = []
    for i in range(len(numbered)):
        status = STOPPED if i in stopped else COMPLETE
        result = ledger.result(i, status, seed=seed)
        state = best[i].state if i in best and result.status != FAILED else None
        if state is not None:
            read = {"score": best[i].score, "steps": best[i].steps}
            result = dataclasses.replace(result, **read, **weights(state))
        results.append(result)
    return results


def _run(
    pool: Pool,
    ready: Sequence[Ready],
    ledger: Ledger,
    spes: Sequence[int],
    patience: int | None,
) -> set[int]:
    """Trains all to their ends; returns the trials that patience has stopped."""
    left = {trial.trial_id: trial for trial in ready}
    stopped: set[int] = set()
    # With patience a trial comes back at every evaluation, for it to be decided on.
    legs = slice(None if patience is None else 1)
    pool.submit([trial._replace(stops=trial.stops[legs]) for trial in ready])
    while left:
        reading = pool.get()
        assert reading is not None
        i = reading.trial_id
        ledger.read(reading, spes[i], {})
        if not reading.done:
            continue
        stops = tuple(stop for stop in left[i].stops if stop > reading.steps)
        record = ledger.records[i]
        if patience is None or not stops or record.state is None:
            del left[i]
        elif stale([r[ledger.metric] for r in record.rows], ledger.mode, patience):
            stopped.add(i)
            del left[i]
        else:
            left[i] = left[i]._replace(
                state=record.state, step=reading.steps, stops=stops
            )
            pool.submit([left[i]._replace(stops=stops[:1])])
    return stopped


def stale(scores: Sequence[float], mode: str, patience: int) -> bool:
    """Whether the last `patience` scores bring nothing better than those before.

    Examples:
      >>> stale([0.5, 0.7, 0.6, 0.7], "max", 2), stale([0.5, 0.7, 0.6, 0.7], "max", 3)
      (True, False)
    """
    good = [-score if mode == "min" else score for score in scores]
    good = [-math.inf if math.isnan(score) else score for score in good]
    before, last = good[:-patience], good[-patience:]
    return bool(before) and not max(last) > max(before)


def _check_patience(patience: Any, evaluate_every: int | None) -> None:
    if patience is None:
        return
    checks.whole("patience", patience)
    if evaluate_every is None:
        raise ValueError(
            f"patience is {patience}, but trials are evaluated at their end only; "
            "give evaluate_every, too"
        )


def steps_per_epoch(task: Task, hparams: HParams) -> int:
    """Steps in an epoch of one trial; the last may be of fewer examples."""
    count = task.dataset.num_train
    return -(
        -count // check_batch_size(hparams.get("batch_size", task.batch_size), count)
    )


def in_steps(amount: int, unit: str, spe: int) -> int:
    """A resource in steps.

    Raises:
      ValueError: If there are more of them than int32 can count.
    """
    steps = amount * spe if unit == "epochs" else amount
    if steps >= 2**31:
        raise ValueError(
            f"{amount} {unit} are {steps} steps; a trial can have 2**31 - 1 at most"
        )
    return steps


def make_ready(
    trial: Trial,
    made: Plan,
    *,
    order: tuple[float, ...],
    stops: tuple[int, ...],
    total_steps: int,
    state: LaneState | None = None,
    going_on: TrialResult | None = None,
) -> Ready:
    """A trial as the workers take it.

    Args:
      trial: The trial.
      made: The plan it is part of.
      order: Its place among the ready trials.
      stops: Steps at which it is evaluated.
      total_steps: Its schedule's horizon.
      state: Its state, if it goes on from one.
      going_on: The result it goes on from, in place of `state`.

    Raises:
      ValueError: If `going_on` does not fit.
    """
    pack = made.pack_of(trial.trial_id, stops[-1])
    if going_on is not None:
        state = state_of(going_on, pack, stops[-1])
    values = dict(trial.hparams) | {"total_steps": total_steps}
    return Ready(
        order=order,
        trial_id=trial.trial_id,
        pack=pack,
        lane=step.lane_values(pack.program.lane_hparams, values),
        trial_seed=trial_seed(trial.hparams, trial.trial_id),
        state=state,
        step=0 if state is None else int(state.step),
        stops=stops,
        hparams=trial.hparams,
    )


def state_of(result: TrialResult, pack: PackSpec, target: int) -> LaneState:
    """The state that a result's training goes on from.

    Raises:
      ValueError: If the result failed or holds no weights, they are not of the task's
        shapes and dtypes, or it has trained for longer than asked.
    """
    name = f"trial {result.trial_id}"
    if result.status == FAILED:
        raise ValueError(f"{name} has FAILED and cannot go on: {result.reason}")
    if result.params is None or result.opt_state is None:
        raise ValueError(f"{name} cannot go on: its weights were not kept")
    if result.steps > target:
        raise ValueError(
            f"{name} has trained for {result.steps} steps, more than the {target} that "
            "it should have in total"
        )
    state = LaneState(
        params=result.params,
        model_state=result.model_state,
        opt_state=result.opt_state,
        key=result.key,
        step=np.int32(result.steps),
        target_step=np.int32(target),
        first_bad_step=np.int32(-1),
        # The loss of an epoch begun before counts from here.
        epoch_loss=np.float32(0),
        epoch_weight=np.float32(0),
    )
    expected = jax.tree.structure(pack.state)
    if jax.tree.structure(state) != expected:
        raise ValueError(f"{name} cannot go on: its weights are of another model")
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(pack.state),
        jax.tree.leaves(state),
        strict=True,
    ):
        if (a.shape, a.dtype) != (np.shape(b), b.dtype):
            raise ValueError(
                f"{name} cannot go on: {jax.tree_util.keystr(path)} is "
                f"{b.dtype}{list(np.shape(b))}, the task's is {a.dtype}{list(a.shape)}"
            )
    return state


def _numbered(trials: Sequence[Mapping[str, Any] | TrialResult]) -> list[Trial]:
    numbered = []
    for i, hparams in enumerate(hparams_of("trials", trials)):
        checked = {name: check_hparam(name, value) for name, value in hparams.items()}
        numbered.append(Trial(i, HParams(checked)))
        trial_seed(numbered[-1].hparams, i)
    return numbered


def hparams_of(name: str, trials: Any) -> list[Mapping[str, Any]]:
    """The hparams of trials that are given as such, or as what came of them.

    Raises:
      ValueError: If `trials`, an argument of that name, is no list of these.
    """
    if not isinstance(trials, Sequence) or isinstance(trials, str):
        raise ValueError(
            f"{name} is of type {type(trials).__name__}; give a list of hparams, one "
            "mapping a trial"
        )
    given = [x.hparams if isinstance(x, TrialResult) else x for x in trials]
    for i, hparams in enumerate(given):
        if not isinstance(hparams, Mapping):
            raise ValueError(
                f"{name}[{i}] is {hparams!r}; it must map hparams to values"
            )
    return given


def _seed(seed: int | None, trials: Sequence[Mapping[str, Any] | TrialResult]) -> int:
    """The seed asked for, or that of the trials that go on.

    Raises:
      ValueError: If trials that go on have been trained with another.
    """
    theirs = {trial.seed for trial in trials if isinstance(trial, TrialResult)}
    seed = checks.seed(min(theirs, default=0) if seed is None else seed)
    if theirs - {seed}:
        raise ValueError(
            f"seed is {seed}, but trials that are to go on have been trained with "
            f"seed {min(theirs - {seed})}: their data would come in another order"
        )
    return seed


def _amounts(
    epochs: int | Sequence[int] | None, steps: int | Sequence[int] | None, count: int
) -> tuple[str, list[int]]:
    if (epochs is None) == (steps is None):
        raise ValueError(
            f"epochs is {epochs!r} and steps is {steps!r}; give exactly one of them"
        )
    if epochs is not None:
        return "epochs", _spread("epochs", epochs, count)
    return "steps", _spread("steps", steps, count)


def _spread(name: str, value: Any, count: int) -> list[int]:
    """One whole number for every trial."""
    many = isinstance(value, Sequence | np.ndarray) and not isinstance(value, str)
    values = list(value) if many and np.ndim(value) else [value] * count
    if len(values) != count:
        raise ValueError(f"{name} has {len(values)} numbers for {count} trials")
    return [checks.whole(name, item, 0) for item in values]


def _steps_had(given: Mapping[str, Any] | TrialResult) -> int:
    return given.steps if isinstance(given, TrialResult) else 0


def _stops(
    target: int, every: int | None, unit: str, spe: int, had: int
) -> tuple[int, ...]:
    """The steps at which a trial that has had `had` of them is evaluated."""
    if every is None:
        return (target,)
    stride = in_steps(every, unit, spe)
    return (*range(had - had % stride + stride, target, stride), target)
