"""The models have the stated layers and equal twins made of stock layers."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import jaxpack as jp
from jaxpack.models import (
    MLP,
    DenseNet,
    LeNet,
    MobileNetV2,
    ResNet,
    Transformer,
    max_pool2x2,
)
from jaxpack.models.resnet import BasicBlock
from jaxpack.nn import intercept
from jaxpack.types import TracedChoice

# Of each family a network small enough to run.
TINY = {
    "resnet": ResNet(width=4),
    "mobilenet": MobileNetV2(stages=((1, 8, 1, 1), (2, 8, 2, 2)), features=16),
    "densenet": DenseNet(7, growth=4),
    "densenet_bc": DenseNet(10, growth=4, bottleneck=True),
    "transformer": Transformer(8, 1, 2, patch=3),
}
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


SMALL, LARGE, CLASSES = (32, 32, 3), (224, 224, 3), {"num_classes": 1000}
IMAGENET = {"stem": "imagenet", **CLASSES}


def sizes(module, shape):
    """The number of weights, the multiply-adds of an example, the output's shape."""
    counts = []

    def count(next_fun, args, kwargs, context):
        y = next_fun(*args, **kwargs)
        if isinstance(context.module, nn.Conv | nn.Dense):
            kernel = context.module.get_variable("params", "kernel")
            counts.append(y[0].size // y.shape[-1] * kernel.size)
        return y

    with nn.intercept_methods(count):
        y, variables = jax.eval_shape(
            lambda x: module.init_with_output(KEY, x), jnp.zeros((2, *shape))
        )
    leaves = jax.tree.leaves(variables["params"])
    return sum(leaf.size for leaf in leaves), sum(counts), y.shape


@pytest.mark.parametrize(
    "module,shape,params,operations",
    [
        # He et al., section 4.2 and table 6 (0.27 M, 1.7 M) and table 1; the numbers
        # of weights are those of the authors' networks to the last one. Of ResNet-50
        # table 1 has 3.8e9 multiply-adds with the strides in the 1x1 convolutions.
        (ResNet(20), SMALL, 269_722, 0.041e9),
        (ResNet(110), SMALL, 1_727_962, 0.253e9),
        (ResNet(18, **IMAGENET), LARGE, 11_689_512, 1.8e9),
        (ResNet(34, **IMAGENET), LARGE, 21_797_672, 3.6e9),
        (ResNet(50, **IMAGENET), LARGE, 25_557_032, 4.1e9),
        (ResNet(18), SMALL, 11_173_962, 0.56e9),
        # Sandler et al., table 4: 3.4 M and 300 M, and 0.75: 2.6 M and 209 M; without
        # 1,504 biases that have no effect.
        (MobileNetV2(**IMAGENET), LARGE, 3_504_872 - 1504, 0.300e9),
        (MobileNetV2(0.75, **IMAGENET), LARGE, pytest.approx(2.6e6, rel=0.02), 0.209e9),
        (MobileNetV2(), SMALL, 2_235_178, 0.088e9),
        # Huang et al., table 2 (1.0 M, and BC: 0.8 M) and table 1.
        (DenseNet(40), SMALL, 1_019_722, 0.27e9),
        (DenseNet(100, bottleneck=True), SMALL, 769_162, 0.29e9),
        (DenseNet(121, **IMAGENET), LARGE, 7_978_856, 2.83e9),
    ],
)
def test_sizes_are_those_of_the_papers(module, shape, params, operations):
    num_weights, multiply_adds, output = sizes(module, shape)
    assert num_weights == params
    assert multiply_adds == pytest.approx(operations, rel=0.02)
    assert output == (2, module.num_classes)


def test_size_of_the_transformer():
    d, patches = 64, 64
    layer = 4 * d * d + 4 * d + 8 * d * d + 5 * d  # Attention, norms, dense layers.
    expected = (48 + 1) * d + patches * d + 2 * layer + 2 * d + (d + 1) * 10
    assert num_params(Transformer(), jnp.zeros((2, 32, 32, 3))) == expected


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


def random_variables(module, *args):
    """Variables of any values: an initialisation takes long to compile."""
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        fan_in = max(1, leaf.size // leaf.shape[-1])
        values = rng.normal(size=leaf.shape).astype(leaf.dtype) / fan_in**0.5
        return jnp.asarray(np.abs(values) + 0.5 if path[-1].key == "var" else values)

    init = functools.partial(module.init, KEY)
    shapes = jax.eval_shape(lambda: init(*args))
    return jax.tree_util.tree_map_with_path(draw, shapes)


def hastily(function, *args):
    """Runs it once, compiled without taking pains."""
    lowered = jax.jit(function).lower(*args)
    return lowered.compile(compiler_options={"xla_backend_optimization_level": "0"})(
        *args
    )


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name in {"resnet", "densenet"}))
        for name in TINY
    ],
)
def test_every_weight_has_an_effect(name):
    # A gradient of nothing but rounding noise would become steps under Adam.
    x, module = images(8, 6, 6, 1), TINY[name]
    variables = random_variables(module, x)
    (gradients, _), _ = hastily(lambda v: outcome(module, v, x, True), variables)
    largest = jax.tree.map(lambda g: jnp.abs(g).max(), gradients)
    assert min(jax.tree.leaves(largest)) > 1e-3, largest


