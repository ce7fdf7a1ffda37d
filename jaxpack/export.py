"""A trained trial as files that any program can read."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpack import checks
from jaxpack.predict import check_weights
from jaxpack.task import Task
from jaxpack.types import PyTree, TrialResult

WEIGHTS, DESCRIPTION = "weights.npz", "trial.json"


def export(task: Task, trial: TrialResult, path: str | os.PathLike) -> Path:
    """Writes a trial's weights and hparams into a directory.

    `weights.npz` holds an array for each variable, named by its path, such as
    `params/Dense_0/kernel`. `trial.json` holds the hparams, the score and metrics the
    weights were read at, each variable's shape and dtype, and what standardises
    inputs. A dtype that numpy does not have is saved as float32, which loses nothing.

    A linen model then runs without jaxpack:

        flat = np.load("exported/weights.npz")
        variables = flax.traverse_util.unflatten_dict(dict(flat), sep="/")
        hparams = json.load(open("exported/trial.json"))["hparams"]
        outputs = Net(hparams["width"]).apply(variables, x)

    and for `flax.nnx`, `variables["params"]` goes into a model built anew by
    `nnx.replace_by_pure_dict` and `nnx.update`.

    Args:
      task: The task that trained the trial.
      trial: A result that holds its weights, such as the `best` of a sweep.
      path: The directory, made if need be; files of these two names are replaced.

    Returns:
      The directory.

    Raises:
      ValueError: If the trial holds no weights, `path` is a file, or names of
        variables cannot be told apart once joined.
    """
    if not isinstance(task, Task):
        raise ValueError(f"task is {task!r}; make one with jaxpack.Task")
    check_weights(trial)
    path = checks.path("path", path)
    if path.exists() and not path.is_dir():
        raise ValueError(f"path is {str(path)!r}, which is a file; name a directory")
    variables = flat({"params": trial.params, **(trial.model_state or {})})
    path.mkdir(parents=True, exist_ok=True)
    description = _describe(task, trial, variables)
    arrays: Any = _storable(variables)
    _replace(path / WEIGHTS, lambda file: np.savez(file, **arrays))
    text = json.dumps(description, indent=2, allow_nan=False) + "\n"
    _replace(path / DESCRIPTION, lambda file: file.write(text.encode()))
    return path


def flat(tree: PyTree) -> dict[str, np.ndarray]:
    """The arrays of a pytree by their path.

    Raises:
      ValueError: If two arrays have one path, as by a "/" in a name.

    Examples:
      >>> list(flat({"params": {"Dense_0": {"bias": np.zeros(2)}}}))
      ['params/Dense_0/bias']
    """
    named: dict[str, np.ndarray] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name in named or any("/" in _part(key) for key in path):
            raise ValueError(
                f"the variable {jax.tree_util.keystr(path)} has no name of its own as "
                f"{name!r}; take the slashes out of the names of the model's parts"
            )
        named[name] = np.asarray(leaf)
    return named


def _part(key: Any) -> str:
    return jax.tree_util.keystr((key,), simple=True)


def _storable(variables: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays with dtypes that a file can name: bfloat16 becomes float32."""
    return {
        name: array.astype(np.float32) if array.dtype.kind == "V" else array
        for name, array in variables.items()
    }


def _describe(
    task: Task, trial: TrialResult, variables: dict[str, np.ndarray]
) -> dict[str, Any]:
    rows = [row for row in trial.history if row.get("steps") == trial.steps]
    lists = [
        None if tree is None else jax.tree.map(lambda leaf: leaf.tolist(), tree)
        for tree in (task.dataset.mean, task.dataset.std)
    ]
    return {
        "trial_id": trial.trial_id,
        "hparams": dict(trial.hparams),
        "status": trial.status,
        "score": _finite(trial.score),
        "steps": trial.steps,
        "metrics": {name: _finite(value) for name, value in (rows or [{}])[-1].items()},
        "dataset": task.dataset.name,
        "mean": lists[0],
        "std": lists[1],
        "variables": {
            name: {"shape": array.shape, "dtype": str(array.dtype)}
            for name, array in variables.items()
        },
    }


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _replace(path: Path, write: Any) -> None:
    """Writes a file that is there as a whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        write(file)
    os.replace(temporary, path)
