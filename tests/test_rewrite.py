"""Unchanged models get our convolutions and pooling, and compute what they did."""

from __future__ import annotations

import concurrent.futures
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from jaxpack.rewrite import replace_operations

NHWC = ("NHWC", "HWIO", "NHWC")
KERNEL = jnp.asarray(np.random.default_rng(0).normal(size=(3, 3, 2, 2)) / 4)
IMAGES = jnp.asarray(np.random.default_rng(1).normal(size=(2, 6, 6, 2)))


def conv(x, w):
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC)


def assert_close(ours, stock):
    assert jax.tree.structure(ours) == jax.tree.structure(stock)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(stock), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-5)


def subjaxprs(value):
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from subjaxprs(item)
    elif hasattr(value, "eqns"):
        yield value
    elif hasattr(value, "jaxpr"):
        yield value.jaxpr


def stock_operations(fun, *args) -> list[str]:
    """The operations that were to be replaced and are not inside ours."""
    found = []

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in ("conv_general_dilated", "reduce_window_max"):
                found.append(eqn.primitive.name)
            own = re.search("_derivative|_max_pool", str(eqn.params.get("name", "")))
            ours = eqn.primitive.name == "custom_vjp_call" and (
                own or "platform_index" in str(eqn.params["call_jaxpr"])
            )
            if not ours:
                for jaxpr in subjaxprs(list(eqn.params.values())):
                    walk(jaxpr)

    walk(jax.make_jaxpr(fun)(*args).jaxpr)
    return found


# What a model may do with its convolutions, as functions of the kernel.


def plain(w):
    return jnp.sum(jnp.sin(conv(IMAGES, w)))


def jitted(w):
    layer = jax.jit(lambda x, w: jnp.tanh(conv(x, w)))
    return jnp.sum(layer(layer(IMAGES, w), w) ** 2)


def rematerialised(w):
    policy = jax.checkpoint_policies.dots_saveable
    layer = jax.checkpoint(lambda x, w: jnp.tanh(conv(x, w)), policy=policy)
    return jnp.sum(layer(layer(IMAGES, w), w) ** 2)


def scanned(w):
    def body(x, scale):
        return jnp.tanh(conv(x, w) * scale), jnp.sum(x)

    x, sums = lax.scan(body, IMAGES, jnp.arange(1.0, 4.0))
    return jnp.sum(x**2) + jnp.sum(sums)


def counted(w):
    x = lax.fori_loop(0, 3, lambda _, x: jnp.tanh(conv(x, w)), IMAGES)
    return jnp.sum(x**2)


def branched(w):
    x = lax.cond(
        jnp.sum(w) > 0, lambda w: conv(IMAGES, w), lambda w: 2 * conv(IMAGES, w), w
    )
    return jnp.sum(jnp.sin(lax.switch(1, [jnp.cos, jnp.sin], x)))


def activated(w):
    return jnp.sum(jax.nn.relu(conv(IMAGES, w)) * jax.nn.silu(conv(IMAGES, w)))


def own_gradient_inside(w):
    inner = jax.grad(lambda x: jnp.sum(jnp.sin(conv(x, w))))
    return jnp.sum(inner(IMAGES) ** 2)


def transposed(w):
    x = lax.conv_transpose(IMAGES, w, (2, 2), "SAME", dimension_numbers=NHWC)
    return jnp.sum(jnp.sin(x))


def pooled(w):
    return jnp.sum(nn.max_pool(conv(IMAGES, w), (2, 2), (2, 2)) ** 2)


MODELS = (
    plain,
    jitted,
    rematerialised,
    scanned,
    counted,
    branched,
    activated,
    own_gradient_inside,
    transposed,
    pooled,
)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_values_and_gradients_equal_stock(model):
    ours = replace_operations(model)
    assert stock_operations(model, KERNEL)
    assert not stock_operations(ours, KERNEL)
    got = jax.jit(jax.value_and_grad(ours))(KERNEL)
    assert_close(got, jax.jit(jax.value_and_grad(model))(KERNEL))


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_lanes_in_a_loop_equal_stock(model):
    kernels = jnp.stack([KERNEL, -KERNEL, KERNEL / 2])

    def descend(loss):
        def body(w, _):
            value, gradient = jax.value_and_grad(loss)(w)
            return w - 0.01 * gradient, value

        return jax.jit(jax.vmap(lambda w: lax.scan(body, w, None, length=2)))(kernels)

    assert_close(descend(replace_operations(model)), descend(model))


