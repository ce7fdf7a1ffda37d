"""Every lane of a switched optimizer gets the updates of its own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpack import optimizers
from jaxpack.types import TracedChoice

BRANCHES = {
    "sgd": optax.sgd(0.1, momentum=0.9),
    "adamw": optax.adamw(0.01, weight_decay=0.1),
    "rmsprop": optax.rmsprop(0.01),
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.adagrad(0.1)),
    "polyak": optax.polyak_sgd(),
    "nan": optax.stateless(lambda updates, _: jax.tree.map(jnp.log, updates)),
}
PARAMS = {"w": jnp.linspace(-1, 1, 6).reshape(2, 3), "b": jnp.ones(3)}


def loss(params):
    return jnp.sum((params["w"] - 0.3) ** 2) + jnp.sum(params["b"] ** 2)


def trained(tx, steps=5):
    params, state = PARAMS, tx.init(PARAMS)
    for _ in range(steps):
        value, grads = jax.value_and_grad(loss)(params)
        tx = optax.with_extra_args_support(tx)
        updates, state = tx.update(grads, state, params, value=value)
        params = optax.apply_updates(params, updates)
    return params, state


def lanes(options, f):
    def lane(index):
        choice = TracedChoice("optimizer", index, options)
        return f(optimizers.switch(choice, BRANCHES))

    return jax.jit(jax.vmap(lane))(jnp.arange(len(options)))


def assert_close(got, expected):
    def leaf(a, b):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)

    jax.tree.map(leaf, got, expected)


OPTIONS = ("sgd", "adamw", "nan", "rmsprop", "clipped", "polyak")


def test_lanes_equal_their_optimizer_alone():
    params, states = lanes(OPTIONS, trained)
    for i, name in enumerate(OPTIONS):
        if name == "nan":
            continue
        alone, state = jax.jit(lambda name=name: trained(BRANCHES[name]))()
        assert_close(jax.tree.map(lambda a, i=i: a[i], params), alone)
        assert_close(jax.tree.map(lambda a, i=i: a[i], states[i]), state)


def test_states_of_the_others_stay_as_initialised():
    _, states = lanes(OPTIONS, trained)
    for lane in range(len(OPTIONS)):
        for place, name in enumerate(OPTIONS):
            if place != lane:
                got = jax.tree.map(lambda a, i=lane: a[i], states[place])
                assert_close(got, BRANCHES[name].init(PARAMS))


def test_updates_keep_the_dtype():
    params = {"w": jnp.ones(3, jnp.bfloat16)}

    def updates(tx):
        return tx.update(params, tx.init(params), params)[0]

    assert lanes(("sgd", "adamw"), updates)["w"].dtype == jnp.bfloat16


def test_plain_value_is_a_look_up():
    assert optimizers.switch("adamw", BRANCHES) is BRANCHES["adamw"]


def test_unknown_names_raise():
    with pytest.raises(ValueError, match="no branch 'adam'; did you mean 'adamw'"):
        optimizers.switch("adam", BRANCHES)
    choice = TracedChoice("optimizer", jnp.int32(0), ("sgd", "lion"))
    with pytest.raises(ValueError, match=r"branch 'sgd' is 0\.1; it must be an optax"):
        optimizers.switch("sgd", {"sgd": 0.1})
    with pytest.raises(ValueError, match="no branch 'lion'"):
        optimizers.switch(choice, BRANCHES)


def test_hyper_parameters_of_the_lane():
    def lane(index, rate):
        choice = TracedChoice("optimizer", index, ("sgd", "adam"))
        branches = {"sgd": optax.sgd(rate), "adam": optax.adam(rate)}
        return trained(optimizers.switch(choice, branches))[0]

    got = jax.jit(jax.vmap(lane))(jnp.array([0, 1, 0]), jnp.array([0.1, 0.01, 0.3]))
    alone = [optax.sgd(0.1), optax.adam(0.01), optax.sgd(0.3)]
    for i, tx in enumerate(alone):
        expected = jax.jit(lambda tx=tx: trained(tx)[0])()
        assert_close(jax.tree.map(lambda a, i=i: a[i], got), expected)
