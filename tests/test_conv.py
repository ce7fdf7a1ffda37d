"""The convolution equals XLA's, and lanes never turn it into groups."""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxpack import conv
from jaxpack.conv import conv_general_dilated
from jaxpack.pool import max_pool

NHWC = ("NHWC", "HWIO", "NHWC")
LANES = 3


@pytest.fixture(autouse=True)
def exact_products():
    with jax.default_matmul_precision("highest"):
        yield


def normal(seed: int, *shape: int, dtype=jnp.float32) -> jax.Array:
    values = np.random.default_rng(seed).normal(size=shape)
    return jnp.asarray(values, dtype)


def assert_close(ours, stock, atol=2e-5):
    assert jax.tree.structure(ours) == jax.tree.structure(stock)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(stock), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        wide = [np.asarray(array, np.float64) for array in (a, b)]
        np.testing.assert_allclose(*wide, atol=atol, rtol=1e-5)


def value_and_gradients(convolve, *args, **kwargs):
    """Returns a function of x and w: the convolution and both its gradients."""

    def compute(x, w):
        y, pullback = jax.vjp(lambda x, w: convolve(x, w, *args, **kwargs), x, w)
        return y, pullback(jnp.sin(y))

    return compute


def both(compute, *args):
    """Returns `compute(conv)(*args)` for our convolution and the stock one."""
    convs = conv_general_dilated, lax.conv_general_dilated
    return jax.jit(lambda *args: tuple(compute(conv)(*args) for conv in convs))(*args)


