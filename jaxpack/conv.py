"""A convolution that stays fast inside loops and under `jax.vmap` on a CPU.

On a CPU, XLA's fast convolutions need the orders NHWC and HWIO and a single group.
Inside a loop JAX's own gradients of a convolution have neither order, and kernels
that differ between lanes become one grouped convolution. Both then run ten to fifty
times slower. Here the gradients are written as convolutions in those orders, and
lanes are folded into a dimension or looped over, never grouped.

With T(x, w, y) = <conv(x, w), y>, which is linear in each of its arguments, the
convolution and its two gradients are the three partial derivatives of T. The
gradients of each of the three are the other two, so they are differentiable any
number of times in reverse.

On all other platforms the convolution and its gradients are XLA's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

_NHWC = ("NHWC", "HWIO", "NHWC")
_ONES = (1, 1)
# Beyond this many terms a sum of shifted images takes too long to compile.
_MAX_SHIFTS = 25

_Size = tuple[int, ...]
_Pads = tuple[tuple[int, int], ...]


class _Geometry(NamedTuple):
    """What fixes a 2-D convolution but for batch and channels; pairs are `(H, W)`."""

    image: _Size
    kernel: _Size
    strides: _Size
    padding: _Pads
    dilation: _Size
    precision: Any

    @property
    def output(self) -> _Size:
        return tuple(
            (n + lo + hi - d * (k - 1) - 1) // s + 1
            for n, k, s, (lo, hi), d in zip(*self[:5], strict=True)
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
    Two-dimensional convolutions in NHWC/HWIO/NHWC order, of one floating dtype and
    one group and without `lhs_dilation`, are computed as this module describes, at
    any stride, padding and `rhs_dilation`; these have no forward-mode derivative.
    All others are handed to `jax.lax.conv_general_dilated` unchanged.

    Args:
      lhs: `[B, H, W, I]` images.
      rhs: `[h, w, I, O]` kernels.
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
    convolve = functools.partial(
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
    result = jax.eval_shape(convolve, lhs, rhs)
    numbers = lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    if not (
        lhs.ndim == 4
        and numbers == lax.conv_dimension_numbers(lhs.shape, rhs.shape, _NHWC)
        and feature_group_count == batch_group_count == 1
        and tuple(lhs_dilation or _ONES) == _ONES
        and lhs.dtype == rhs.dtype == result.dtype
        and jnp.issubdtype(lhs.dtype, jnp.floating)
        and 0 not in lhs.shape + rhs.shape + result.shape
    ):
        return convolve(lhs, rhs)
    geometry = _geometry(
        lhs.shape, rhs.shape, window_strides, padding, rhs_dilation, precision
    )
    if geometry.kernel == _ONES and geometry.padding == ((0, 0), (0, 0)):
        # A matrix product has good gradients and batching of its own everywhere.
        lhs = lhs[:, :: geometry.strides[0], :: geometry.strides[1]]
        return jnp.einsum("bhwi,io->bhwo", lhs, rhs[0, 0], precision=precision)
    return _partial("y", geometry, lhs, rhs)


def _geometry(lhs_shape, rhs_shape, strides, padding, dilation, precision) -> _Geometry:
    image, kernel = lhs_shape[1:3], rhs_shape[:2]
    dilation = tuple(dilation or _ONES)
    if isinstance(padding, str):
        spans = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
        padding = lax.padtype_to_pads(image, spans, strides, padding)
    pads = tuple((int(low), int(high)) for low, high in padding)
    return _Geometry(image, kernel, tuple(strides), pads, dilation, precision)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _partial(by: str, geometry: _Geometry, a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns dT/d`by`, a function of the other two of `x, w, y` in this order."""
    return lax.platform_dependent(
        a,
        b,
        cpu=functools.partial(_ON_CPU[by], geometry),
        default=functools.partial(_NATIVE[by], geometry),
    )


def _partial_fwd(by, geometry, a, b):
    return _partial(by, geometry, a, b), (a, b)


def _partial_bwd(by, geometry, residuals, cotangent):
    names = [name for name in "xwy" if name != by]
    values = {**dict(zip(names, residuals, strict=True)), by: cotangent}

    def gradient(name: str) -> jax.Array:
        others = [values[other] for other in "xwy" if other != name]
        return _partial(name, geometry, *others)

    return tuple(gradient(name) for name in names)


