"""Metrics give one value per example."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpack import metrics

SCORES = jnp.array([[0.1, 0.7, 0.2], [0.5, 0.4, 0.1], [0.2, 0.3, 0.5]])


@pytest.mark.parametrize(
    "labels,expected", [([1, 0, 2], [1, 1, 1]), ([0, 0, 1], [0, 1, 0])]
)
def test_accuracy(labels, expected):
    got = metrics.accuracy(SCORES, jnp.array(labels))
    np.testing.assert_array_equal(got, expected)
    assert got.dtype == jnp.float32


def test_accuracy_of_sequences_is_averaged_per_example():
    outputs, labels = SCORES[None].repeat(2, 0), jnp.array([[1, 0, 2], [1, 1, 1]])
    np.testing.assert_allclose(metrics.accuracy(outputs, labels), [1, 1 / 3], rtol=1e-6)


@pytest.mark.parametrize("k,expected", [(1, [0, 0, 0]), (2, [1, 0, 1]), (3, [1, 1, 1])])
def test_top_k_accuracy(k, expected):
    got = metrics.top_k_accuracy(k)(SCORES, jnp.array([2, 2, 1]))
    np.testing.assert_array_equal(got, expected)


def test_errors_are_averaged_per_example():
    outputs = jnp.array([[[1.0, -2.0]], [[0.0, 4.0]]])
    targets = jnp.zeros((2, 1, 2))
    np.testing.assert_allclose(metrics.squared_error(outputs, targets), [2.5, 8])
    np.testing.assert_allclose(metrics.absolute_error(outputs, targets), [1.5, 2])
    one = metrics.squared_error(jnp.array([1.0, 3.0]), jnp.zeros(2))
    np.testing.assert_allclose(one, [1, 9])


@pytest.mark.parametrize("metric", [metrics.squared_error, metrics.absolute_error])
def test_error_of_unlike_shapes_raises(metric):
    with pytest.raises(ValueError, match=r"\(3, 1\) and targets \(3,\)"):
        metric(jnp.zeros((3, 1)), jnp.zeros(3))


@pytest.mark.parametrize(
    "metric,labels", [(metrics.accuracy, (3, 1)), (metrics.top_k_accuracy(4), (3,))]
)
def test_accuracy_of_unlike_shapes_raises(metric, labels):
    with pytest.raises(ValueError, match=r"outputs have shape \(3, 3\)"):
        metric(SCORES, jnp.zeros(labels, int))


def test_k_is_checked():
    for k in (2.5, True, "1"):
        with pytest.raises(ValueError, match=f"k is {k!r}; it must be a whole number"):
            metrics.top_k_accuracy(k)
    with pytest.raises(ValueError, match="k is 0"):
        metrics.top_k_accuracy(0)


@pytest.mark.parametrize(
    "name,mode",
    [
        *((name, "min") for name in ("loss", "error", "mse", "mae", "perplexity")),
        *((name, "min") for name in ("nll_loss", "top_1_error", "squared_error")),
        *((name, "max") for name in ("accuracy", "f1", "auc", "top_5_accuracy")),
        ("roc_AUC", "max"),
        ("reward", None),
        ("glossy", None),
        ("", None),
    ],
)
def test_infer_mode(name, mode):
    assert metrics.infer_mode(name) == mode
