"""The driver: hands ready trials to the workers and scores to the scheduler."""

from __future__ import annotations

import dataclasses
import math
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxpack import executables, records, report
from jaxpack.dimensions import Dimension
from jaxpack.explain import check_arguments, draw, horizons, plan_sweep
from jaxpack.ledger import Ledger, check_seed, choose_metric, weights
from jaxpack.pack import Reading, Ready
from jaxpack.planner import Plan
from jaxpack.progress import Progress, RungCount, Snapshot
from jaxpack.report import Summary
from jaxpack.schedulers import Assignment, Brackets, Scheduler
from jaxpack.space import Space
from jaxpack.store import Store, check_directory
from jaxpack.task import Task
from jaxpack.train import in_steps, make_ready
from jaxpack.types import PAUSED, RUNNING, HParams, Trial, TrialResult
from jaxpack.worker import Pool, Stats

if TYPE_CHECKING:
    import pandas as pd

TICK_SECONDS = 0.5
"""How often progress is shown while no reading comes."""


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
            "best_config": "best_hparams",
            "best_value": "best_score",
            "best_trial": "best",
            "best_result": "best",
            "dataframe": "to_pandas()",
            "trials_dataframe": "to_pandas()",
        }
        hint = f"; it is {ours[name]} here" if name in ours else ""
        raise AttributeError(f"SweepResult has no attribute {name!r}{hint}")


