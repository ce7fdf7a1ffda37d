"""Max-pooling equals XLA's, ties and padding included."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxpack.pool import max_pool

NONE = ((0, 0),) * 4


def stock(x, window, strides, padding):
    return lax.reduce_window(x, -jnp.inf, lax.max, window, strides, padding)


def value_and_gradient(pool, *args):
    def compute(x):
        y, pullback = jax.vjp(lambda x: pool(x, *args), x)
        return y, *pullback(jnp.sin(y) + 2)

    return compute


def with_ties(*shape, dtype=jnp.float32):
    values = np.random.default_rng(0).integers(-2, 3, size=shape)
    return jnp.asarray(values, dtype)


CASES = {
    "side by side": ((1, 2, 2, 1), (1, 2, 2, 1), NONE),
    "left over": ((1, 3, 2, 1), (1, 3, 2, 1), NONE),
    "overlapping": ((1, 3, 3, 1), (1, 2, 2, 1), NONE),
    "apart": ((1, 2, 1, 1), (1, 3, 2, 1), NONE),
    "padded": ((1, 3, 3, 1), (1, 2, 2, 1), ((0, 0), (1, 1), (0, 1), (0, 0))),
    "channels": ((1, 2, 2, 2), (1, 2, 2, 1), NONE),
    "large": ((1, 6, 5, 1), (1, 1, 1, 1), NONE),
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("case", list(CASES.values()), ids=list(CASES))
def test_equals_stock(case, dtype):
    x = with_ties(2, 8, 7, 3, dtype=dtype)
    ours, theirs = (
        jax.jit(value_and_gradient(pool, *case))(x) for pool in (max_pool, stock)
    )
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        wide = (np.asarray(array, np.float32) for array in (a, b))
        np.testing.assert_allclose(*wide, rtol=1e-2 if dtype == jnp.bfloat16 else 1e-6)


def test_lanes_in_a_loop_equal_stock():
    x = with_ties(3, 2, 4, 4, 2)

    def run(pool):
        step = value_and_gradient(pool, *CASES["side by side"])

        def body(_, x):
            return x - 0.5 * step(x)[1]

        return jax.jit(jax.vmap(functools.partial(lax.fori_loop, 0, 2, body)))(x)

    np.testing.assert_allclose(run(max_pool), run(stock), rtol=1e-6)


def test_no_select_and_scatter():
    x = with_ties(2, 4, 4, 2)
    ours, theirs = (
        jax.jit(value_and_gradient(pool, *CASES["side by side"])).lower(x).as_text()
        for pool in (max_pool, stock)
    )
    assert "select_and_scatter" in theirs
    assert "select_and_scatter" not in ours


@pytest.mark.parametrize("shape", [(0, 4, 4, 2), (2, 1, 4, 2)])
def test_empty(shape):
    x, case = with_ties(*shape), CASES["side by side"]
    for a, b in zip(
        value_and_gradient(max_pool, *case)(x),
        value_and_gradient(stock, *case)(x),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


def test_gradient_of_gradient():
    x = with_ties(2, 4, 4, 2)

    def size(pool):
        gradient = jax.grad(
            lambda x: jnp.sum(jnp.sin(pool(x, *CASES["side by side"]) * 3))
        )
        return jax.grad(lambda x: jnp.sum(gradient(x) ** 2))(x)

    # The stock gradient has no reverse-mode derivative to compare with.
    expected = jnp.where(
        jax.grad(lambda x: jnp.sum(stock(x, *CASES["side by side"])))(x) > 0,
        2 * 3 * jnp.cos(3 * x) * -9 * jnp.sin(3 * x),
        0,
    )
    np.testing.assert_allclose(size(max_pool), expected, atol=1e-4)
