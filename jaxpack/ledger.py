"""What is known of each trial so far: its readings, and the best weights."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxpack import checks
from jaxpack.metrics import infer_mode
from jaxpack.pack import Reading
from jaxpack.schedulers.brackets import MODES
from jaxpack.task import Task
from jaxpack.types import FAILED, HParams, LaneState, Trial, TrialResult


@dataclasses.dataclass
class Record:
    """One trial's past.

    Attributes:
      trial: The trial.
      rows: A row an evaluation.
      steps: Steps taken.
      seconds: Its share of its packs' training time.
      state: The newest state known of it; None once it is not wanted any more.
      first_bad_step: The first step whose loss was not finite.
      reason: Why it failed.
    """

    trial: Trial
    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    steps: int = 0
    seconds: float = 0.0
    state: LaneState | None = None
    first_bad_step: int | None = None
    reason: str | None = None


@dataclasses.dataclass(frozen=True)
class Incumbent:
    """A trial's best reading, with its weights as they were then.

    The state is None where the reading is one of an earlier call and its weights are
    not at hand.
    """

    score: float
    steps: int
    trial_id: int
    state: LaneState | None


class Ledger:
    """Keeps the books of one call.

    Args:
      trials: The trials.
      metric: The metric that trials are ranked by.
      mode: "min" or "max".
      keep: How many trials' best weights are kept.
    """

    def __init__(self, trials: Sequence[Trial], metric: str, mode: str, keep: int = 0):
        self.metric, self.mode, self.keep = metric, mode, keep
        self.records = {trial.trial_id: Record(trial) for trial in trials}
        self._kept: dict[int, Incumbent] = {}

    @property
    def incumbents(self) -> list[Incumbent]:
        """The kept trials at their best readings, the best first."""
        return sorted(self._kept.values(), key=self._rank)

    def read(
        self, reading: Reading, steps_per_epoch: int, where: Mapping[str, Any]
    ) -> float:
        """Books a reading.

        Args:
          reading: The reading.
          steps_per_epoch: Of the trial's program.
          where: What else its row says, such as the bracket and the rung.

        Returns:
          The trial's score, NaN if it failed.
        """
        record = self.records[reading.trial_id]
        record.steps, record.state = reading.steps, reading.state
        record.seconds += reading.seconds
        epochs = reading.steps / steps_per_epoch
        row = {
            **where,
            "epochs": int(epochs) if epochs.is_integer() else epochs,
            "steps": reading.steps,
            "train_loss": reading.train_loss,
            **reading.metrics,
        }
        record.rows.append(row)
        if reading.reason is not None:
            record.reason = reading.reason
        elif reading.first_bad_step is not None:
            record.first_bad_step = reading.first_bad_step
            record.reason = (
                f"training loss was not finite at step {reading.first_bad_step}"
            )
        elif not math.isfinite(reading.metrics["loss"]):
            record.reason = (
                f"validation loss was {reading.metrics['loss']} after "
                f"{reading.steps} steps"
            )
        if record.reason is not None:
            record.state = None
            return math.nan
        score = reading.metrics[self.metric]
        if math.isfinite(score) and reading.state is not None:
            self._consider(
                Incumbent(score, reading.steps, reading.trial_id, reading.state)
            )
        return score

    def replay(
        self,
        trial_id: int,
        row: Mapping[str, Any],
        *,
        score: float,
        seconds: float,
        first_bad_step: int | None,
        reason: str | None,
    ) -> None:
        """Books a reading of an earlier call, as its journal has it."""
        record = self.records[trial_id]
        record.seconds, record.reason = seconds, reason
        record.first_bad_step = first_bad_step
        if "steps" in row:  # Else the trial could not even be built.
            record.steps = row["steps"]
            record.rows.append(dict(row))
        if math.isfinite(score):
            self._consider(Incumbent(score, record.steps, trial_id, None))

    def supply(self, state: LaneState, trial_id: int) -> bool:
        """Gives an incumbent the weights it lacks, if these are they."""
        old = self._kept.get(trial_id)
        if old is None or old.state is not None or old.steps != int(state.step):
            return False
        self._kept[trial_id] = dataclasses.replace(old, state=state)
        return True

    def fail(self, trial_id: int, reason: str) -> None:
        """Books a trial that could not be trained at all."""
        self.records[trial_id].reason = reason

    def result(self, trial_id: int, status: str, **more: Any) -> TrialResult:
        """A trial as the user sees it."""
        record = self.records[trial_id]
        scores = [row[self.metric] for row in record.rows if self.metric in row]
        state = record.state
        kept = {} if state is None else weights(state)
        return TrialResult(
            trial_id=trial_id,
            hparams=record.trial.hparams,
            status=FAILED if record.reason is not None else status,
            score=scores[-1] if scores else None,
            history=tuple(record.rows),
            steps=record.steps,
            first_bad_step=record.first_bad_step,
            reason=record.reason,
            seconds=record.seconds,
            **kept,
            **more,
        )

    def _rank(self, incumbent: Incumbent) -> tuple[float, int, int]:
        sign = 1 if self.mode == "min" else -1
        return sign * incumbent.score, -incumbent.steps, incumbent.trial_id

    def _consider(self, new: Incumbent) -> None:
        """Keeps a reading if its trial is then among the best."""
        old = self._kept.get(new.trial_id)
        if old is None or self._rank(new) < self._rank(old):
            self._kept[new.trial_id] = new
        for incumbent in self.incumbents[self.keep :]:
            del self._kept[incumbent.trial_id]


def weights(state: LaneState) -> dict[str, Any]:
    """The fields of a `TrialResult` that hold its state."""
    return {
        "params": state.params,
        "model_state": state.model_state,
        "opt_state": state.opt_state,
        "key": state.key,
    }


def choose_metric(
    task: Task, metric: str | None, mode: str | None, *, ranked: bool = True
) -> tuple[str, str]:
    """The metric to rank by, and whether low or high values are good.

    Args:
      task: The task.
      metric: The metric asked for, or None for the task's first.
      mode: The mode asked for, or None to tell it from the metric's name.
      ranked: Whether trials are ranked at all, so that the mode matters.

    Raises:
      ValueError: If the task has no such metric, or the mode cannot be told.
    """
    metric = task.default_metric if metric is None else metric
    checks.word("metric", metric, task.metric_names)
    mode = infer_mode(metric) if mode is None else mode
    if mode is None and not ranked:
        mode = "max"
    if mode is None:
        raise ValueError(
            f"whether low or high values of {metric!r} are good cannot be told from "
            'its name: give mode="min" or mode="max"'
        )
    return metric, checks.word("mode", mode, MODES)


def trial_seed(hparams: HParams, trial_id: int) -> int:
    """What a trial's random key comes from besides the sweep's seed."""
    return checks.seed(hparams["seed"]) if "seed" in hparams else trial_id
