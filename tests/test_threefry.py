"""Our threefry draws the bits that JAX draws, wherever stock code asks for them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jaxpack import threefry
from jaxpack.rewrite import replace_operations

KEY = jax.random.key(7, impl=threefry.IMPL)
X = jnp.ones((8, 16))


def data(key):
    return np.asarray(jax.random.key_data(key))


@pytest.mark.parametrize("number", [0, 1, 77, 2**31 - 1, 2**32 - 1])
def test_fold_in_gives_jaxs_key(number):
    number = np.uint32(number)
    ours = jax.jit(threefry.fold_in)(KEY, number)
    np.testing.assert_array_equal(data(ours), data(jax.random.fold_in(KEY, number)))


@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (2, 3, 4), (0,), (70_001,)])
def test_random_bits_are_jaxs(shape):
    ours = jax.jit(lambda key: threefry.random_bits(key, shape))(KEY)
    np.testing.assert_array_equal(ours, jax.random.bits(KEY, shape))


def test_lanes_draw_as_they_would_alone():
    numbers = jnp.arange(5, dtype=jnp.uint32)
    keys = jax.vmap(lambda i: threefry.fold_in(KEY, i))(numbers)
    lanes = jax.vmap(lambda key: threefry.random_bits(key, (4, 3)))(keys)
    for i, lane in enumerate(lanes):
        alone = jax.random.bits(jax.random.fold_in(KEY, i), (4, 3))
        np.testing.assert_array_equal(lane, alone)


def masked(key):
    return nn.Dropout(0.4, deterministic=False).apply({}, X, rngs={"dropout": key})


def split_first(key):
    return jax.random.uniform(jax.random.split(key)[1], (6,))


def in_a_loop(key):
    def body(i, total):
        return total + jax.random.normal(jax.random.fold_in(key, i), (6,))

    return jax.lax.fori_loop(0, 3, body, jnp.zeros(6))


def of_sixteen_bits(key):
    return jax.random.bits(key, (6,), jnp.uint16)


def of_many_keys(key):
    return jax.vmap(jax.random.uniform)(jax.random.split(key, 3))


DRAWS = [masked, split_first, in_a_loop, of_sixteen_bits, of_many_keys]


@pytest.mark.parametrize("draw", DRAWS, ids=lambda draw: draw.__name__)
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_stock_code_draws_the_same_after_the_rewrite(draw, impl):
    key = jax.random.key(3, impl=impl)
    ours = jax.jit(replace_operations(draw))(key)
    np.testing.assert_array_equal(ours, jax.jit(draw)(key))


def test_it_leaves_jaxs_other_way_of_counting_alone():
    with jax.threefry_partitionable(False):
        ours = jax.jit(replace_operations(masked))(KEY)
        np.testing.assert_array_equal(ours, jax.jit(masked)(KEY))


def test_no_loop_is_left_on_a_cpu():
    if jax.default_backend() != "cpu":
        pytest.skip("only a CPU has the loop")
    stock = jax.jit(masked).lower(KEY).as_text()
    ours = jax.jit(replace_operations(masked)).lower(KEY).as_text()
    assert "stablehlo.while" in stock
    assert "stablehlo.while" not in ours
