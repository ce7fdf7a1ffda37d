"""A convolution that stays fast inside loops and under `jax.vmap` on a CPU.

On a CPU, XLA's fast convolutions need the orders NHWC and HWIO and a single group.
Inside a loop JAX's own gradients of a convolution have neither order, and kernels
that differ between lanes become one grouped convolution. Both then run ten to fifty
times slower. Here the gradients are written as convolutions in those orders, and
lanes are folded into a dimension or looped over, never grouped. So are groups, which
are lanes within one convolution. Depthwise convolutions are sums of shifted images.

With T(x, w, y) = <conv(x, w), y>, which is linear in each of its arguments, the
convolution and its two gradients are the three partial derivatives of T. The
gradients of each of the three are the other two, so they are differentiable any
number of times in reverse.

On all other platforms the convolution and its gradients are XLA's own. `lowering`
replaces either, so that forms can be compared on a platform, among them products of
matrices with the patches of the images, which lanes turn into batches of products.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_NHWC = ("NHWC", "HWIO", "NHWC")
# Kernels beyond this many elements are no sums of shifted images: those of one channel
# are slower so, and depthwise ones take too long to compile.
_MAX_SHIFTS = 25
_MAX_DEPTHWISE_SHIFTS = 49

_Size = tuple[int, ...]
_Pads = tuple[tuple[int, int], ...]


class _Geometry(NamedTuple):
    """What fixes a 2-D convolution but for batch and channels; pairs are `(H, W)`.

    `spread` is the dilation of the images, `dilation` that of the kernels. `groups`
    is 1, or the number of input channels of a depthwise convolution.
    """

    image: _Size
    kernel: _Size
    strides: _Size
    padding: _Pads
    spread: _Size
    dilation: _Size
    groups: int
    precision: Any

    @property
    def output(self) -> _Size:
        return tuple(
            (e * (n - 1) + lo + hi - d * (k - 1)) // s + 1
            for n, k, s, (lo, hi), e, d in zip(*self[:6], strict=True)
        )


def conv_general_dilated(
    lhs: jax.Array,
    rhs: jax.Array,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: Any = None,
    preferred_element_type: Any = None,
) -> jax.Array:
    """Convolves as `jax.lax.conv_general_dilated` does, fast in loops and packs too.

    A drop-in replacement, for instance for `nn.Conv(conv_general_dilated=...)`.
    Convolutions over one or two spatial dimensions and of one floating dtype are
    computed as this module describes, in any order of dimensions, at any stride,
    padding, dilation and number of feature groups; these have no forward-mode
    derivative. All others, among them depthwise ones of very large kernels, are
    handed to `jax.lax.conv_general_dilated` unchanged.

    Args:
      lhs: `[B, H, W, I]` images, in the order that `dimension_numbers` says.
      rhs: `[h, w, I / groups, O]` kernels, likewise.
      window_strides: A stride for each spatial dimension.
      padding: "SAME", "SAME_LOWER", "VALID" or a pair `(low, high)` for each.
      lhs_dilation: Dilations of the images, 1 by default.
      rhs_dilation: Dilations of the kernels, 1 by default.
      dimension_numbers: The order of dimensions; `None` is NCHW/OIHW/NCHW.
      feature_group_count: Groups of channels.
      batch_group_count: Groups of examples.
      precision: As for `jax.lax.conv_general_dilated`.
      preferred_element_type: Dtype of the result, that of `lhs` by default.

    Returns:
      `[B, H', W', O]`, equal to `jax.lax.conv_general_dilated` up to rounding.

    Raises:
      TypeError, ValueError: What `jax.lax.conv_general_dilated` raises.

    Examples:
      >>> images, kernels = jnp.ones((2, 5, 5, 3)), jnp.ones((3, 3, 3, 4))
      >>> numbers = ("NHWC", "HWIO", "NHWC")
      >>> conv_general_dilated(
      ...     images, kernels, (2, 2), "SAME", dimension_numbers=numbers
      ... ).shape
      (2, 3, 3, 4)
    """
    native = functools.partial(
        lax.conv_general_dilated,
        window_strides=window_strides,
        padding=padding,
        lhs_dilation=lhs_dilation,
        rhs_dilation=rhs_dilation,
        dimension_numbers=dimension_numbers,
        feature_group_count=feature_group_count,
        batch_group_count=batch_group_count,
        precision=precision,
        preferred_element_type=preferred_element_type,
    )
    result = jax.eval_shape(native, lhs, rhs)
    numbers = lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    kernel = tuple(rhs.shape[i] for i in numbers.rhs_spec[2:])
    depthwise = feature_group_count == lhs.shape[numbers.lhs_spec[1]] > 1
    if not (
        lhs.ndim in (3, 4)
        and batch_group_count == 1
        and lhs.dtype == rhs.dtype == result.dtype
        and jnp.issubdtype(lhs.dtype, jnp.floating)
        and 0 not in lhs.shape + rhs.shape + result.shape
        and (not depthwise or math.prod(kernel) <= _MAX_DEPTHWISE_SHIFTS)
    ):
        return native(lhs, rhs)
    geometry = _geometry(
        tuple(lhs.shape[i] for i in numbers.lhs_spec[2:]),
        kernel,
        tuple(window_strides),
        padding,
        tuple(lhs_dilation or (1,) * len(kernel)),
        tuple(rhs_dilation or (1,) * len(kernel)),
        feature_group_count if depthwise else 1,
        precision,
    )
    batch, features, *space = numbers.lhs_spec
    x = jnp.transpose(lhs, (batch, *space, features))
    outputs, inputs, *space = numbers.rhs_spec
    w = jnp.transpose(rhs, (*space, inputs, outputs))
    if len(space) == 1:
        x, w = x[:, None], w[None]
    y = _groups(geometry, feature_group_count, x, w)
    batch, features, *space = numbers.out_spec
    y = y.reshape(len(y), *y.shape[3 - len(space) :])
    return jnp.transpose(y, np.argsort((batch, *space, features)).tolist())


def _geometry(
    image, kernel, strides, padding, spread, dilation, groups, precision
) -> _Geometry:
    if isinstance(padding, str):
        spans = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
        padding = lax.padtype_to_pads(image, spans, strides, padding)
    pads = tuple((int(low), int(high)) for low, high in padding)
    if len(image) == 1:  # A line is an image of height 1.
        image, kernel, strides, spread, dilation = (
            (1, *size) for size in (image, kernel, strides, spread, dilation)
        )
        pads = ((0, 0), *pads)
    return _Geometry(image, kernel, strides, pads, spread, dilation, groups, precision)


def _groups(geometry: _Geometry, groups: int, x: jax.Array, w: jax.Array) -> jax.Array:
    """Convolves `[B, H, W, I]` with `[h, w, I / groups, O]`."""
    g = geometry
    convolve = functools.partial(_partial, "y", geometry)
    if (g.kernel, g.padding, g.spread) == ((1, 1), ((0, 0), (0, 0)), (1, 1)):
        # A matrix product has good gradients and batching of its own everywhere.
        x = x[:, :: g.strides[0], :: g.strides[1]]
        convolve = functools.partial(
            lambda x, w: jnp.einsum("bhwi,io->bhwo", x, w[0, 0], precision=g.precision)
        )
    elif g.groups > 1:
        return convolve(x, w)
    if groups == 1:
        return convolve(x, w)
    x, w = (a.reshape(*a.shape[:-1], groups, -1) for a in (x, w))
    y = jax.vmap(convolve, (3, 3), 3)(x, w)
    return y.reshape(*y.shape[:3], -1)


# Jitted to be traced only once for each geometry and shape.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _partial(by: str, geometry: _Geometry, a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns dT/d`by`, a function of the other two of `x, w, y` in this order."""
    return _derivative(by, geometry, a, b)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _derivative(by, geometry, a, b):
    if _chosen is not None:
        return LOWERINGS[_chosen][by](geometry, a, b)
    return lax.platform_dependent(
        a,
        b,
        cpu=functools.partial(_ON_CPU[by], geometry),
        default=functools.partial(_NATIVE[by], geometry),
    )


