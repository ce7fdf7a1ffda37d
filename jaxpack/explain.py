"""The plan of a sweep, before it is run."""

from __future__ import annotations

from jaxpack import executables
from jaxpack.ledger import check_seed
from jaxpack.planner import Plan, kinds_of_space, plan
from jaxpack.schedulers import Hyperband, Scheduler
from jaxpack.space import Space
from jaxpack.sweep import check_arguments, draw, expected_steps
from jaxpack.task import Task
from jaxpack.train import in_steps, steps_per_epoch


@executables.disk_cache()
def explain(
    task: Task,
    space: Space,
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
      space: The hparams to try.
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
    check_arguments(task, space, scheduler)
    trials = draw(space, scheduler.num_trials, check_seed(seed))
    spes = [steps_per_epoch(task, trial.hparams) for trial in trials]
    totals = [in_steps(scheduler.max_resource, scheduler.unit, spe) for spe in spes]
    return plan(
        task,
        trials,
        kinds_of_space(space),
        totals,
        expected_steps(scheduler, spes),
        engine=engine,
        max_lanes=max_lanes,
        workers=workers,
    )