def test_while_loop_with_a_convolution_in_its_condition():
    def model(w):
        def go_on(x):
            return jnp.sum(conv(x, w) ** 2) > 0.1

        return lax.while_loop(go_on, lambda x: conv(x, w) / 8, IMAGES)

    ours = replace_operations(model)
    assert not stock_operations(ours, KERNEL)
    assert_close(jax.jit(ours)(KERNEL), jax.jit(model)(KERNEL))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Conv(4, (3, 3))(x)
        x = nn.BatchNorm(use_running_average=not train)(x)
        return nn.Dropout(0.3, deterministic=not train)(nn.relu(x))


class ScannedBlock(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        return Block()(x, train), None


class Net(nn.Module):
    """Stock layers; the last blocks are rematerialised and scanned over."""

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.max_pool(Block()(x, train), (2, 2), (2, 2))
        layers = nn.scan(
            nn.remat(ScannedBlock, static_argnums=(2,)),
            variable_axes={"params": 0, "batch_stats": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=nn.broadcast,
            length=2,
        )
        x, _ = layers()(x, train)
        return nn.Dense(3)(x.mean((1, 2)))


def linen_loss():
    net = Net()
    variables = net.init(jax.random.key(0), IMAGES)

    def loss(params, key):
        outputs, state = net.apply(
            {**variables, "params": params},
            IMAGES,
            train=True,
            rngs={"dropout": key},
            mutable=["batch_stats"],
        )
        return jnp.sum(jnp.sin(outputs)), state

    return loss, variables["params"]


def test_linen_model_in_lanes_and_threads():
    loss, params = linen_loss()
    ours = replace_operations(loss)
    keys = jax.random.split(jax.random.key(1), 2)
    assert not stock_operations(ours, params, keys[0])

    def gradients(loss):
        return jax.vmap(jax.value_and_grad(loss, has_aux=True), (None, 0))(params, keys)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first, second = pool.map(jax.jit(gradients, static_argnums=0), (ours, ours))
    jax.tree.map(np.testing.assert_array_equal, first, second)
    assert_close(first, jax.jit(gradients, static_argnums=0)(loss))


def test_nnx_model():
    class CNN(nnx.Module):
        def __init__(self, rngs):
            self.conv = nnx.Conv(2, 4, (3, 3), rngs=rngs)
            self.norm = nnx.BatchNorm(4, rngs=rngs)
            self.depthwise = nnx.Conv(4, 4, (3, 3), feature_group_count=4, rngs=rngs)
            self.head = nnx.Linear(4, 3, rngs=rngs)

        def __call__(self, x):
            x = nnx.relu(self.norm(self.conv(x)))
            return self.head(self.depthwise(x).mean((1, 2)))

    graph, params, rest = nnx.split(CNN(nnx.Rngs(0)), nnx.Param, ...)

    def loss(params, rest):
        # A copy, as the statistics are updated in this trace.
        model = nnx.merge(graph, params, jax.tree.map(jnp.asarray, rest))
        outputs = model(IMAGES)
        return jnp.sum(jnp.sin(outputs)), nnx.state(model, nnx.BatchStat)

    ours = replace_operations(loss)
    assert not stock_operations(ours, params, rest)
    got, expected = (
        jax.jit(jax.value_and_grad(f, has_aux=True))(params, rest) for f in (ours, loss)
    )
    assert_close(got, expected)


def test_custom_jvp_keeps_the_users_rule():
    @jax.custom_jvp
    def layer(w):
        return conv(IMAGES, w)

    layer.defjvps(lambda tangent, y, w: 10 * conv(IMAGES, tangent))

    def model(w):
        return jnp.sum(layer(w) ** 2)

    ours = replace_operations(model)
    assert not stock_operations(ours, KERNEL)
    got = jax.jit(jax.value_and_grad(ours))(KERNEL)
    assert_close(got, jax.jit(jax.value_and_grad(model))(KERNEL))


def test_custom_vjp_keeps_the_users_rule():
    @jax.custom_vjp
    def layer(w):
        return conv(IMAGES, w)

    layer.defvjp(lambda w: (3 * conv(IMAGES, w), w), lambda w, y: (w * jnp.sum(y),))

    def model(w):
        return jnp.sum(jax.jit(layer)(w) ** 2) + jnp.sum(conv(IMAGES, w))

    got = jax.jit(jax.value_and_grad(replace_operations(model)))(KERNEL)
    assert_close(got, jax.jit(jax.value_and_grad(model))(KERNEL))


def test_rematerialisation_is_kept():
    text = str(jax.make_jaxpr(replace_operations(rematerialised))(KERNEL))
    stock = str(jax.make_jaxpr(rematerialised)(KERNEL))
    options = r"policy=[^\n<]*|prevent_cse=\w+"
    assert re.findall(options, text) == re.findall(options, stock) != []


def test_effects_and_names_are_kept(capfd):
    def model(w):
        with jax.named_scope("stem"):
            y = jnp.sum(conv(IMAGES, w))
        jax.debug.print("y is {}", y > 1e9)
        return y

    lowered = jax.jit(replace_operations(model)).lower(KERNEL)
    jax.block_until_ready(lowered.compile()(KERNEL))
    jax.effects_barrier()
    assert "y is False" in capfd.readouterr().out
    assert "stem/" in lowered.as_text(debug_info=True)


def test_idempotent():
    once = replace_operations(pooled)
    twice = replace_operations(once)
    assert str(jax.make_jaxpr(once)(KERNEL)) == str(jax.make_jaxpr(twice)(KERNEL))


def test_a_function_called_twice_stays_one():
    @jax.jit
    def layer(x, w):
        return jnp.tanh(conv(x, w))

    fun = replace_operations(lambda w: layer(layer(IMAGES, w), w))
    bodies = [
        eqn.params["jaxpr"]
        for eqn in jax.make_jaxpr(fun)(KERNEL).eqns
        if eqn.params.get("name") == "layer"
    ]
    assert len(bodies) == 2
    assert bodies[0] is bodies[1]


def test_no_convolution_no_change():
    def model(x):
        return {"loss": jnp.sum(jax.nn.relu(x)), "why": "as it is" if calls else 0}

    calls = []

    def counting(x):
        result = model(x)
        calls.append(result["loss"])
        return result

    result = replace_operations(counting)(jnp.arange(3.0))
    assert len(calls) == 2
    assert result["loss"] is calls[1]
    assert result["why"] == "as it is"


def test_what_is_closed_over_may_change():
    box = [1.0]
    fun = replace_operations(lambda w: box[0] * jnp.sum(conv(IMAGES, w)))
    first = fun(KERNEL)
    box[0] = 2.0
    np.testing.assert_allclose(fun(KERNEL), 2 * first, rtol=1e-6)


def test_structure_dtypes_and_constants_are_kept():
    def model(tree, _, key):
        noise = jax.random.normal(key, IMAGES.shape)
        y = conv(IMAGES + noise, tree["w"])
        return {"y": (y, None), "one": 1.0, "w": tree["w"], "key": key}

    args = {"w": KERNEL}, None, jax.random.key(0)
    ours, stock = (f(*args) for f in (replace_operations(model), model))
    assert jax.tree.structure(ours) == jax.tree.structure(stock)
    assert ours["one"].dtype == jnp.float32 and ours["one"] == 1
    assert ours["key"].dtype == stock["key"].dtype
    np.testing.assert_allclose(ours["y"][0], stock["y"][0], atol=1e-5)


@pytest.mark.parametrize(
    "model",
    [
        lambda x: lax.reduce_window(
            x, jnp.int8(-128), lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME"
        ),
        lambda x: lax.conv_general_dilated(
            x, jnp.ones((2, 2, 2, 2), jnp.int8), (1, 1), "SAME", dimension_numbers=NHWC
        ),
    ],
    ids=["pooling", "convolution"],
)
def test_integers_stay_stock(model):
    x = jnp.arange(32, dtype=jnp.int8).reshape(1, 4, 4, 2)
    np.testing.assert_array_equal(replace_operations(model)(x), model(x))