def _forward(by, geometry, a, b):
    return _partial(by, geometry, a, b), (a, b)


def _backward(by, geometry, residuals, cotangent):
    names = [name for name in "xwy" if name != by]
    values = {**dict(zip(names, residuals, strict=True)), by: cotangent}

    def gradient(name: str) -> jax.Array:
        others = [values[other] for other in "xwy" if other != name]
        return _partial(name, geometry, *others)

    return tuple(gradient(name) for name in names)


_derivative.defvjp(_forward, _backward)


def _output(geometry: _Geometry, x: jax.Array, w: jax.Array) -> jax.Array:
    g = geometry
    # One channel is several times faster so.
    if g.groups > 1 or (x.shape[3] == 1 and math.prod(g.kernel) <= _MAX_SHIFTS):
        return _by_parts(lambda x: _shifted_sum(g, x, w), x)
    return _convolve(g)(x, w)


def _turned(geometry: _Geometry) -> _Geometry:
    """That of the convolution of `y`, spread out by the strides, which gives `x`'s."""
    g = geometry
    pads = []
    for n, k, s, (lo, _), e, d, m in zip(*g[:6], g.output, strict=True):
        low = d * (k - 1) - lo
        pads.append((low, e * (n - 1) + d * (k - 1) - s * (m - 1) - low))
    return g._replace(
        image=g.output, strides=g.spread, padding=tuple(pads), spread=g.strides
    )


