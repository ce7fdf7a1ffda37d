"""The schedules are optax's, and every argument may be traced."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpack import schedules

MIRRORS = {
    "constant": optax.constant_schedule,
    "linear": optax.linear_schedule,
    "cosine": optax.cosine_decay_schedule,
    "warmup_cosine": optax.warmup_cosine_decay_schedule,
    "one_cycle": optax.cosine_onecycle_schedule,
}
CASES = [
    ("constant", (0.3,)),
    ("linear", (1.0, 0.01, 20)),
    ("linear", (0.0, 0.5, 7, 5)),
    ("linear", (0.1, 0.5, 0)),
    ("linear", (0.1, 0.5, -3, 2)),
    ("linear", (0.1, 0.5, 10, -4)),
    ("cosine", (0.1, 20)),
    ("cosine", (0.1, 20, 0.1)),
    ("cosine", (0.1, 13, 0.2, 2.5)),
    ("cosine", (0.1, 1)),
    ("warmup_cosine", (0.0, 0.1, 5, 20)),
    ("warmup_cosine", (0.01, 0.1, 5, 20, 0.001, 1.7)),
    ("warmup_cosine", (0.01, 0.1, 0, 20, 0.001)),
    ("warmup_cosine", (0.01, 0.1, 19, 20, 0.001)),
    ("warmup_cosine", (0.01, 0.0, 5, 20, 0.001)),
    ("one_cycle", (20, 0.1)),
    ("one_cycle", (23, 0.1, 0.5, 10.0, 100.0)),
    ("one_cycle", (20, 0.1, 0.0)),
    ("one_cycle", (1, 0.1)),
]
# With these, optax lets the end come before the rise or drops the peak.
ODD_CASES = [("one_cycle", (20, 0.1, 1.0)), ("one_cycle", (20, 0.1, 1.3))]
COUNTS = range(30)


def values(schedule):
    return np.array([schedule(count) for count in COUNTS], np.float32)


def name_of(case):
    return f"{case[0]}{case[1]}"


@pytest.mark.parametrize("case", CASES + ODD_CASES, ids=name_of)
def test_numbers_give_the_values_of_optax(case):
    name, args = case
    ours, stock = getattr(schedules, name)(*args), MIRRORS[name](*args)
    np.testing.assert_allclose(values(ours), values(stock), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_every_argument_may_be_traced(case):
    name, args = case
    make = getattr(schedules, name)
    counts = jnp.arange(len(COUNTS))
    trace = jax.jit(
        lambda args: jax.vmap(lambda c: jnp.asarray(make(*args)(c)))(counts)
    )
    expected = values(MIRRORS[name](*args))
    np.testing.assert_allclose(trace(args), expected, rtol=2e-6, atol=1e-8)
    as_floats = jax.tree.map(float, args)
    np.testing.assert_allclose(trace(as_floats), expected, rtol=2e-6, atol=1e-8)


def test_arguments_differ_between_lanes():
    lanes = [(0.0, 0.1, 5, 20), (0.01, 0.3, 0, 25), (0.02, 0.2, 12, 13)]
    columns = [jnp.array(column) for column in zip(*lanes, strict=True)]

    def lane(*args):
        return jnp.stack([schedules.warmup_cosine(*args)(count) for count in COUNTS])

    got = jax.jit(jax.vmap(lane))(*columns)
    for row, args in zip(got, lanes, strict=True):
        expected = values(optax.warmup_cosine_decay_schedule(*args))
        np.testing.assert_allclose(row, expected, rtol=2e-6, atol=1e-8)


@pytest.mark.parametrize("name", MIRRORS)
def test_arguments_are_those_of_optax(name):
    ours = inspect.signature(getattr(schedules, name)).parameters
    stock = inspect.signature(MIRRORS[name]).parameters
    assert [(p.name, p.default) for p in ours.values()] == [
        (p.name, p.default) for p in stock.values()
    ]


@pytest.mark.parametrize(
    "name,args,message",
    [
        ("cosine", (0.1, 0), "decay_steps is 0"),
        ("warmup_cosine", (0.0, 0.1, 20, 20), "decay_steps - warmup_steps is 0"),
        ("one_cycle", (0, 0.1), "transition_steps is 0"),
    ],
)
def test_what_optax_refuses(name, args, message):
    with pytest.raises(ValueError):
        MIRRORS[name](*args)
    with pytest.raises(ValueError, match=message):
        getattr(schedules, name)(*args)
    make = getattr(schedules, name)
    assert jnp.isnan(jax.jit(lambda args: make(*args)(25))(args))


@pytest.mark.parametrize("case", [c for c in CASES if c[0] != "constant"], ids=name_of)
def test_type_is_that_of_optax_or_weaker(case):
    name, args = case
    value = jax.jit(lambda args: getattr(schedules, name)(*args)(3))(args)
    assert (value.dtype, value.weak_type) == (jnp.float32, True)


def test_scales_an_optimizer_per_lane():
    def lane(peak, steps):
        tx = optax.sgd(schedules.warmup_cosine(0.0, peak, 2, steps))
        params, state = jnp.ones(3), tx.init(jnp.ones(3))
        for _ in range(4):
            updates, state = tx.update(params, state)
            params = optax.apply_updates(params, updates)
        return params

    peaks, steps = [0.1, 0.2], [6, 9]
    got = jax.jit(jax.vmap(lane))(jnp.array(peaks), jnp.array(steps))
    for row, peak, horizon in zip(got, peaks, steps, strict=True):
        stock = optax.warmup_cosine_decay_schedule(0.0, peak, 2, horizon)
        expected = np.prod(1 - values(stock)[:4])
        np.testing.assert_allclose(row, np.full(3, expected), rtol=1e-6)
