"""Metrics: functions of outputs and labels to one value per example, `[B]`."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxpack import checks

_LOW = ("loss", "error", "error_rate", "mse", "rmse", "mae", "nll")
_LOW += ("perplexity", "cross_entropy")
_HIGH = ("accuracy", "acc", "f1", "auc", "precision", "recall", "iou", "r2", "bleu")


def accuracy(outputs: jax.Array, labels: jax.Array) -> jax.Array:
    """Says whether the class of the highest output is the label.

    Args:
      outputs: `[B, ..., C]` scores of the classes.
      labels: `[B, ...]` integer classes.

    Returns:
      `[B]` float32, 1 where right and 0 where wrong, averaged over further axes.

    Raises:
      ValueError: If the shapes do not fit.

    Examples:
      >>> print(accuracy(jnp.array([[0.1, 0.9], [0.8, 0.2]]), jnp.array([1, 1])))
      [1. 0.]
    """
    return top_k_accuracy(1)(outputs, labels)


def top_k_accuracy(k: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Returns a metric: whether the label is among the `k` highest outputs.

    It takes `[B, ..., C]` outputs and `[B, ...]` integer labels and gives `[B]`
    float32. Of equal outputs those of the lower classes come first.

    Raises:
      ValueError: If `k` is no whole number from 1; in the metric, if the shapes do
        not fit or there are fewer than `k` classes.

    Examples:
      >>> print(top_k_accuracy(2)(jnp.array([[0.2, 0.5, 0.3]]), jnp.array([2])))
      [1.]
    """
    checks.whole("k", k)

    def metric(outputs: jax.Array, labels: jax.Array) -> jax.Array:
        if outputs.shape[:-1] != labels.shape or outputs.shape[-1] < k:
            raise ValueError(
                f"outputs have shape {outputs.shape} and labels {labels.shape}; "
                f"expected [B, ..., C] and [B, ...] with at least {k} classes"
            )
        if k == 1:
            hits = jnp.argmax(outputs, axis=-1) == labels
        else:
            classes = lax.top_k(outputs, k)[1]
            hits = (classes == labels[..., None]).any(axis=-1)
        return _per_example(hits.astype(jnp.float32))

    return metric


def squared_error(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    """Returns the mean squared difference of each example.

    Args:
      outputs: `[B, ...]` predictions.
      targets: `[B, ...]` of the same shape.

    Returns:
      `[B]`, in the dtype of `outputs`.

    Raises:
      ValueError: If the shapes differ.

    Examples:
      >>> print(squared_error(jnp.array([[1.0, 3.0]]), jnp.array([[0.0, 0.0]])))
      [5.]
    """
    return _per_example(jnp.square(_difference(outputs, targets)))


def absolute_error(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    """Returns the mean absolute difference of each example.

    Args:
      outputs: `[B, ...]` predictions.
      targets: `[B, ...]` of the same shape.

    Returns:
      `[B]`, in the dtype of `outputs`.

    Raises:
      ValueError: If the shapes differ.

    Examples:
      >>> print(absolute_error(jnp.array([[1.0, -3.0]]), jnp.array([[0.0, 0.0]])))
      [2.]
    """
    return _per_example(jnp.abs(_difference(outputs, targets)))


def infer_mode(name: str) -> str | None:
    """Tells from a metric's name whether low (`min`) or high (`max`) values are good.

    Returns:
      `"min"`, `"max"`, or None where the name does not tell.

    Examples:
      >>> infer_mode("validation_loss"), infer_mode("top_5_accuracy")
      ('min', 'max')
      >>> infer_mode("speed") is None
      True
    """
    name = name.lower()
    for mode, words in (("min", _LOW), ("max", _HIGH)):
        if any(name == word or name.endswith(f"_{word}") for word in words):
            return mode
    return None


def _difference(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    # Broadcasting [B, 1] against [B] would compare every example with every other.
    if outputs.shape != targets.shape:
        raise ValueError(
            f"outputs have shape {outputs.shape} and targets {targets.shape}; they "
            "must be equal"
        )
    return outputs - targets


def _per_example(values: jax.Array) -> jax.Array:
    return values.mean(axis=tuple(range(1, values.ndim)))