def _image_gradient(geometry: _Geometry, w: jax.Array, y: jax.Array) -> jax.Array:
    """Convolves `y`, spread out by the strides, with the kernels turned round."""
    g, turned = geometry, _turned(geometry)
    w = w[::-1, ::-1]
    if g.groups > 1:
        each = _shifted_sum(turned, y, w)
        return each.reshape(*each.shape[:3], g.groups, -1).sum(-1)
    return _convolve(turned)(y, jnp.swapaxes(w, 2, 3))


def _kernel_gradient(geometry: _Geometry, x: jax.Array, y: jax.Array) -> jax.Array:
    """Convolves the images with `y` as kernels; examples are the channels."""
    g = geometry
    if g.groups > 1:
        return _shifted_products(g, x, y)
    pads = tuple(
        (lo, d * (k - 1) + s * (m - 1) - e * (n - 1) - lo)
        for n, k, s, (lo, _), e, d, m in zip(*g[:6], g.output, strict=True)
    )
    turned = g._replace(
        kernel=g.output, strides=g.dilation, padding=pads, dilation=g.strides
    )
    gradient = _convolve(turned)(
        jnp.transpose(x, (3, 1, 2, 0)), jnp.transpose(y, (1, 2, 0, 3))
    )
    return jnp.transpose(gradient, (1, 2, 0, 3))


def _shifted(geometry: _Geometry, x: jax.Array) -> Iterator[jax.Array]:
    """Yields what each element of the kernel meets, row by row: `[B, H', W', I]`."""
    g = geometry
    spaces = ((lo, hi, e - 1) for (lo, hi), e in zip(g.padding, g.spread, strict=True))
    zero = jnp.zeros((), x.dtype)
    padded = lax.pad(x, zero, [(0, 0, 0), *spaces, (0, 0, 0)])
    last = [s * (m - 1) + 1 for s, m in zip(g.strides, g.output, strict=True)]
    for i, j in np.ndindex(g.kernel):
        top, left = i * g.dilation[0], j * g.dilation[1]
        rows = slice(top, top + last[0], g.strides[0])
        yield padded[:, rows, left : left + last[1] : g.strides[1]]


def _shifted_sum(geometry: _Geometry, x: jax.Array, w: jax.Array) -> jax.Array:
    """Convolves each channel, or the one there is, as a sum of shifted images."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    weights = w.astype(wide).reshape(-1, 1, 1, 1, w.shape[3])
    x = _repeated(x, w.shape[3])
    terms = (
        image * weight
        for image, weight in zip(
            _shifted(geometry, x.astype(wide)), weights, strict=True
        )
    )
    return functools.reduce(jnp.add, terms).astype(x.dtype)


def _by_parts(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Applies a function to the halves, thirds, ... of a batch, in a loop.

    XLA fuses sums of shifted images with whatever reads them, and computes them again
    in each place, where they may be rounded otherwise: the largest of some would then
    be equal to none of them, and its gradient be lost. What a loop gives is computed
    once, which is faster, too.
    """
    batch = x if len(x) > 1 else jnp.concatenate([x, x])
    parts = next(n for n in range(2, len(batch) + 1) if len(batch) % n == 0)
    y = lax.map(function, batch.reshape(parts, -1, *x.shape[1:]))
    return y.reshape(-1, *y.shape[2:])[: len(x)]


