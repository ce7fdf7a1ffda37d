"""The plan of a sweep, before it is run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxpack import checks, executables
from jaxpack.fixed import Fixed, as_space
from jaxpack.forecast import Work
from jaxpack.groups import kinds_of_space
from jaxpack.planner import check, plan
from jaxpack.plans import Plan
from jaxpack.schedulers import Hyperband, Scheduler
from jaxpack.space import Space
from jaxpack.task import Task, check_batch_size
from jaxpack.train import hparams_of, in_steps, steps_per_epoch
from jaxpack.types import Trial, TrialResult

MOST_TRIALS = 10**6
"""Of a sweep, all of which are drawn before it starts."""


@executables.disk_cache()
def explain(
    task: Task,
    space: Space | Sequence[Mapping[str, Any]],
    scheduler: Scheduler | None = None,
    *,
    seed: int = 0,
    engine: str = "auto",
    max_lanes: int | None = None,
    workers: int | None = None,
) -> Plan:
    """Shows what a sweep would run, without training.

    Args:
      task: What would be trained.
      space: The hparams to try, or a list of trials.
      scheduler: The scheduler; `Hyperband(27)` if None.
      seed: The sweep's seed.
      engine: As for `sweep`.
      max_lanes: As for `sweep`.
      workers: As for `sweep`.

    Returns:
      The plan. Printed, it says which hparams may differ between the lanes of one
      program and which are static and why, and which programs there are.

    Raises:
      ValueError: If an argument is not what it should be.
      Exception: Whatever the task's own functions raise for every trial alike.

    Examples:
      >>> import jaxpack as jp, optax
      >>> task = jp.Task(
      ...     model=lambda hp: jp.models.MLP(width=hp.width),
      ...     optimizer=lambda hp: optax.sgd(hp.learning_rate),
      ...     dataset=jp.data.load("digits"),
      ... )
      >>> space = jp.Space(
      ...     learning_rate=jp.log_uniform(1e-3, 1), width=jp.choice(8, 16)
      ... )
      >>> {f.name: f.per_lane for f in jp.explain(task, space).findings}
      {'learning_rate': True, 'width': False}
    """
    scheduler = Hyperband(27) if scheduler is None else scheduler
    space = check_arguments(task, space, scheduler)
    check(engine, max_lanes, workers)
    trials = draw(space, scheduler.num_trials, checks.seed(seed))
    return plan_sweep(task, space, scheduler, trials, engine, max_lanes, workers)


def draw(
    space: Space,
    count: int,
    seed: int,
    enqueue: Sequence[Mapping[str, Any] | TrialResult] = (),
) -> list[Trial]:
    """A sweep's trials: those enqueued, then distinct ones sampled from the space.

    Fewer than `count` where the space has no more.
    """
    if count > MOST_TRIALS:
        raise ValueError(
            f"scheduler takes {count} trials, more than the {MOST_TRIALS} that can be "
            "kept; give it a larger min_resource, or a smaller max_resource"
        )
    if isinstance(space, Fixed) and count != space.size:
        more = "could not all be tried" if count < space.size else "would be too few"
        raise ValueError(
            f"space has {space.size} trials and the scheduler takes {count}: they "
            f"{more}; give a list of {count}, or another scheduler, such as "
            f"jaxpack.RandomSearch({space.size}, ...)"
        )
    first = [space.check(hparams) for hparams in hparams_of("enqueue", enqueue)]
    if len(first) > count:
        raise ValueError(
            f"enqueue has {len(first)} trials, more than the {count} of the scheduler"
        )
    sampled = space.sample(count + len(first), seed)
    fresh = [hparams for hparams in sampled if hparams not in first]
    return [Trial(i, hp) for i, hp in enumerate((first + fresh)[:count])]


def horizons(
    task: Task, scheduler: Scheduler, trials: Sequence[Trial]
) -> tuple[list[int], list[int]]:
    """Each trial's steps in an epoch, and in the whole of its schedule."""
    spes = [steps_per_epoch(task, trial.hparams) for trial in trials]
    totals = [in_steps(scheduler.max_resource, scheduler.unit, spe) for spe in spes]
    return spes, totals


def plan_sweep(
    task: Task,
    space: Space,
    scheduler: Scheduler,
    trials: Sequence[Trial],
    engine: str,
    max_lanes: int | None,
    workers: int | None,
    padding: bool | None = None,
) -> Plan:
    """The plan for a sweep's trials; see `explain` for the arguments."""
    spes, totals = horizons(task, scheduler, trials)
    units = tuple(in_steps(1, scheduler.unit, spe) for spe in spes)
    return plan(
        task,
        trials,
        kinds_of_space(space, trials),
        totals,
        Work(scheduler.brackets(), units),
        engine=engine,
        max_lanes=max_lanes,
        workers=workers,
        padding=padding,
    )


def check_arguments(task: Any, space: Any, scheduler: Any) -> Space:
    """Returns the space, made from a list of trials if it is one.

    Raises:
      ValueError: If an argument is not of the kind it should be, or the space has a
        batch size that the data have not.
    """
    space = as_space(space)
    made_by = {
        "task": (task, Task, "jaxpack.Task"),
        "space": (space, Space, "jaxpack.Space, or give a list of trials' hparams"),
        "scheduler": (scheduler, Scheduler, "jaxpack.Hyperband or another scheduler"),
    }
    for name, (value, kind, maker) in made_by.items():
        if not isinstance(value, kind):
            raise ValueError(f"{name} is {value!r}; make one with {maker}")
    for dims in (space.dims, *(condition.dims for condition in space.conditions)):
        if "batch_size" in dims:
            sizes = dims["batch_size"].values()
            # Of a range the last, as there may be very many.
            largest = sizes[-1] if isinstance(sizes, range) else max(sizes)
            check_batch_size(largest, task.dataset.num_train)
    return space
