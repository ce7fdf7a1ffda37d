"""The models have the stated layers and equal twins made of stock layers."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import jaxpack as jp
from jaxpack.models import MLP, LeNet, max_pool2x2
from jaxpack.nn import intercept
from jaxpack.types import TracedChoice

KEY = jax.random.key(0)
DROPOUT_KEY = jax.random.key(1)


@pytest.fixture(autouse=True)
def exact_products():
    with jax.default_matmul_precision("highest"):
        yield


def images(*shape):
    return jax.random.normal(jax.random.key(2), shape)


def num_params(module, x):
    shapes = jax.eval_shape(module.init, KEY, x)["params"]
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


@pytest.mark.parametrize(
    "module,shape,expected",
    [
        (MLP(), (784,), 784 * 128 + 128 + 128 * 128 + 128 + 128 * 10 + 10),
        (MLP(64, 1, 3), (28, 28, 1), 784 * 64 + 64 + 64 * 3 + 3),
        (MLP(8, 2, 3, batch_norm=True), (5,), 5 * 8 + 16 + 8 * 8 + 16 + 8 * 3 + 3),
        (MLP(8, 0, 3), (5,), 5 * 3 + 3),
        (
            LeNet(),
            (28, 28, 1),
            9 * 16 + 16 + 9 * 16 * 32 + 32 + 7 * 7 * 32 * 64 + 64 + 64 * 10 + 10,
        ),
        (
            LeNet((4,), 8, 3, batch_norm=True),
            (7, 9, 3),
            9 * 3 * 4 + 8 + 3 * 4 * 4 * 8 + 16 + 8 * 3 + 3,
        ),
    ],
)
def test_number_of_params(module, shape, expected):
    assert num_params(module, jnp.zeros((2, *shape))) == expected


class StockLeNet(nn.Module):
    """LeNet of stock convolutions and pools."""

    channels: tuple[int, ...]
    width: int
    num_classes: int
    dropout: float
    batch_norm: bool

    @nn.compact
    def __call__(self, x, *, train=False):
        def norm(x):
            return nn.BatchNorm(use_running_average=not train)(x)

        norm = norm if self.batch_norm else lambda x: x
        for channels in self.channels:
            x = nn.Conv(channels, (3, 3), use_bias=not self.batch_norm)(x)
            x = nn.max_pool(nn.relu(norm(x)), (2, 2), (2, 2))
        x = x.reshape(x.shape[0], -1)
        x = nn.relu(norm(nn.Dense(self.width, use_bias=not self.batch_norm)(x)))
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        return nn.Dense(self.num_classes)(x)


class StockMLP(nn.Module):
    """MLP for flat inputs with two hidden layers, written out."""

    width: int
    dropout: float

    @nn.compact
    def __call__(self, x, *, train=False):
        drop = functools.partial(nn.Dropout, self.dropout, deterministic=not train)
        x = drop()(nn.relu(nn.Dense(self.width)(x)))
        x = drop()(nn.relu(nn.Dense(self.width)(x)))
        return nn.Dense(10)(x)


def outcome(module, variables, x, train):
    """Returns outputs, new state and the gradients of the params and the input."""

    def loss(params, x):
        y, state = module.apply(
            {**variables, "params": params},
            x,
            train=train,
            rngs={"dropout": DROPOUT_KEY},
            mutable=["batch_stats"],
        )
        return jnp.sum(jnp.sin(y)), (y, state)

    return jax.grad(loss, (0, 1), has_aux=True)(variables["params"], x)


def assert_close(a, b, atol=2e-5):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=atol), a, b)


@pytest.mark.parametrize(
    "shape,batch_norm,train",
    [((8, 8, 1), False, True), ((9, 7, 3), False, False), ((9, 7, 3), True, True)],
)
def test_lenet_equals_its_stock_twin(shape, batch_norm, train):
    x = images(4, *shape)
    ours = LeNet((3, 5), 6, 4, 0.3, batch_norm=batch_norm)
    stock = StockLeNet((3, 5), 6, 4, 0.3, batch_norm)
    variables, same = jax.jit(lambda x: (ours.init(KEY, x), stock.init(KEY, x)))(x)
    assert_close(variables, same, 0)
    got, expected = jax.jit(
        lambda variables, x: (
            outcome(ours, variables, x, train),
            outcome(stock, variables, x, train),
        )
    )(variables, x)
    assert_close(got, expected, 1e-4)


@pytest.mark.parametrize("train", [False, True])
def test_mlp_equals_its_stock_twin(train):
    x = images(4, 7)
    ours, stock = MLP(16, dropout=0.3), StockMLP(16, 0.3)
    variables, same = jax.jit(lambda x: (ours.init(KEY, x), stock.init(KEY, x)))(x)
    assert_close(variables, same, 0)
    got, expected = jax.jit(
        lambda x: [outcome(model, variables, x, train) for model in (ours, stock)]
    )(x)
    assert_close(got, expected)


@pytest.mark.parametrize("model", [MLP, functools.partial(LeNet, (2,))])
def test_dropout_and_activation_differ_between_lanes(model):
    x = images(4, 6, 6, 1)
    rates, names = (0.0, 0.4), ("relu", "tanh")
    branches = {"relu": nn.relu, "tanh": nn.tanh}
    variables = jax.jit(model(width=8).init)(KEY, x)

    def lane(rate, index):
        activation = jp.switch(TracedChoice("act", index, names), branches)
        module = model(width=8, dropout=rate, activation=activation)
        with intercept():
            return outcome(module, variables, x, True)

    def alone(rate, name):
        module = model(width=8, dropout=rate, activation=branches[name])
        return outcome(module, variables, x, True)

    def compute(*hparams):
        return jax.vmap(lane)(*hparams), list(map(alone, rates, names))

    got, expected = jax.jit(compute)(jnp.array(rates), jnp.arange(2))
    for i, one in enumerate(expected):
        assert_close(jax.tree.map(lambda a, i=i: a[i], got), one)


@pytest.mark.parametrize("model", [MLP, LeNet])
def test_no_bias_before_batch_norm(model):
    module, x = model(batch_norm=True), images(2, 8, 8, 1)
    params = jax.eval_shape(module.init, KEY, x)["params"]
    biased = [name for name, layer in params.items() if "bias" in layer]
    last = max(name for name in params if name.startswith("Dense"))
    assert all(name == last or name.startswith("BatchNorm") for name in biased)


@pytest.mark.parametrize("shape", [(4, 6), (5, 7), (2, 3)])
def test_max_pool(shape):
    x = images(2, *shape, 3)

    def stock(x):
        return nn.max_pool(x, (2, 2), (2, 2))

    np.testing.assert_array_equal(max_pool2x2(x), stock(x))
    gradients = [
        jax.grad(lambda x, pool=pool: jnp.sum(jnp.sin(pool(x))))(x)
        for pool in (max_pool2x2, stock)
    ]
    np.testing.assert_array_equal(*gradients)


def test_max_pool_keeps_nan():
    x = images(1, 4, 4, 1).at[0, 1, 1, 0].set(jnp.nan)
    assert jnp.isnan(max_pool2x2(x)[0, :, :, 0]).tolist() == [[1, 0], [0, 0]]