def _shifted_products(geometry: _Geometry, x: jax.Array, y: jax.Array) -> jax.Array:
    """Multiplies each channel of `y` with each shifted image and sums."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    x = _repeated(x, y.shape[3]).astype(wide)
    sums = [jnp.sum(image * y, (0, 1, 2)) for image in _shifted(geometry, x)]
    return jnp.stack(sums).reshape(*geometry.kernel, 1, -1).astype(y.dtype)


def _repeated(x: jax.Array, channels: int) -> jax.Array:
    """Repeats each channel next to itself, unless there is only one."""
    return (
        x if x.shape[3] in (1, channels) else jnp.repeat(x, channels // x.shape[3], 3)
    )


@functools.cache
def _convolve(geometry: _Geometry) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Returns a convolution in canonical order that lanes never turn into groups."""

    @jax.custom_batching.custom_vmap
    def convolve(lhs, rhs):
        return _native(geometry, lhs, rhs)

    @convolve.def_vmap
    def _(axis_size, in_batched, lhs, rhs):
        if all(in_batched):
            return lax.map(lambda pair: convolve(*pair), (lhs, rhs)), True
        if in_batched[0]:
            folded = convolve(lhs.reshape(-1, *lhs.shape[2:]), rhs)
            return folded.reshape(axis_size, -1, *folded.shape[1:]), True
        folded = convolve(lhs, jnp.moveaxis(rhs, 0, 3).reshape(*rhs.shape[1:4], -1))
        unfolded = folded.reshape(*folded.shape[:3], axis_size, -1)
        return jnp.moveaxis(unfolded, 3, 0), True

    return convolve


def _native(geometry: _Geometry, x: jax.Array, w: jax.Array) -> jax.Array:
    g = geometry
    return lax.conv_general_dilated(
        x,
        w,
        g.strides,
        g.padding,
        g.spread,
        g.dilation,
        _NHWC,
        feature_group_count=g.groups,
        precision=g.precision,
    )


def _native_image_gradient(geometry, w, y):
    channels = w.shape[2] * geometry.groups
    x = jax.ShapeDtypeStruct((y.shape[0], *geometry.image, channels), w.dtype)
    (gradient,) = jax.linear_transpose(lambda x: _native(geometry, x, w), x)(y)
    return gradient


def _native_kernel_gradient(geometry, x, y):
    channels = x.shape[3] // geometry.groups
    w = jax.ShapeDtypeStruct((*geometry.kernel, channels, y.shape[3]), x.dtype)
    (gradient,) = jax.linear_transpose(lambda w: _native(geometry, x, w), w)(y)
    return gradient


def _patches(geometry: _Geometry, x: jax.Array) -> jax.Array:
    """What each place of the output sees: `[B, H', W', h * w, I]`."""
    return jnp.stack(list(_shifted(geometry, x)), 3)


def _patches_output(geometry, x, w):
    if geometry.groups > 1:
        return _output(geometry, x, w)
    w = w.reshape(-1, *w.shape[2:])
    patches = _patches(geometry, x)
    return jnp.einsum("bhwki,kio->bhwo", patches, w, precision=geometry.precision)


def _patches_image_gradient(geometry, w, y):
    if geometry.groups > 1:
        return _image_gradient(geometry, w, y)
    w = jnp.swapaxes(w[::-1, ::-1], 2, 3)
    return _patches_output(_turned(geometry), y, w)


def _patches_kernel_gradient(geometry, x, y):
    if geometry.groups > 1:
        return _kernel_gradient(geometry, x, y)
    patches = _patches(geometry, x)
    w = jnp.einsum("bhwki,bhwo->kio", patches, y, precision=geometry.precision)
    return w.reshape(*geometry.kernel, *w.shape[1:])


_ON_CPU = {"x": _image_gradient, "w": _kernel_gradient, "y": _output}
_NATIVE = {"x": _native_image_gradient, "w": _native_kernel_gradient, "y": _native}
_PATCHES = {
    "x": _patches_image_gradient,
    "w": _patches_kernel_gradient,
    "y": _patches_output,
}
LOWERINGS = {"native": _NATIVE, "looped": _ON_CPU, "patches": _PATCHES}
"""The forms of a convolution: XLA's own, this module's for CPUs, matrix products."""
_chosen: str | None = None


@contextlib.contextmanager
def lowering(name: str) -> Generator[None]:
    """Has all convolutions of the process traced in one form, to compare them.

    Everything traced is forgotten before and after.

    Args:
      name: One of `LOWERINGS`.

    Examples:
      >>> with lowering("patches"):
      ...     "conv" in str(jax.make_jaxpr(conv_general_dilated, static_argnums=(2, 3))(
      ...         jnp.ones((1, 1, 5, 5)), jnp.ones((1, 1, 3, 3)), (1, 1), "SAME"
      ...     ))
      False
    """
    global _chosen
    if name not in LOWERINGS:
        raise ValueError(f"lowering is {name!r}; it must be one of {[*LOWERINGS]}")
    before, _chosen = _chosen, name
    jax.clear_caches()
    try:
        yield
    finally:
        _chosen = before
        jax.clear_caches()