@pytest.mark.parametrize(
    "module",
    [
        MLP(8, batch_norm=True),
        LeNet((2,), batch_norm=True),
        *(TINY[name] for name in ("resnet", "mobilenet", "densenet")),
    ],
)
def test_padding_is_left_out(module):
    x = images(6, 6, 6, 1)
    variables = random_variables(module, x)
    mask = jnp.arange(6) < 4

    def train(variables, x, mask):
        options = {"train": True, "mask": mask, "mutable": ["batch_stats"]}
        return module.apply(variables, x, **options)

    y, state = hastily(train, variables, x.at[4:].set(100), mask)
    expected, expected_state = hastily(train, variables, x[:4], None)
    assert_close((y[:4], state), (expected, expected_state), 1e-4)


@pytest.mark.parametrize(
    "module",
    [ResNet(18), ResNet(50, stem="imagenet"), TINY["mobilenet"], TINY["densenet_bc"]],
)
def test_every_batch_norm_knows_of_padding_and_training(module):
    seen = []

    def note(next_fun, args, kwargs, context):
        if isinstance(context.module, nn.BatchNorm):
            averages = context.module.use_running_average
            seen.append((kwargs["mask"].shape, averages))
        return next_fun(*args, **kwargs)

    x = images(2, 64, 64, 3)
    variables = jax.eval_shape(module.init, KEY, x)
    for train in (False, True):
        seen.clear()
        apply = functools.partial(module.apply, train=train, mutable=["batch_stats"])
        with nn.intercept_methods(note):
            jax.eval_shape(apply, variables, x, mask=jnp.ones(2, bool))
        assert len(seen) == len(jax.tree.leaves(variables["batch_stats"])) // 2
        assert set(seen) == {((2, 1, 1, 1), not train)}


@pytest.mark.parametrize("stride", [1, 2])
def test_a_shortcut_without_weights(stride):
    block = BasicBlock(6, stride, activation=nn.relu)
    x = images(2, 4, 4, 3)
    variables = random_variables(block, x, False, None)
    for name in ("scale", "bias"):
        variables["params"]["BatchNorm_1"][name] *= 0
    y = hastily(lambda x: block.apply(variables, x, False, None), x)
    np.testing.assert_array_equal(y[..., :3], nn.relu(x[:, ::stride, ::stride]))
    assert not y[..., 3:].any()


def test_tokens_see_those_before_them():
    model = Transformer(8, 1, 2, 5, vocabulary=5, causal=True, per_token=True)
    tokens = jnp.array([[0, 1, 2, 3], [0, 1, 4, 3]])
    variables = random_variables(model, tokens)

    def differences(tokens):
        both, causal = (
            model.clone(causal=causal).apply(variables, tokens)
            for causal in (False, True)
        )
        return [jnp.abs(y[0] - y[1]).max(-1) for y in (both, causal)]

    both, causal = hastily(differences, tokens)
    assert both.shape == (4,)
    assert both.min() > 1e-3
    assert causal[:2].max() < 1e-6 < 1e-3 < causal[2:].min()


def test_the_order_of_tokens_counts():
    model, x = Transformer(8, 1, 2), images(1, 4, 3)
    variables = random_variables(model, x)
    y = hastily(lambda x: [model.apply(variables, x) for x in (x, x[:, ::-1])], x)
    assert y[0].shape == (1, 10)
    assert jnp.abs(y[0] - y[1]).max() > 1e-3


@pytest.mark.parametrize(
    "module,shape,message",
    [
        (ResNet(9), SMALL, r"depth is 9; it must be 6n\+2 .* one of 18, 34"),
        (ResNet(stem="mnist"), SMALL, "stem is 'mnist'; it must be 'cifar'"),
        (DenseNet(41), SMALL, r"depth is 41; it must be 3n\+4 or one of 121"),
        (DenseNet(41, bottleneck=True), SMALL, r"6n\+4 with bottlenecks"),
        (MobileNetV2(stem=""), SMALL, "stem is ''"),
        (Transformer(10), SMALL, "width is 10; it must be a multiple of heads, 4"),
        (Transformer(patch=5), SMALL, "patch is 5; it must divide .* 32 and 32"),
        (Transformer(), (7,), r"the input is float32\[2, 7\]; it must be"),
    ],
)
def test_what_is_wrong_is_said(module, shape, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(module.init, KEY, images(2, *shape))


def test_ids_need_a_vocabulary():
    with pytest.raises(ValueError, match="vocabulary is None; token ids need it"):
        Transformer().init(KEY, jnp.zeros((2, 7), int))


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