_partial.defvjp(_partial_fwd, _partial_bwd)


def _output(geometry: _Geometry, x: jax.Array, w: jax.Array) -> jax.Array:
    g = geometry
    if x.shape[3] == 1 and g.kernel[0] * g.kernel[1] <= _MAX_SHIFTS:
        return _shifted_sum(g, x, w)
    return _convolve(g.strides, g.padding, _ONES, g.dilation, g.precision)(x, w)


def _shifted_sum(geometry: _Geometry, x: jax.Array, w: jax.Array) -> jax.Array:
    """Convolves one-channel images as a sum of shifted images times scalars.

    Several times faster than a convolution of one channel, and fused with what
    follows it.
    """
    (h, v), (sy, sx), (dy, dx) = geometry.output, geometry.strides, geometry.dilation
    wide = jnp.promote_types(x.dtype, jnp.float32)
    pads = [(0, 0, 0), *((*pad, 0) for pad in geometry.padding), (0, 0, 0)]
    padded = lax.pad(x.astype(wide), jnp.zeros((), wide), pads)

    def shifted(i: int, j: int) -> jax.Array:
        top, left = i * dy, j * dx
        bottom, right = top + (h - 1) * sy + 1, left + (v - 1) * sx + 1
        return padded[:, top:bottom:sy, left:right:sx]

    terms = (
        shifted(i, j) * w[i : i + 1, j : j + 1].astype(wide)
        for i in range(geometry.kernel[0])
        for j in range(geometry.kernel[1])
    )
    return functools.reduce(jnp.add, terms).astype(x.dtype)


def _image_gradient(geometry: _Geometry, w: jax.Array, y: jax.Array) -> jax.Array:
    """Convolves `y`, spread out by the strides, with the kernels turned round."""
    g = geometry
    pads = []
    for n, k, s, (lo, _), d, m in zip(*g[:5], g.output, strict=True):
        low = d * (k - 1) - lo
        pads.append((low, n + d * (k - 1) - (m - 1) * s - 1 - low))
    convolve = _convolve(_ONES, tuple(pads), g.strides, g.dilation, g.precision)
    return convolve(y, jnp.swapaxes(w[::-1, ::-1], 2, 3))


def _kernel_gradient(geometry: _Geometry, x: jax.Array, y: jax.Array) -> jax.Array:
    """Convolves the images with `y` as kernels; examples are the channels."""
    g = geometry
    pads = tuple(
        (lo, d * (k - 1) + (m - 1) * s + 1 - n - lo)
        for n, k, s, (lo, _), d, m in zip(*g[:5], g.output, strict=True)
    )
    convolve = _convolve(g.dilation, pads, _ONES, g.strides, g.precision)
    gradient = convolve(jnp.transpose(x, (3, 1, 2, 0)), jnp.transpose(y, (1, 2, 0, 3)))
    return jnp.transpose(gradient, (1, 2, 0, 3))


@functools.cache
def _convolve(
    strides: _Size, padding: _Pads, lhs_dilation: _Size, rhs_dilation: _Size, precision
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Returns a convolution in canonical order that lanes never turn into groups."""

    @jax.custom_batching.custom_vmap
    def convolve(lhs, rhs):
        return lax.conv_general_dilated(
            lhs,
            rhs,
            strides,
            padding,
            lhs_dilation,
            rhs_dilation,
            _NHWC,
            precision=precision,
        )

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
        x, w, g.strides, g.padding, _ONES, g.dilation, _NHWC, precision=g.precision
    )


def _native_image_gradient(geometry, w, y):
    x = jax.ShapeDtypeStruct((y.shape[0], *geometry.image, w.shape[2]), w.dtype)
    (gradient,) = jax.linear_transpose(lambda x: _native(geometry, x, w), x)(y)
    return gradient


def _native_kernel_gradient(geometry, x, y):
    w = jax.ShapeDtypeStruct((*geometry.kernel, x.shape[3], y.shape[3]), x.dtype)
    (gradient,) = jax.linear_transpose(lambda w: _native(geometry, x, w), w)(y)
    return gradient


_ON_CPU = {"x": _image_gradient, "w": _kernel_gradient, "y": _output}
_NATIVE = {"x": _native_image_gradient, "w": _native_kernel_gradient, "y": _native}
