"""Outputs of a trained trial, on any inputs."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jaxpack import executables, jaxprs, step, trees
from jaxpack.data import Dataset
from jaxpack.task import Task
from jaxpack.train import steps_per_epoch
from jaxpack.types import HParams, PyTree, TrialResult


@executables.disk_cache()
def predict(task: Task, trial: TrialResult, x: PyTree) -> PyTree:
    """Outputs of a trial's model, as its evaluation computes them.

    Args:
      task: The task that trained the trial.
      trial: A result that holds its weights, such as the `best` of a sweep.
      x: Inputs as they were given to the dataset, leaves `[n, ...]`: they are
        standardised here if the dataset is. Or the name of one of the dataset's own
        splits, `"train"`, `"validation"` or `"test"`. A split's arrays and slices of
        them are standardised already and are taken as they are.

    Returns:
      What the model returns, leaves `[n, ...]` as numpy arrays.

    Raises:
      ValueError: If the trial holds no weights, there is no such split, or an input
        does not look like those of the train split.

    Examples:
      >>> import jaxpack as jp, optax
      >>> task = jp.Task(
      ...     model=lambda hp: jp.models.MLP(width=16, depth=1),
      ...     optimizer=lambda hp: optax.sgd(hp.learning_rate),
      ...     dataset=jp.data.load("digits"),
      ... )
      >>> (trial,) = jp.train(task, [{"learning_rate": 0.1}], epochs=1)
      >>> jp.predict(task, trial, "test").shape == (len(task.dataset.test[0]), 10)
      True
    """
    if not isinstance(task, Task):
        raise ValueError(f"task is {task!r}; make one with jaxpack.Task")
    check_weights(trial)
    x = _inputs(task.dataset, x)
    count = len(jax.tree.leaves(x)[0])
    # Few sizes, so that few programs are compiled.
    size = min(task.eval_batch_size, 1 << (count - 1).bit_length())
    variables = {"params": trial.params, **(trial.model_state or {})}
    apply = _compiled(task, trial, variables, x, size)
    outputs = []
    for first in range(0, count, size):
        positions = first + np.arange(size)
        rows = np.minimum(positions, count - 1)
        batch = jax.tree.map(lambda leaf, rows=rows: leaf[rows], x)
        result = apply(variables, batch, positions < count)
        real = min(size, count - first)
        outputs.append(jax.tree.map(lambda leaf, n=real: np.asarray(leaf)[:n], result))
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *outputs)


def check_weights(trial: Any) -> None:
    """Raises ValueError unless `trial` is a result that holds its weights."""
    if not isinstance(trial, TrialResult):
        raise ValueError(
            f"trial is a {type(trial).__name__}; give a TrialResult, such as "
            "result.best or one that jaxpack.train returned"
        )
    if trial.params is None:
        why = f": it has FAILED ({trial.reason})" if trial.reason else ""
        raise ValueError(
            f"trial {trial.trial_id} holds no weights{why}; a sweep keeps those of its "
            "best trials, as many as keep= says"
        )


def _inputs(dataset: Dataset, x: PyTree) -> PyTree:
    if isinstance(x, str):
        split = getattr(dataset, x) if x in ("train", "validation", "test") else None
        if split is None:
            given = ["train", "validation", *(["test"] if dataset.test else [])]
            raise ValueError(
                f"x is {x!r}; the dataset has the splits {', '.join(given)}"
            )
        return split[0]
    splits = (dataset.train, dataset.validation, dataset.test)
    own = jax.tree.leaves([split[0] for split in splits if split is not None])
    leaves = jax.tree.leaves(x)
    if leaves and all(_is_view(leaf, own) for leaf in leaves):
        return x
    return dataset.preprocess(x)


def _is_view(leaf: Any, arrays: list[np.ndarray]) -> bool:
    if not isinstance(leaf, np.ndarray):
        return False
    return any(np.may_share_memory(leaf, array) for array in arrays)


def _compiled(
    task: Task, trial: TrialResult, variables: PyTree, x: PyTree, size: int
) -> Any:
    """The model's evaluation as a program for batches of one size."""
    hp = HParams(
        trial.hparams,
        total_steps=trial.steps,
        steps_per_epoch=steps_per_epoch(task, trial.hparams),
        inactive=trial.hparams.inactive_,
    )

    def apply(variables: PyTree, x: PyTree, mask: jax.Array) -> PyTree:
        return step.outputs(task.functions, hp, variables, x, mask)

    arguments = (
        trees.avals(variables),
        jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((size, *leaf.shape[1:]), leaf.dtype), x
        ),
        jax.ShapeDtypeStruct((size,), bool),
    )
    jaxpr, shapes = jax.make_jaxpr(apply, return_shape=True)(*arguments)
    structure = str(jax.tree.structure(shapes))
    return executables.get(
        "predict",
        apply,
        arguments,
        identity=jaxprs.fingerprint([jaxprs.flatten(jaxpr)], structure),
        device=jax.local_devices()[0],
        log=executables.CompileLog(),
    )
