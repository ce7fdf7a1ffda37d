"""A sweep: from a task, a space and a scheduler to the best of its trials."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpack import checks, executables, records, report, resume
from jaxpack.dimensions import Dimension
from jaxpack.driver import Driver
from jaxpack.explain import check_arguments, draw, horizons, plan_sweep
from jaxpack.interrupt import Interrupted, Interrupts
from jaxpack.ledger import Ledger, choose_metric, weights
from jaxpack.planner import check
from jaxpack.plans import Plan
from jaxpack.policies import Policy, named, none
from jaxpack.progress import Progress
from jaxpack.report import Summary
from jaxpack.schedulers import Scheduler
from jaxpack.space import Space
from jaxpack.store import Store
from jaxpack.task import Task
from jaxpack.types import PAUSED, RUNNING, HParams, TrialResult
from jaxpack.worker import Pool, Stats

if TYPE_CHECKING:
    import pandas as pd


@dataclasses.dataclass
class SweepResult:
    """What a sweep found.

    Attributes:
      trials: Every trial, by number; the score is that of its last rung.
      incumbents: The `keep` best trials at their best readings, with their weights.
      history: A row a reading: `trial_id`, `bracket`, `rung`, `epochs`, ...
      stats: What the sweep cost.
      plan: The programs it ran; None if it was read from disk.
      metric: What trials were ranked by.
      mode: "min" or "max".
      unit: The unit of resource, "epochs" or "steps".
      stopped: "max_seconds" or "target" if that ended the sweep early, else None.
      test_metrics: The winner's metrics on the test split, or None without one.
      directory: Where the sweep was written, or None.
      dims: The dimensions of the space by name.
      ended: False if the sweep had not ended when it was read from disk.
      max_resource: What the longest trials get, which schedules take for their end.
      task: What was trained; None if it was read from disk.
    """

    trials: list[TrialResult]
    incumbents: list[TrialResult]
    history: list[dict[str, Any]]
    stats: Stats
    plan: Plan | None
    metric: str
    mode: str
    unit: str
    stopped: str | None = None
    test_metrics: dict[str, float] | None = None
    directory: Path | None = None
    dims: Mapping[str, Dimension] = dataclasses.field(default_factory=dict)
    ended: bool = True
    max_resource: int = 0
    task: Task | None = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def best(self) -> TrialResult:
        """The best reading of any trial at any rung, with the weights it was read at.

        Equal scores go to the larger resource, then to the lower trial id.

        Raises:
          RuntimeError: If no trial has a score.
        """
        if self.incumbents:
            return self.incumbents[0]
        reasons = [trial.reason for trial in self.trials if trial.reason]
        first = f"; the first reason: {reasons[0]}" if reasons else ""
        raise RuntimeError(f"no trial of this sweep has a finite score{first}")

    @property
    def best_hparams(self) -> HParams:
        """The hparams of `best`."""
        return self.best.hparams

    @property
    def best_score(self) -> float:
        """The score of `best`."""
        score = self.best.score
        assert score is not None
        return score

    def top(self, k: int) -> list[TrialResult]:
        """The `k` best trials at their best readings, the best first."""
        kept = {trial.trial_id: trial for trial in self.incumbents}
        ranked = report.ranked(self.trials, self.metric, self.mode)[:k]
        return [kept.get(t.trial_id) or self._at_best(t) for t in ranked]

    def to_pandas(self) -> pd.DataFrame:
        """A row a trial: status, score, what it trained, hparams, metrics."""
        return report.to_pandas(self.trials, self.metric)

    def by_configuration(self) -> pd.DataFrame:
        """A row a configuration: mean and spread of the scores over its seeds."""
        return report.by_configuration(self.trials, self.mode)

    def plot(self, path: str | os.PathLike) -> Path:
        """Draws the scores by rung into a picture file, and returns its path."""
        return report.plot_rungs(
            self.trials, self.metric, self.mode, Path(path), self.unit
        )

    def report(self, path: str | os.PathLike | None = None) -> Path:
        """Writes pictures and a page that shows them, and returns the page's path.

        Args:
          path: The folder, made if need be; `report` in the sweep's directory if None.

        Raises:
          ValueError: If the sweep has no directory and `path` is None.
        """
        if path is None:
            if self.directory is None:
                raise ValueError(
                    "path is None, and the sweep was given no directory; name a folder"
                )
            path = self.directory / "report"
        return report.write(self._summary(), path)

    def _repr_html_(self) -> str:
        return report.card(self._summary())

    def _summary(self) -> Summary:
        return Summary(
            name=self.directory.resolve().name if self.directory else "sweep",
            trials=self.trials,
            metric=self.metric,
            mode=self.mode,
            unit=self.unit,
            dims=self.dims,
            stats=self.stats,
            stopped=self.stopped,
            ended=self.ended,
            test_metrics=self.test_metrics,
        )

    def _at_best(self, trial: TrialResult) -> TrialResult:
        row = report.best_row(trial, self.metric, self.mode)
        assert row is not None
        return dataclasses.replace(trial, score=row[self.metric], steps=row["steps"])

    def __repr__(self) -> str:
        best = self.best if self.incumbents else None
        return (
            f"SweepResult({len(self.trials)} trials, {self.metric}, "
            f"{self.stats.lane_steps} lane-steps, best={best})"
        )

    def __getattr__(self, name: str) -> Any:
        ours = {
            "best_params": "best_hparams (params are weights here: best.params)",
            "best_params_": "best_hparams (params are weights here: best.params)",
            "best_config": "best_hparams",
            "get_best_hyperparameters": "best_hparams",
            "best_value": "best_score",
            "best_score_": "best_score",
            "best_trial": "best",
            "best_trials": "top(k)",
            "best_result": "best",
            "get_best_result": "best",
            "get_best_models": "best.params, the weights, or jaxpack.predict",
            "dataframe": "to_pandas()",
            "trials_dataframe": "to_pandas()",
            "get_dataframe": "to_pandas()",
            "cv_results_": "to_pandas()",
        }
        hint = f"; it is {ours[name]} here" if name in ours else ""
        raise AttributeError(f"SweepResult has no attribute {name!r}{hint}")


@executables.disk_cache()
def sweep(
    task: Task,
    space: Space | Sequence[Mapping[str, Any]],
    scheduler: Scheduler,
    *,
    metric: str | None = None,
    mode: str | None = None,
    seed: int = 0,
    directory: str | os.PathLike | None = None,
    engine: str = "auto",
    max_lanes: int | None = None,
    workers: int | None = None,
    policy: str | None = None,
    max_seconds: float | None = None,
    target: float | None = None,
    enqueue: Sequence[Mapping[str, Any] | TrialResult] = (),
    keep: int = 1,
    overwrite: bool = False,
    checkpoint_seconds: float = 60.0,
    on_record: Callable[[dict[str, Any]], None] | None = None,
    progress: bool = True,
) -> SweepResult:
    """Searches a space with a scheduler, training many trials at once.

    All brackets run at the same time: a lane or worker that is free takes the next
    ready trial of any bracket, and a promoted trial goes on where it stopped.

    Args:
      task: What is trained.
      space: The hparams to try. A list of trials' hparams, as `grid` makes one, is
        tried in its order; the scheduler has to take as many.
      scheduler: `Hyperband`, `SuccessiveHalving` or `RandomSearch`.
      metric: What trials are ranked by; the task's first metric if None.
      mode: "min" or "max"; told from the metric's name if None.
      seed: Fixes the trials, their weights, dropout masks and the order of the data.
      directory: Where the sweep is written, if anywhere. The same call goes on with
        what is there, and on a sweep that is complete only gives the result; of all
        arguments, `Hyperband.repeats` or `RandomSearch.num_trials` may be raised, and
        those that do not change scores may differ.
      engine: "packed", "solo", "fused", or "auto" for what suits the device.
      max_lanes: Widest pack allowed; for "fused", the most trials of one program,
        4 if None.
      workers: Worker threads; a core each on a CPU, one a device elsewhere.
      policy: Which ready trials are packed together: "none" trains each alone (engine
        "solo", unless one is named), "random", "equal_batch" and "nearest" choose
        companions for the first as in the paper; None takes them in the planner's
        order. Of trials of one program it chooses those that share a pack; with
        engine "fused" it also chooses what is fused, and each new choice is compiled.
      max_seconds: Ends the sweep, or this part of it, after so long.
      target: Ends the sweep once a trial's score is as good.
      enqueue: Hparams to try first, in place of sampled ones.
      keep: How many of the best trials keep their weights.
      overwrite: Moves a sweep that is in `directory` aside, and begins anew.
      checkpoint_seconds: Longest time between two checkpoints of what is training;
        more come at the ends of rungs while they take little of the time.
      on_record: Called with each journal line, after it is on disk.
      progress: Whether the plan and the progress are shown.

    Returns:
      Every trial, and the best with its weights.

    Raises:
      ValueError: If an argument is not what it should be, or the directory is in use,
        damaged, or another sweep's.
      OSError: If the directory cannot be written; the sweep can go on later.
      KeyboardInterrupt: After Ctrl-C or SIGTERM, once the segments that run have ended
        and a checkpoint is written; at once if it comes twice.
      Exception: Whatever the task's own functions raise for every trial alike.

    Examples:
      >>> import jaxpack as jp, optax
      >>> task = jp.Task(
      ...     model=lambda hp: jp.models.MLP(width=16, depth=1),
      ...     optimizer=lambda hp: optax.sgd(hp.learning_rate),
      ...     dataset=jp.data.load("digits"),
      ... )
      >>> space = jp.Space(learning_rate=jp.log_uniform(1e-3, 1e-1))
      >>> result = jp.sweep(task, space, jp.Hyperband(3), progress=False)
      >>> len(result.trials), result.stats.lane_epochs
      (5, 11.0)
    """
    space = check_arguments(task, space, scheduler)
    metric, mode = choose_metric(task, metric, mode)
    seed = checks.seed(seed)
    check(engine, max_lanes, workers)
    checks.whole("keep", keep)
    checks.flag("overwrite", overwrite)
    checks.flag("progress", progress)
    checks.number("checkpoint_seconds", checkpoint_seconds, above=0)
    _check_options(max_seconds, target, on_record, directory)
    packing = None if policy is None else named(policy, space, seed)
    if packing is none:
        engine, max_lanes = "solo" if engine == "auto" else engine, 1
    trials = draw(space, scheduler.num_trials, seed, enqueue)
    brackets = scheduler.start(mode, len(trials))
    spes, totals = horizons(task, scheduler, trials)
    ledger = Ledger(trials, metric, mode, keep)
    same = resume.identity(
        task,
        space,
        scheduler,
        trials[: len(enqueue)],
        metric=metric,
        mode=mode,
        seed=seed,
        engine=engine,
        max_lanes=max_lanes,
    )
    opened = None if directory is None else Store(directory, overwrite)
    with Progress(progress) as shown, opened or contextlib.nullcontext() as store:
        past = {} if store is None else store.asked
        if store is not None and past:
            resume.check_same(store.directory, past, same)
        shown.message(f"{scheduler}\ntracing the task to see what lanes can share ...")
        engine = resume.engine_on_record(past, engine)
        # A policy is for programs as they are; batch sizes are its own affair.
        padding = False if packing is not None else resume.padding_on_record(past)
        asked_for = task, space, scheduler, trials, engine, max_lanes, workers
        made = plan_sweep(*asked_for, padding)
        same["programs"] = resume.programs(made)
        if store is not None and past:
            resume.check_same(store.directory, past, {"programs": same["programs"]})
            made = resume.obey(made, past)
        shown.message(str(made))
        driver = Driver(
            scheduler, brackets, trials, spes, totals, made, ledger, store, on_record
        )
        driver.checkpoint_seconds = checkpoint_seconds
        if store is not None and past:
            driver.resume()
            shown.message(resume.summary(store.directory, ledger))
        outcome = past.get("outcome")
        if driver.done and outcome:
            stats, tested = Stats(workers=0), outcome["test_metrics"]
            return _result(driver, task, seed, space, stats, tested)
        if store is not None:
            asked = _asked(task, space, scheduler, metric, mode, seed, made)
            asked["trials"] = [dict(trial.hparams) for trial in trials]
            asked["created"] = past.get("created", asked["created"])
            store.write(**asked, identity=same, outcome=None)
        return _run(driver, task, seed, space, shown, packing, max_seconds, target)


def _run(
    driver: Driver,
    task: Task,
    seed: int,
    space: Space,
    shown: Progress,
    packing: Policy | None,
    max_seconds: float | None,
    target: float | None,
) -> SweepResult:
    """Trains what there is to train, and writes down what came of it."""
    longest = max(-(-t // s) for t, s in zip(driver.totals, driver.spes, strict=True))
    plan = driver.plan
    with Pool(task.dataset, seed, longest, plan.workers, plan.fused, packing) as pool:
        with Interrupts() as interrupts:
            driver.drive(pool, shown, interrupts, max_seconds, target)
        if driver.interrupted:
            kept = "without a directory, nothing of the sweep is kept"
            if driver.store is not None:
                kept = f"the same call goes on from {str(driver.store.directory)!r}"
            raise Interrupted(driver.interrupted, kept)
        test_metrics = _evaluate_winner(driver, task, pool)
        stats = pool.stats()
        stats.timeline = pool.timeline()
    if driver.store is None:
        return _result(driver, task, seed, space, stats, test_metrics)
    if driver.done:  # Else it has been done.
        driver.save()
        driver.store.wait()
    usage = driver.store.usage
    stats.checkpoints, stats.checkpoint_bytes = usage.count, usage.size_bytes
    stats.checkpoint_seconds = usage.seconds
    result = _result(driver, task, seed, space, stats, test_metrics)
    best = result.incumbents[0] if result.incumbents else None
    driver.store.write(
        outcome={
            "best_trial": best and best.trial_id,
            "best_score": best and best.score,
            "test_metrics": test_metrics,
            "stopped": driver.stopped,
            "stats": dataclasses.asdict(stats),
        }
    )
    if driver.done:
        driver.store.finish()
    _report(result)
    return result


def _evaluate_winner(driver: Driver, task: Task, pool: Pool) -> dict[str, float] | None:
    """Evaluates the best weights on the test split, which nothing else looks at."""
    best = driver.ledger.incumbents[:1]
    if task.dataset.test is None or not best or best[0].state is None:
        return None
    ready = driver.ready(best[0].trial_id, best[0].steps, ())
    return pool.evaluate(ready, best[0].state, "test")


def _result(
    driver: Driver,
    task: Task,
    seed: int,
    space: Space,
    stats: Stats,
    test_metrics: dict[str, float] | None,
) -> SweepResult:
    """Everything as the user sees it."""
    ledger, trials = driver.ledger, []
    for trial_id, status in driver.brackets.statuses.items():
        status = PAUSED if status == RUNNING else status
        ledger.records[trial_id].state = None
        where = driver.place(trial_id)
        trials.append(ledger.result(trial_id, status, **where, seed=seed))
    incumbents = [
        dataclasses.replace(
            trials[best.trial_id],
            score=best.score,
            steps=best.steps,
            **({} if best.state is None else weights(best.state)),
        )
        for best in ledger.incumbents
    ]
    stats.packs = tuple(pack.row() for pack in driver.plan.packs)
    return SweepResult(
        trials=trials,
        incumbents=incumbents,
        history=driver.history,
        stats=stats,
        plan=driver.plan,
        metric=ledger.metric,
        mode=ledger.mode,
        unit=driver.scheduler.unit,
        stopped=driver.stopped,
        test_metrics=test_metrics,
        directory=None if driver.store is None else driver.store.directory,
        dims=space.every_dim,
        max_resource=driver.scheduler.max_resource,
        task=task,
    )


def _report(result: SweepResult) -> None:
    """Writes a sweep's report; the sweep is not lost should that fail."""
    try:
        result.report()
    except Exception as error:
        warnings.warn(
            f"the report was not written: {type(error).__name__}: {error}",
            stacklevel=3,
        )