def grid():
    paddings = "SAME", "VALID", ((2, 1), (0, 3))
    square = itertools.product((1, 3, 5), (1, 2, 3), paddings)
    for i, (kernel, stride, padding) in enumerate(square):
        dilation, channels = 1 + i % 2, (1, 3)[i // 2 % 2]
        size = ((9, 10), (12, 11))[i // 4 % 2]
        yield (kernel, kernel), (stride, stride), padding, dilation, size, channels
    yield (2, 3), (1, 2), "SAME", 1, (7, 8), 3
    yield (3, 2), (2, 1), "SAME_LOWER", 2, (8, 9), 2
    yield (7, 7), (2, 2), "SAME", 1, (9, 9), 1
    yield (3, 3), (1, 1), ((0, -1), (-2, 1)), 1, (8, 8), 2
    yield (1, 1), (2, 2), ((0, 0), (0, 0)), 1, (7, 8), 3


@pytest.mark.parametrize("kernel,strides,padding,dilation,size,channels", list(grid()))
def test_equals_stock(kernel, strides, padding, dilation, size, channels):
    x, w = normal(0, 2, *size, channels), normal(1, *kernel, channels, 4)
    args = (strides, padding, None, (dilation, dilation), NHWC)
    assert_close(*both(lambda conv: value_and_gradients(conv, *args), x, w), atol=1e-4)


ORDERS = (NHWC, None, ("NHWC", "OIHW", "NCHW"), ("HWNC", "IHWO", "CHWN"))
# Channels in, groups, channels out: plain, grouped, depthwise, with a multiplier.
GROUPS = ((3, 1, 4), (4, 2, 6), (4, 4, 4), (3, 3, 6), (1, 1, 2))


def in_order(spec: str, array: jax.Array, canonical: str) -> jax.Array:
    return jnp.transpose(array, [canonical.index(letter) for letter in spec])


def forms():
    pads = ((0, 0), (0, 0)), ((1, 0), (2, 1)), ((0, -1), (1, 0))
    for i, (channels, kernel) in enumerate(itertools.product(GROUPS, (1, 3))):
        for j in range(3):
            k = i + j
            stride, spread, dilation = 1 + k % 2, 1 + k // 2 % 2, 1 + j % 2
            yield channels, kernel, stride, pads[j], spread, dilation, ORDERS[k % 4]


@pytest.mark.parametrize(
    "channels,kernel,stride,padding,spread,dilation,order", list(forms())
)
def test_groups_spreads_and_orders_equal_stock(
    channels, kernel, stride, padding, spread, dilation, order
):
    inputs, groups, outputs = channels
    specs = order or ("NCHW", "OIHW", "NCHW")
    x = in_order(specs[0], normal(0, 2, 7, 8, inputs), "NHWC")
    w = normal(1, kernel, kernel, inputs // groups, outputs)
    args = (
        (stride, stride),
        padding,
        (spread, spread),
        (dilation, dilation),
        order,
        groups,
    )
    w = in_order(specs[1], w, "HWIO")
    assert_close(*both(lambda conv: value_and_gradients(conv, *args), x, w), atol=1e-4)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("numbers", [("NWC", "WIO", "NWC"), ("NCH", "OIH", "NCH")])
def test_lines_equal_stock(numbers, groups):
    x = in_order(numbers[0].replace("H", "W"), normal(0, 2, 9, 4), "NWC")
    w = in_order(numbers[1].replace("H", "W"), normal(1, 3, 4 // groups, 4), "WIO")
    args = ((2,), ((2, 1),), (1,), (2,), numbers, groups)
    assert_close(*both(lambda conv: value_and_gradients(conv, *args), x, w), atol=1e-4)


@pytest.mark.parametrize("channels", [1, 3])
def test_bfloat16(channels):
    x = normal(0, 2, 8, 8, channels, dtype=jnp.bfloat16)
    w = normal(1, 3, 3, channels, 4, dtype=jnp.bfloat16)
    args = ((1, 1), "SAME", None, None, NHWC)
    ours, stock = both(lambda conv: value_and_gradients(conv, *args), x, w)
    assert_close(ours, stock, atol=0.25)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("by", ["x", "w", "y"])
def test_other_platforms_compute_the_same(by, groups):
    x, w = normal(0, 2, 8, 9, 3), normal(1, 3, 3, 3 // groups, 6)
    pads = ((1, 0), (2, 1))
    geometry = conv._Geometry(
        (8, 9), (3, 3), (2, 1), pads, (1, 2), (1, 2), groups, None
    )
    args = {"x": x, "w": w, "y": conv._output(geometry, x, w)}
    others = [value for name, value in args.items() if name != by]
    native = conv._NATIVE[by](geometry, *others)
    assert native.shape == args[by].shape
    assert_close(conv._ON_CPU[by](geometry, *others), native, atol=1e-4)


IN_AXES = {"own input": (0, 0), "shared input": (None, 0), "shared kernel": (0, None)}


def lane_arguments(in_axes, channels=3, groups=1):
    x = normal(0, LANES, 2, 7, 7, channels)
    w = normal(1, LANES, 3, 3, channels // groups, 4)
    return tuple(
        a if axis == 0 else a[0] for a, axis in zip((x, w), in_axes, strict=True)
    )


def lane(args, in_axes, i):
    return tuple(
        a[i] if axis == 0 else a for a, axis in zip(args, in_axes, strict=True)
    )


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("in_axes", list(IN_AXES.values()), ids=list(IN_AXES))
def test_lanes_equal_stock(in_axes, channels):
    args = lane_arguments(in_axes, channels)
    options = ((2, 2), "SAME", None, None, NHWC)
    ours = jax.vmap(value_and_gradients(conv_general_dilated, *options), in_axes)
    stock = jax.jit(value_and_gradients(lax.conv_general_dilated, *options))
    got = jax.jit(ours)(*args)
    for i in range(LANES):
        expected = stock(*lane(args, in_axes, i))
        assert_close(jax.tree.map(lambda a, i=i: a[i], got), expected)


@pytest.mark.parametrize("groups", [2, 4], ids=["grouped", "depthwise"])
@pytest.mark.parametrize("in_axes", list(IN_AXES.values()), ids=list(IN_AXES))
def test_lanes_of_groups_equal_stock(in_axes, groups):
    args = lane_arguments(in_axes, 4, groups)
    options = ((2, 2), "SAME", None, None, NHWC, groups)
    ours = jax.vmap(value_and_gradients(conv_general_dilated, *options), in_axes)
    stock = jax.vmap(value_and_gradients(lax.conv_general_dilated, *options), in_axes)
    assert_close(jax.jit(ours)(*args), jax.jit(stock)(*args), atol=1e-4)


def group_counts(conv, in_axes, groups=1) -> set[int]:
    """Returns the group counts of all convolutions in the vmapped gradients."""
    options = ((1, 1), "SAME", None, None, NHWC, groups)
    f = jax.vmap(value_and_gradients(conv, *options), in_axes)
    text = jax.jit(f).lower(*lane_arguments(in_axes, 4, groups)).as_text()
    counts = re.findall(r"(?:feature|batch)_group_count = (\d+)", text)
    return {int(count) for count in counts}


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="only CPUs avoid groups")
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("in_axes", list(IN_AXES.values()), ids=list(IN_AXES))
def test_lanes_are_not_groups(in_axes, groups):
    ours = group_counts(conv_general_dilated, in_axes, groups)
    # A depthwise convolution is no convolution to XLA.
    assert ours == (set() if groups == 4 else {1})
    assert not group_counts(lax.conv_general_dilated, in_axes, groups) <= {1}


@pytest.mark.parametrize(
    "outer,inner",
    [
        ((0, 0), (0, 0)),
        ((0, 0), (None, 0)),
        ((None, 0), (0, 0)),
        ((None, 0), (0, None)),
        ((None, 0), (None, 0)),
    ],
)
def test_lanes_of_lanes(outer, inner):
    x, w = normal(0, 2, 2, 2, 5, 5, 3), normal(1, 2, 2, 3, 3, 3, 4)
    args = []
    for array, over, under in zip((x, w), outer, inner, strict=True):
        array = array if under == 0 else array[:, 0]
        args.append(array if over == 0 else array[0])

    def nested(conv):
        f = value_and_gradients(conv, (1, 1), "SAME", None, None, NHWC)
        return jax.vmap(jax.vmap(f, inner), outer)

    assert_close(*both(nested, *args))


def descend(conv, x, w):
    """Three gradient steps on the kernel, rematerialised, in a scan."""

    @jax.checkpoint
    def loss(w):
        y = conv(x, w, (1, 1), "SAME", None, None, NHWC)
        return jnp.sum(jnp.tanh(y))

    def body(w, _):
        value, gradient = jax.value_and_grad(loss)(w)
        return w - 0.01 * gradient, value

    return lax.scan(body, w, None, length=3)


def test_in_scan_and_checkpoint():
    args = lane_arguments((0, 0))
    ours, stock = both(lambda conv: jax.vmap(functools.partial(descend, conv)), *args)
    assert_close(ours, stock, atol=1e-4)


def test_in_fori_loop():
    x, w = lane_arguments((None, None))

    def run(conv):
        def body(_, w):
            y = conv(x, w, (1, 1), "SAME", None, None, NHWC)
            return w + 0.01 * y[:1, :1, :1]

        return functools.partial(lax.fori_loop, 0, 3, body)

    assert_close(*both(run, w))


def test_in_threads():
    args = lane_arguments((0, 0))

    def run(_):
        f = value_and_gradients(conv_general_dilated, (1, 1), "SAME", None, None, NHWC)
        return jax.jit(jax.vmap(f))(*args)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first, second = pool.map(run, range(2))
    jax.tree.map(np.testing.assert_array_equal, first, second)
    assert_close(first, run(None))


def test_second_derivatives():
    x, w = lane_arguments((None, None))

    def second(conv):
        def loss(x, w):
            y = conv(x, w, (2, 2), "SAME", None, None, NHWC)
            return jnp.sum(jnp.sin(y))

        def size(x, w):
            return sum(jnp.sum(g**2) for g in jax.grad(loss, (0, 1))(x, w))

        return jax.grad(size, (0, 1))

    assert_close(*both(second, x, w), atol=1e-3)


OTHERS = {
    "batch groups": ((2, 6, 6, 4), (3, 3, 4, 4), {"batch_group_count": 2}),
    "3-D": (
        (2, 4, 4, 4, 3),
        (2, 2, 2, 3, 2),
        {
            "dimension_numbers": ("NDHWC", "DHWIO", "NDHWC"),
            "window_strides": (1, 1, 1),
        },
    ),
    "large depthwise kernel": (
        (2, 6, 6, 4),
        (5, 11, 1, 4),
        {"feature_group_count": 4},
    ),
    "empty batch": ((0, 6, 6, 4), (3, 3, 4, 4), {}),
    "empty output": ((2, 2, 2, 4), (3, 3, 4, 4), {"padding": "VALID"}),
}


@pytest.mark.parametrize("x,w,options", list(OTHERS.values()), ids=list(OTHERS))
def test_others_are_stock(x, w, options):
    defaults = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": NHWC}
    options = defaults | options
    arrays = normal(0, *x), normal(1, *w)
    ours, stock = both(lambda conv: value_and_gradients(conv, **options), *arrays)
    assert_close(ours, stock)


def test_preferred_element_type():
    x = normal(0, 2, 6, 6, 3, dtype=jnp.bfloat16)
    w = normal(1, 3, 3, 3, 4, dtype=jnp.bfloat16)
    options = {"dimension_numbers": NHWC, "preferred_element_type": jnp.float32}
    ours = conv_general_dilated(x, w, (1, 1), "SAME", **options)
    assert_close(ours, lax.conv_general_dilated(x, w, (1, 1), "SAME", **options))


@pytest.mark.parametrize(
    "strides,padding,channels",
    [
        ((1,), "SAME", 3),
        ((1, 1), "ROUND", 3),
        ((1, 1), [(0, 0)], 3),
        ((1, 1), "SAME", 2),
    ],
)
def test_wrong_arguments_raise_as_stock(strides, padding, channels):
    x, w = normal(0, 2, 6, 6, 3), normal(1, 3, 3, channels, 4)
    raised = []
    for convolve in (conv_general_dilated, lax.conv_general_dilated):
        with pytest.raises(Exception) as error:
            convolve(x, w, strides, padding, dimension_numbers=NHWC)
        raised.append((error.type, str(error.value)))
    assert raised[0] == raised[1]


@pytest.mark.parametrize("name", conv.LOWERINGS)
def test_every_form_equals_stock_in_lanes(name):
    x, w = normal(0, LANES, 2, 7, 8, 3), normal(1, LANES, 3, 3, 3, 4)
    plain = (2, 1), ((1, 0), (2, 1)), (1, 2), (2, 1), NHWC
    depthwise = (1, 1), "SAME", None, None, NHWC, 3

    def compute(convolve):
        def of_all(x, w):
            deep = w[..., :1, :].reshape(3, 3, 1, -1)[..., :3]
            first = value_and_gradients(convolve, *plain)(x, w)
            return first, value_and_gradients(convolve, *depthwise)(x, deep)

        return jax.vmap(of_all)

    stock = jax.jit(compute(lax.conv_general_dilated))(x, w)
    with conv.lowering(name):
        assert_close(jax.jit(compute(conv_general_dilated))(x, w), stock, atol=1e-4)


def test_an_unknown_form_is_refused():
    with (
        pytest.raises(ValueError, match="lowering is 'cudnn'; it must be one of"),
        conv.lowering("cudnn"),
    ):
        pass


POOLS = {
    "images": lambda y: y.max((1, 2)),
    "columns": lambda y: y.max(1),
    "windows": lambda y: max_pool(y, (1, 2, 2, 1), (1, 2, 2, 1), ((0, 0),) * 4),
}


@pytest.mark.parametrize("batch", [1, 6, 7])
@pytest.mark.parametrize("channels", [1, 4], ids=["one channel", "depthwise"])
@pytest.mark.parametrize("pool", list(POOLS.values()), ids=list(POOLS))
def test_the_largest_keeps_its_gradient(pool, channels, batch):
    # XLA may compute anew what it fuses, each time rounded otherwise.
    x, w = normal(0, batch, 28, 28, channels), normal(1, 3, 3, 1, 8)

    def gradient(convolve):
        def loss(w):
            y = convolve(x, w, (1, 1), "SAME", None, None, NHWC, channels)
            return jnp.sum(pool(jax.nn.relu(y * 0.3 + 0.1)) ** 2)

        return jax.grad(loss)

    np.testing.assert_allclose(*both(gradient, w), rtol=2e-4)
    jaxpr = jax.make_jaxpr(gradient(conv_general_dilated))(w)
    assert "scan" in str(jaxpr)  # What a loop gives is computed once.
