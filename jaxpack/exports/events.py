"""A sweep as TensorBoard event files."""

from __future__ import annotations

import math
import os
from pathlib import Path

from jaxpack import checks, report
from jaxpack.exports.source import Source, require, result_of, times_of


def to_tensorboard(source: Source, logdir: str | os.PathLike) -> Path:
    """Writes a run a trial: its metrics by training step, and its hparams.

    Written again, the runs are replaced.

    Args:
      source: A sweep's result, or its directory.
      logdir: The folder for `tensorboard --logdir`, made if need be.

    Returns:
      The folder.

    Raises:
      ImportError: If tensorboardX is not installed.
    """
    tensorboard = require("tensorboardX", "tensorboard")
    summary = require("tensorboardX.summary", "tensorboard")
    result, logdir = result_of(source), checks.path("logdir", logdir)
    times = times_of(result)
    for trial in result.trials:
        run = logdir / f"trial_{trial.trial_id:04d}"
        for old in run.glob("events.out.tfevents.*"):
            old.unlink()
        best = report.best_row(trial, result.metric, result.mode)
        scores = {} if best is None else {f"best/{result.metric}": best[result.metric]}
        with tensorboard.SummaryWriter(str(run)) as writer:
            # TensorBoard's own page of hparams; its writer would begin another run.
            for part in summary.hparams(dict(trial.hparams), scores):
                writer.file_writer.add_summary(part)
            for name, value in scores.items():
                writer.add_scalar(name, value)
            for row in trial.history:
                when = times.get((trial.trial_id, int(row["steps"])))
                for name, value in row.items():
                    if name in ("bracket", "rung", "steps") or not math.isfinite(value):
                        continue
                    writer.add_scalar(name, value, row["steps"], walltime=when)
    return logdir