def _check_options(
    max_seconds: Any, target: Any, on_record: Any, directory: Any
) -> None:
    """Raises ValueError unless each is None or what it should be."""
    if max_seconds is not None:
        checks.number("max_seconds", max_seconds, above=0)
    if target is not None:
        checks.number("target", target)
    if on_record is not None:
        checks.function("on_record", on_record)
    if directory is not None:
        checks.path("directory", directory)


def _asked(
    task: Task,
    space: Space,
    scheduler: Scheduler,
    metric: str,
    mode: str,
    seed: int,
    made: Plan,
) -> dict[str, Any]:
    """What `sweep.json` says about a sweep before it has run."""
    return {
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "dataset": {
            "name": task.dataset.name,
            "content_hash": task.dataset.content_hash,
        },
        "space": space.describe(),
        "dims": records.dim_rows(space.every_dim),
        "scheduler": repr(scheduler),
        "brackets": scheduler.brackets(),
        "unit": scheduler.unit,
        "metric": metric,
        "metrics": task.metric_names,
        "mode": mode,
        "seed": seed,
        "device": made.workers[0].device_kind,
        "workers": len(made.workers),
        "plan": resume.plan_rows(made),
        "hparams": [finding._asdict() for finding in made.findings],
        "versions": resume.versions(),
    }
