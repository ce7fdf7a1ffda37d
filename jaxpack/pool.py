"""Max-pooling with a fast gradient.

XLA's own gradient, select-and-scatter, is 4 to 40 times slower on a CPU than what is
done here: the place of each window's largest element is noted on the way forward, and
on the way back each place sends its cotangents to where they came from.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# Beyond this many elements in a window the sum over them takes too long to compile.
_MAX_WINDOW = 25

_Size = tuple[int, ...]


class _Geometry(NamedTuple):
    """What fixes a pooling: sizes along each axis, and the padded input's shape."""

    window: _Size
    strides: _Size
    shape: _Size


def max_pool(
    x: jax.Array,
    window: Sequence[int],
    strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
) -> jax.Array:
    """Returns the largest element of each window.

    Equal to `lax.reduce_window` with `lax.max`, and so is the gradient, which goes to
    the first of several largest elements. There is no forward-mode derivative for
    windows of up to 25 elements; larger ones are handed to `lax.reduce_window`.

    Args:
      x: `[...]`, floating.
      window: Size of a window along each axis of `x`.
      strides: Distance of one window from the next along each axis.
      padding: `(low, high)` for each axis, filled with minus infinity.

    Returns:
      An array of the rank of `x`, each axis as long as windows fit into it.

    Examples:
      >>> max_pool(jnp.arange(5.0), (2,), (2,), ((0, 0),))
      Array([1., 3.], dtype=float32)
    """
    spans = [n + low + high for n, (low, high) in zip(x.shape, padding, strict=True)]
    fits = all(k <= span for k, span in zip(window, spans, strict=True))
    if not fits or math.prod(window) > _MAX_WINDOW or x.size == 0:
        return lax.reduce_window(x, -jnp.inf, lax.max, window, strides, padding)
    lowest = jnp.array(-jnp.inf, x.dtype)
    padded = lax.pad(x, lowest, [(low, high, 0) for low, high in padding])
    return _max_pool(_Geometry(tuple(window), tuple(strides), padded.shape), padded)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _max_pool(geometry: _Geometry, x: jax.Array) -> jax.Array:
    return functools.reduce(jnp.maximum, _elements(geometry, x))


def _elements(geometry: _Geometry, x: jax.Array) -> list[jax.Array]:
    """The first elements of all windows, the second ones, and so on."""
    ends = [(n - k) // s * s + 1 for k, s, n in zip(*geometry, strict=True)]
    return [
        lax.slice(x, place, np.add(place, ends).tolist(), geometry.strides)
        for place in np.ndindex(geometry.window)
    ]


def _forward(geometry: _Geometry, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    # No element is compared with the largest, which XLA may have computed elsewhere,
    # and rounded otherwise: then none would be equal to it.
    first, *others = _elements(geometry, x)
    largest, chosen = first, jnp.zeros(first.shape, jnp.int8)
    for i, element in enumerate(others, 1):
        larger = element > largest
        largest = jnp.where(larger, element, largest)
        chosen = jnp.where(larger, jnp.int8(i), chosen)
    return _max_pool(geometry, x), chosen


def _backward(
    geometry: _Geometry, chosen: jax.Array, cotangent: jax.Array
) -> tuple[jax.Array]:
    zero = jnp.zeros((), cotangent.dtype)
    scattered = []
    for i, place in enumerate(np.ndindex(geometry.window)):
        spaces = [
            (offset, n - offset - s * (m - 1) - 1, s - 1)
            for offset, n, m, s in zip(
                place, geometry.shape, chosen.shape, geometry.strides, strict=True
            )
        ]
        part = jnp.where(chosen == i, cotangent, zero)
        scattered.append(lax.pad(part, zero, spaces))
    return (functools.reduce(jnp.add, scattered),)


_max_pool.defvjp(_forward, _backward)