@executables.disk_cache()
def sweep(
    task: Task,
    space: Space,
    scheduler: Scheduler,
    *,
    metric: str | None = None,
    mode: str | None = None,
    seed: int = 0,
    directory: str | os.PathLike | None = None,
    engine: str = "auto",
    max_lanes: int | None = None,
    workers: int | None = None,
    max_seconds: float | None = None,
    target: float | None = None,
    enqueue: Sequence[Mapping[str, Any] | TrialResult] = (),
    keep: int = 1,
    overwrite: bool = False,
    on_record: Callable[[dict[str, Any]], None] | None = None,
    progress: bool = True,
) -> SweepResult:
    """Searches a space with a scheduler, training many trials at once.

    All brackets run at the same time: a lane or worker that is free takes the next
    ready trial of any bracket, and a promoted trial goes on where it stopped.

    Args:
      task: What is trained.
      space: The hparams to try.
      scheduler: `Hyperband`, `SuccessiveHalving` or `RandomSearch`.
      metric: What trials are ranked by; the task's first metric if None.
      mode: "min" or "max"; told from the metric's name if None.
      seed: Fixes the trials, their weights, dropout masks and the order of the data.
      directory: Where `sweep.json` and `journal.jsonl` are written, if anywhere.
      engine: "packed", "solo", "fused", or "auto" for what suits the device.
      max_lanes: Widest pack allowed; for "fused", the most trials of one program,
        4 if None.
      workers: Worker threads; a core each on a CPU, one a device elsewhere.
      max_seconds: Ends the sweep after so long.
      target: Ends the sweep once a trial's score is as good.
      enqueue: Hparams to try first, in place of sampled ones.
      keep: How many of the best trials keep their weights.
      overwrite: Moves a sweep that is in `directory` aside.
      on_record: Called with each journal line, after it is on disk.
      progress: Whether the plan and the progress are shown.

    Returns:
      Every trial, and the best with its weights.

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
      >>> space = jp.Space(learning_rate=jp.log_uniform(1e-3, 1e-1))
      >>> result = jp.sweep(task, space, jp.Hyperband(3), progress=False)
      >>> len(result.trials), result.stats.lane_epochs
      (5, 11.0)
    """
    check_arguments(task, space, scheduler)
    metric, mode = choose_metric(task, metric, mode)
    seed = check_seed(seed)
    _check_limits(keep, max_seconds, target)
    if directory is not None:
        check_directory(directory, overwrite)  # Before anything that takes long.
    trials = draw(space, scheduler.num_trials, seed, enqueue)
    brackets = scheduler.start(mode, len(trials))
    spes, totals = horizons(task, scheduler, trials)
    longest = max(-(-t // spe) for t, spe in zip(totals, spes, strict=True))
    with Progress(progress) as shown:
        shown.message(f"{scheduler}\ntracing the task to see what lanes can share ...")
        made = plan_sweep(task, space, scheduler, trials, engine, max_lanes, workers)
        shown.message(str(made))
        asked = _asked(task, space, scheduler, metric, mode, seed, made)
        asked["trials"] = [dict(trial.hparams) for trial in trials]
        store = None if directory is None else Store(directory, asked, overwrite)
        run = _Run(task, scheduler, brackets, trials, spes, totals, made)
        run.ledger = Ledger(trials, metric, mode, keep)
        run.store, run.on_record = store, on_record
        try:
            with Pool(task.dataset, seed, longest, made.workers, made.fused) as pool:
                run.drive(pool, shown, max_seconds, target)
                run.evaluate_winner(pool)
                result = run.result(pool, seed, space)
        finally:
            if store is not None:
                store.close()
    if result.directory is not None:
        _report(result)
    return result


class _Run:
    """One sweep while it runs."""

    ledger: Ledger
    store: Store | None = None
    on_record: Callable[[dict[str, Any]], None] | None = None

    def __init__(
        self,
        task: Task,
        scheduler: Scheduler,
        brackets: Brackets,
        trials: Sequence[Trial],
        spes: Sequence[int],
        totals: Sequence[int],
        made: Plan,
    ):
        self.task, self.scheduler, self.brackets = task, scheduler, brackets
        self.trials, self.spes, self.totals, self.plan = trials, spes, totals, made
        self.history: list[dict[str, Any]] = []
        self.stopped: str | None = None
        self.test_metrics: dict[str, float] | None = None
        self._ready: dict[int, Ready] = {}

    def drive(
        self,
        pool: Pool,
        shown: Progress,
        max_seconds: float | None,
        target: float | None,
    ) -> None:
        """Runs the sweep until the scheduler is done or a limit is reached."""
        start = time.monotonic()
        self._submit(pool, self.brackets.ready())
        while not self.brackets.done:
            shown.update(self._snapshot(pool))
            reading = pool.get(TICK_SECONDS)
            if reading is not None:
                self._submit(pool, self._read(reading))
            if target is not None and self._reached(target):
                self.stopped = "target"
            elif max_seconds is not None and time.monotonic() - start > max_seconds:
                self.stopped = "max_seconds"
            if self.stopped and not self.brackets.done:
                pool.close()
                break
        shown.update(self._snapshot(pool))

    def evaluate_winner(self, pool: Pool) -> None:
        """Evaluates the best weights on the test split, which nothing else looks at."""
        if self.task.dataset.test is None or not self.ledger.incumbents:
            return
        best = self.ledger.incumbents[0]
        self.test_metrics = pool.evaluate(
            self._ready[best.trial_id], best.state, "test"
        )

    def result(self, pool: Pool, seed: int, space: Space) -> SweepResult:
        """Everything as the user sees it; also written to `sweep.json`."""
        statuses = self.brackets.statuses
        trials = []
        for trial in self.trials:
            i = trial.trial_id
            status = PAUSED if statuses[i] == RUNNING else statuses[i]
            self.ledger.records[i].state = None
            trials.append(self.ledger.result(i, status, **self._place(i), seed=seed))
        incumbents = [
            dataclasses.replace(
                trials[best.trial_id],
                score=best.score,
                steps=best.steps,
                **weights(best.state),
            )
            for best in self.ledger.incumbents
        ]
        stats = pool.stats()
        stats.packs = tuple(pack.row() for pack in self.plan.packs)
        stats.timeline = pool.timeline()
        directory = None if self.store is None else self.store.directory
        if self.store is not None:
            best = self.ledger.incumbents[0] if incumbents else None
            self.store.finish(
                {
                    "best_trial": best and best.trial_id,
                    "best_score": best and best.score,
                    "test_metrics": self.test_metrics,
                    "stopped": self.stopped,
                    "stats": dataclasses.asdict(stats),
                }
            )
        return SweepResult(
            trials=trials,
            incumbents=incumbents,
            history=self.history,
            stats=stats,
            plan=self.plan,
            metric=self.ledger.metric,
            mode=self.ledger.mode,
            unit=self.scheduler.unit,
            stopped=self.stopped,
            test_metrics=self.test_metrics,
            directory=directory,
            dims=space.every_dim,
        )

    def _submit(self, pool: Pool, assignments: Sequence[Assignment]) -> None:
        """Hands trials to the workers; those that cannot be built fail here."""
        waiting = list(assignments)
        ready = []
        while waiting:
            given = waiting.pop()
            i = given.trial_id
            if i in self.plan.failed:
                self.ledger.fail(i, self.plan.failed[i])
                self._record({"trial_id": i, **self._place(i)}, math.nan)
                waiting += self._report(i, math.nan)
                continue
            unit = self.scheduler.unit
            given_to_worker = make_ready(
                self.trials[i],
                self.plan,
                order=(-given.remaining, i),
                stops=(in_steps(given.resource, unit, self.spes[i]),),
                total_steps=self.totals[i],
                state=self.ledger.records[i].state,
            )
            ready.append(given_to_worker)
            self._ready[i] = given_to_worker._replace(state=None)
        pool.submit(ready)

    def _read(self, reading: Reading) -> list[Assignment]:
        """Books a reading and lets the scheduler decide."""
        i = reading.trial_id
        where = self._place(i)
        score = self.ledger.read(reading, self.spes[i], where)
        row = {"trial_id": i, **self.ledger.records[i].rows[-1]}
        self.history.append(row)
        self._record(row, score)
        return self._report(i, score)

    def _report(self, trial_id: int, score: float) -> list[Assignment]:
        promoted = self.brackets.report(trial_id, score)
        for trial, status in self.brackets.statuses.items():
            if status not in (PAUSED, RUNNING):
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

    def _place(self, trial_id: int) -> dict[str, int]:
        return {
            "bracket": self.brackets.bracket_of(trial_id),
            "rung": self.brackets.rung_of(trial_id),
        }

    def _reached(self, target: float) -> bool:
        best = self.ledger.incumbents[:1]
        if self.ledger.mode == "min":
            return any(incumbent.score <= target for incumbent in best)
        return any(incumbent.score >= target for incumbent in best)

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
            rungs=tuple(
                RungCount(r.bracket, r.rung, r.resource, r.num_trials, r.num_done)
                for r in rungs
            ),
            unit=self.scheduler.unit,
            metric=self.ledger.metric,
            best=None if best is None else best.score,
            best_trial=None if best is None else best.trial_id,
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


def _check_limits(keep: int, max_seconds: float | None, target: float | None) -> None:
    for name, value in (("max_seconds", max_seconds), ("target", target)):
        if value is not None and not isinstance(value, int | float | np.number):
            raise ValueError(f"{name} is {value!r}; it must be a number or None")
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
        raise ValueError(f"keep is {keep!r}; it must be a whole number >= 1")
    if max_seconds is not None and not max_seconds > 0:
        raise ValueError(f"max_seconds is {max_seconds!r}; it must be above 0")


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
    names = ("jaxpack", "jax", "flax", "optax", "numpy")
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
        "plan": [pack.row() for pack in made.packs],
        "hparams": [finding._asdict() for finding in made.findings],
        "versions": {name: _version(name) for name in names},
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:  # Imported from a checkout.
        return None
