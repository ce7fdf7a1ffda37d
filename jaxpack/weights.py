"""Reads the weights in a sweep's directory, without the code of its task."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

BEST = "best"
_log = logging.getLogger("jaxpack")


def read_best(directory: Path) -> dict[int, dict[str, Any]]:
    """The weights of the best trials, as far as there are any that can be read.

    Args:
      directory: The directory of a sweep. Its `best/` holds numbered Orbax
        checkpoints, of which the newest counts.

    Returns:
      By trial: `params`, `model_state` and `key`, and `step`, the step they are from.
      The optimizer's state is left out: its containers are known to its task only.
    """
    best = directory / BEST
    numbered = [path for path in best.glob("*") if path.name.isdigit()]
    for path in sorted(numbered, key=lambda path: int(path.name), reverse=True):
        try:
            parts = _restore(path).values()
            return {int(part["trial_id"]): _state(part["state"]) for part in parts}
        except Exception as error:  # Orbax passes on what its parts raise.
            reason = str(error).strip().split("\n")[0]
            _log.warning("the weights in %r cannot be read: %s", str(path), reason)
    return {}


def _restore(path: Path) -> Mapping[str, Any]:
    import jax
    import orbax.checkpoint as ocp  # Takes long, and few sweeps are read.

    checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    saved = checkpointer.metadata(path.resolve()).item_metadata
    # As numpy arrays: they may have been on devices that are not here.
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), saved)
    return checkpointer.restore(
        path.resolve(), args=ocp.args.PyTreeRestore(restore_args=as_numpy)
    )


def _state(saved: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "params": saved.get("params", {}),
        "model_state": saved.get("model_state", {}),
        "key": saved.get("key"),
        "step": int(saved["step"]),
    }
