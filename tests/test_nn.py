"""Per-lane branches, and stock layers with traced rates and padded batches."""

from __future__ import annotations

import concurrent.futures
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from jaxpack.nn import CallSignature, call_signature, intercept, switch
from jaxpack.types import TracedChoice

KEY = jax.random.key(0)
NAMES = ("relu", "tanh", "gelu")
BRANCHES = {"gelu": linen.gelu, "relu": linen.relu, "tanh": jnp.tanh, "no": jnp.log}


def over_lanes(f, options, *args):
    """Returns `f(choice, *args)` of a lane for each option, stacked."""
    index = jnp.arange(len(options))
    return jax.jit(
        jax.vmap(lambda i: f(TracedChoice("kind", i, tuple(options)), *args))
    )(index)


def assert_tree_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def assert_tree_close(a, b, atol=2e-7):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=atol), a, b)


# switch


@pytest.mark.parametrize("value", [True, 3, None, "relu", 0.5])
def test_plain_value_is_a_look_up(value):
    branches = {True: "yes", 3: "three", None: "none", "relu": linen.relu, 0.5: "half"}
    assert switch(value, branches) is branches[value]


def test_lanes_select_their_function():
    x = jnp.linspace(-3, 3, 7)
    got = over_lanes(lambda choice: switch(choice, BRANCHES)(x), NAMES)
    for row, name in zip(got, NAMES, strict=True):
        np.testing.assert_allclose(row, BRANCHES[name](x), atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_functions_keep_the_dtype(dtype):
    x = jnp.ones(2, dtype)
    got = over_lanes(lambda choice: switch(choice, BRANCHES)(x), NAMES)
    assert got.dtype == dtype


def test_functions_take_and_give_trees_and_keywords():
    branches = {
        "sum": lambda x, *, scale: {"out": x["a"] + x["b"], "n": scale},
        "difference": lambda x, *, scale: {"out": x["a"] - x["b"], "n": 2 * scale},
    }
    x = {"a": jnp.ones(3), "b": jnp.arange(3.0)}
    got = over_lanes(lambda c: switch(c, branches)(x, scale=jnp.int32(2)), branches)
    np.testing.assert_array_equal(got["out"], [[1, 2, 3], [1, 0, -1]])
    np.testing.assert_array_equal(got["n"], [2, 4])


@pytest.mark.parametrize(
    "values", [(0.1, 0.2), (1, 2), (np.zeros(2, np.float32), np.ones(2, np.float32))]
)
def test_lanes_select_their_value(values):
    branches = dict(zip("ab", values, strict=True))
    got = over_lanes(lambda choice: switch(choice, branches), "ab")
    np.testing.assert_array_equal(got, np.asarray(values, got.dtype))
    assert got.dtype == jnp.asarray(values[0]).dtype


def test_numbers_stay_weakly_typed():
    def scaled(choice):
        return jnp.ones(2, jnp.bfloat16) * switch(choice, {"a": 0.1, "b": 0.2})

    assert over_lanes(scaled, "ab").dtype == jnp.bfloat16


@pytest.mark.parametrize(
    "bad",
    [jnp.log, jnp.sqrt, lambda x: x / (x - x), lambda x: jnp.exp(1e4 * x), jnp.arccosh],
)
def test_unselected_branches_do_no_harm(bad):
    x = jnp.array([-2.0, 0.0, 1.0, 3.0])

    def loss(x, choice):
        return jnp.sum(switch(choice, {"good": jnp.sin, "bad": bad})(x))

    def both_ways(choice):
        return jax.value_and_grad(loss)(x, choice)

    value, gradient = over_lanes(both_ways, ("good", "bad"))
    np.testing.assert_allclose(value[0], jnp.sum(jnp.sin(x)), rtol=1e-6)
    np.testing.assert_allclose(gradient[0], jnp.cos(x), rtol=1e-6)
    expected = jax.grad(lambda x: jnp.sum(bad(x)))(x)
    np.testing.assert_allclose(gradient[1], expected, rtol=1e-6)


def test_only_options_are_computed():
    def never(x):
        raise AssertionError("computed a branch that is no option")

    branches = {"a": jnp.sin, "b": jnp.cos, "c": never}
    over_lanes(lambda choice: switch(choice, branches)(jnp.ones(2)), "ab")


@pytest.mark.parametrize(
    "value,message",
    [
        ("rleu", "no branch 'rleu'; did you mean 'relu'?"),
        (7, "no branch 7; there are 'gelu', 'relu', 'tanh', 'no'"),
        (
            TracedChoice("activation", jnp.int32(0), ("tanh", "swish")),
            "no branch 'swish'; there are",
        ),
    ],
    ids=["near", "number", "traced"],
)
def test_unknown_names_raise(value, message):
    with pytest.raises(ValueError) as error:
        switch(value, BRANCHES)
    assert message in str(error.value)


def test_functions_mixed_with_values_raise():
    choice = TracedChoice("activation", jnp.int32(0), ("a", "b"))
    with pytest.raises(ValueError, match="switch on activation"):
        switch(choice, {"a": 1.0, "b": jnp.sin})


def test_traced_numbers_raise():
    with pytest.raises(TypeError, match="traced number"):
        jax.jit(lambda value: switch(value, {1: 2.0}))(1)


# nn.Dropout with a traced rate

RATES = (0.0, 0.1, 0.3, 0.5, 0.9, 1.0)


class Drop(linen.Module):
    """A dropout layer below another module, as in a model."""

    rate: float
    options: tuple = ()

    @linen.compact
    def __call__(self, x, **kwargs):
        layer = linen.Dropout(self.rate, **dict(self.options))
        return layer(x, **kwargs) * 2.0


def dropped(rate, x, options, kwargs):
    rngs = {"dropout": KEY, "other": jax.random.key(7)}

    def apply(x) -> Any:
        return Drop(rate, tuple(options.items())).apply({}, x, rngs=rngs, **kwargs)

    y, pullback = jax.vjp(apply, x)
    return y, *pullback(jnp.ones_like(y))


@pytest.mark.parametrize(
    "options,kwargs",
    [
        ({}, {"deterministic": False}),
        ({"deterministic": False}, {}),
        ({"deterministic": True}, {}),
        ({}, {"deterministic": True}),
        ({"broadcast_dims": (0, -1)}, {"deterministic": False}),
        ({"rng_collection": "other"}, {"deterministic": False}),
        ({"deterministic": False}, {"rng": jax.random.key(3)}),
    ],
)
def test_dropout_equals_stock(options, kwargs):
    x = jnp.linspace(0.5, 2, 120).reshape(4, 5, 6)

    def compute(rates):
        with intercept():
            lanes = jax.vmap(lambda rate: dropped(rate, x, options, kwargs))(rates)
        return lanes, [dropped(rate, x, options, kwargs) for rate in RATES]

    got, expected = jax.jit(compute)(jnp.array(RATES))
    for i, alone in enumerate(expected):
        mine = jax.tree.map(lambda a, i=i: a[i], got)
        assert_tree_equal(mine[0] == 0, alone[0] == 0)
        for a, b in zip(mine, alone, strict=True):
            # 1 - rate of a float32 rate of 0.9 is itself off by 2.4e-7.
            np.testing.assert_allclose(a, b, rtol=4e-7)


def test_dropout_without_a_flag_raises():
    with intercept(), pytest.raises(ValueError, match="deterministic=not train"):
        jax.jit(lambda rate: dropped(rate, jnp.ones(3), {}, {}))(0.5)
    with intercept(), pytest.raises(ValueError, match="use_running_average=not train"):
        linen.BatchNorm().init(jax.random.key(0), jnp.ones((2, 3)))


def test_dropout_in_evaluation_warns():
    def drop():
        layer = linen.Dropout(0.5, deterministic=False)
        return layer.apply({}, jnp.ones(3), rngs={"dropout": jax.random.key(0)})

    with intercept():
        drop()
    with intercept(evaluates=True), pytest.warns(UserWarning, match="scores are noisy"):
        drop()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("rate", [0.3, jnp.float32(0.3)], ids=["weak", "strong"])
def test_dropout_keeps_the_dtype(dtype, rate):
    x = jnp.linspace(0.5, 2, 64, dtype=dtype)
    kwargs = {"deterministic": False}
    with intercept():
        got = jax.jit(lambda rate: dropped(rate, x, {}, kwargs))(rate)
    expected = jax.jit(lambda: dropped(0.3, x, {}, kwargs))()
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype == dtype
        wide = [np.asarray(array, np.float32) for array in (a, b)]
        np.testing.assert_allclose(*wide, rtol=0.02)


def array_operations(jaxpr) -> list[str]:
    """Returns the names of operations on more than scalars, in their order."""
    names = []
    for equation in jaxpr.eqns:
        inner = equation.params.get("jaxpr")
        if inner is not None:
            names += array_operations(inner.jaxpr)
        elif any(out.aval.shape for out in equation.outvars):
            names.append(equation.primitive.name)
    return names


def test_dropout_has_the_operations_of_stock():
    x = jnp.ones((3, 4))

    def apply(rate):
        layer = linen.Dropout(rate, deterministic=False)
        return layer.apply({}, x, rngs={"dropout": KEY})

    with intercept():
        ours = jax.make_jaxpr(apply)(0.3)
    stock = jax.make_jaxpr(lambda: apply(0.3))()
    assert array_operations(ours.jaxpr) == array_operations(stock.jaxpr)


class Block(linen.Module):
    """A residual block with dropout, of the form that `nn.scan` takes."""

    rate: float

    @linen.compact
    def __call__(self, x, _=None):
        y = linen.Dense(4)(x)
        return x + linen.Dropout(self.rate, deterministic=False)(y), None


def rematerialised(rate):
    return linen.remat(Block)(rate)


def scanned(rate):
    split: Any = {"params": True, "dropout": True}
    axes: Any = {"params": 0}
    return linen.scan(Block, axes, split_rngs=split, length=3)(rate)


@pytest.mark.parametrize("wrap", [Block, rematerialised, scanned])
def test_dropout_inside_transformations(wrap):
    x = jnp.ones((2, 4))
    variables = jax.jit(wrap(0.5).init)({"params": KEY, "dropout": KEY}, x)

    def loss(variables, rate):
        y, _ = wrap(rate).apply(variables, x, rngs={"dropout": KEY})
        return jnp.sum(y**2)

    def compute(rates):
        f = jax.value_and_grad(loss)
        with intercept():
            lanes = jax.vmap(f, (None, 0))(variables, rates)
        return lanes, [f(variables, rate) for rate in (0.0, 0.5)]

    got, expected = jax.jit(compute)(jnp.array([0.0, 0.5]))
    for i, alone in enumerate(expected):
        assert_tree_close(jax.tree.map(lambda a, i=i: a[i], got), alone, 1e-5)


class OwnDropout(linen.Dropout):
    @linen.compact
    def __call__(self, x, deterministic=None, rng=None):
        return x * self.rate


class SameDropout(linen.Dropout):
    """Inherits `__call__`."""


def test_subclasses():
    def apply(layer, rate):
        return layer(rate, deterministic=False).apply(
            {}, jnp.ones(8), rngs={"dropout": KEY}
        )

    with intercept():
        own = jax.jit(lambda rate: apply(OwnDropout, rate))(0.25)
        same = jax.jit(lambda rate: apply(SameDropout, rate))(0.25)
    np.testing.assert_array_equal(own, np.full(8, 0.25))
    np.testing.assert_allclose(same, apply(linen.Dropout, 0.25), rtol=1e-6)


def test_intercept_ends_and_is_of_its_thread():
    def traced():
        jax.jit(lambda rate: dropped(rate, jnp.ones(3), {"deterministic": False}, {}))(
            0.5
        )

    with intercept():
        traced()
        with (
            concurrent.futures.ThreadPoolExecutor(1) as pool,
            pytest.raises(jax.errors.TracerBoolConversionError),
        ):
            pool.submit(traced).result()
    with pytest.raises(jax.errors.TracerBoolConversionError):
        traced()


# nn.BatchNorm on padded batches


class Norm(linen.Module):
    """A BatchNorm layer below another module, as in a model."""

    axis: int = -1
    mask: jax.Array | None = None
    flatten: bool = False

    @linen.compact
    def __call__(self, x, train=True):
        if self.flatten:
            x = x.reshape(-1, x.shape[-1])
        layer = linen.BatchNorm(axis=self.axis, momentum=0.5)
        return layer(x, not train, mask=self.mask)


def normed(module, x, train=True):
    variables = jax.tree.map(lambda a: a + 0.5, module.init(KEY, x))

    def loss(params, x):
        y, state = module.apply(
            {**variables, "params": params}, x, train, mutable=["batch_stats"]
        )
        return jnp.sum(jnp.sin(y[:3])), (y, state)

    return jax.grad(loss, (0, 1), has_aux=True)(variables["params"], x)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("shape", [(5, 3), (5, 4, 4, 3)])
def test_masked_batch_norm_is_that_of_the_smaller_batch(shape, axis, train):
    x = jax.random.normal(jax.random.key(1), shape) * 3 + 1
    mask = jnp.arange(5) < 3

    def compute(x):
        with intercept(mask):
            padded = normed(Norm(axis), x, train)
        return padded, normed(Norm(axis), x[:3], train)

    padded, alone = jax.jit(compute)(x)
    (g_params, g_x), (y, state) = padded
    (h_params, h_x), (z, small) = alone
    assert_tree_close(y[:3], z, 2e-6)
    assert_tree_close(state, small, 2e-6)
    assert_tree_close(g_params, h_params, 2e-5)
    assert_tree_close(g_x[:3], h_x, 2e-5)
    assert not g_x[3:].any()


def test_masks_differ_between_lanes():
    x = jax.random.normal(jax.random.key(1), (5, 3))

    def lane(size):
        with intercept(jnp.arange(5) < size):
            return normed(Norm(), x)[1][1]

    sizes = 3, 4, 5
    got = jax.jit(jax.vmap(lane))(jnp.array(sizes))
    expected = jax.jit(lambda: [normed(Norm(), x[:size])[1][1] for size in sizes])()
    for i, alone in enumerate(expected):
        assert_tree_close(jax.tree.map(lambda a, i=i: a[i], got), alone, 2e-6)


@pytest.mark.parametrize(
    "module,x",
    [
        (Norm(), jnp.arange(12.0).reshape(4, 3)),
        (Norm(flatten=True), jnp.arange(60.0).reshape(5, 4, 3)),
        (Norm(mask=jnp.arange(5)[:, None] < 4), jnp.arange(15.0).reshape(5, 3)),
        (Norm(axis=0), jnp.arange(15.0).reshape(5, 3)),
    ],
    ids=["other batch", "flattened", "own mask", "feature axis 0"],
)
def test_batch_norm_left_alone(module, x):
    def compute(x):
        with intercept(jnp.arange(5) < 3):
            intercepted = normed(module, x)
        return intercepted, normed(module, x)

    assert_tree_equal(*jax.jit(compute)(x))


class NormBlock(linen.Module):
    @linen.compact
    def __call__(self, x, _=None):
        x = linen.Dense(3)(x)
        return linen.BatchNorm(use_running_average=False)(x), None


@pytest.mark.parametrize("kind", ["remat", "scan"])
def test_masked_batch_norm_inside_transformations(kind):
    if kind == "remat":
        module = linen.remat(NormBlock)()
    else:
        axes: Any = {"params": 0, "batch_stats": 0}
        split: Any = {"params": True}
        module = linen.scan(NormBlock, axes, split_rngs=split, length=2)()
    x = jax.random.normal(jax.random.key(1), (5, 3))
    variables = jax.jit(module.init)(KEY, x)

    def run(x):
        def loss(params):
            (y, _), state = module.apply(
                {**variables, "params": params}, x, mutable=["batch_stats"]
            )
            return jnp.sum(y[:3] ** 3), state

        return jax.grad(loss, has_aux=True)(variables["params"])

    def compute(x):
        with intercept(jnp.arange(5) < 3):
            padded = run(x)
        return padded, run(x[:3])

    padded, alone = jax.jit(compute)(x)
    assert_tree_close(padded, alone, 2e-5)


# call_signature


class Train(linen.Module):
    def __call__(self, x, train):
        return x


class Training(linen.Module):
    def __call__(self, x, *, mask=None, training=False):
        return x


class Deterministic(linen.Module):
    @linen.compact
    def __call__(self, x, deterministic: bool = True):
        return x


class Plain(linen.Module):
    def __call__(self, x, **kwargs):
        return x


class Masked(linen.Module):
    def __call__(self, x, mask):
        return x


@pytest.mark.parametrize(
    "module,flag,mask,arguments",
    [
        (Train(), "train", False, {"train": True}),
        (Training(), "training", True, {"training": True, "mask": None}),
        (Deterministic(), "deterministic", False, {"deterministic": False}),
        (
            linen.remat(Deterministic)(),
            "deterministic",
            False,
            {"deterministic": False},
        ),
        (Plain(), None, False, {}),
        (Masked(), None, True, {"mask": None}),
        (linen.Sequential([linen.Dense(3)]), None, False, {}),
    ],
)
def test_call_signature(module, flag, mask, arguments):
    signature = call_signature(module)
    assert signature == CallSignature(flag, mask)
    assert signature.arguments(True, None) == arguments
    masked = signature.arguments(False, jnp.array(True))
    assert set(masked) == set(arguments)
    assert masked.get("mask", jnp.array(True))
    assert not flag or masked[flag] == (flag == "deterministic")
