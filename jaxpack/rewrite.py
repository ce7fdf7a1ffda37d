"""Replaces operations of a function that was written without knowing of ours.

The function is traced, and in the resulting jaxpr each convolution becomes a call of
`jaxpack.conv`, each max-pooling one of `jaxpack.pool`, and random bits come from
`jaxpack.threefry`, also inside jitted functions, loops, branches and rematerialised
blocks. Every other equation stays as it was traced, with its effects, names and
options, so it does not matter in which library a model is written.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from jaxpack import threefry
from jaxpack.conv import conv_general_dilated
from jaxpack.pool import max_pool
from jaxpack.types import PyTree

# What runs its sub-jaxprs as they are. A custom_vjp is not among them: where it is
# differentiated its own two functions run instead, and ours must stay what they are.
_TRANSPARENT = {
    "call",
    "checkpoint",
    "closed_call",
    "cond",
    "core_call",
    "custom_jvp_call",
    "jit",
    "pjit",
    "remat",
    "remat2",
    "scan",
    "while",
}


def replace_operations(fun: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Returns a function that computes what `fun` does, with our operations.

    Convolutions are replaced, max-pooling, whose stock gradient would cost more than
    they do, and threefry's random bits and keys. Inside a `jax.custom_jvp` function
    they are replaced where its value is computed, and inside a `jax.custom_vjp`
    function not at all: derivatives are always by the user's own rules. The result
    has no forward-mode derivative if anything was replaced.

    Args:
      fun: A function of pytrees of arrays, which returns one. It may close over
        traced values. It is called once to trace it, and once more if nothing is to
        be replaced.

    Returns:
      A function to be called as `fun` is, by position.

    Examples:
      >>> def blur(x):
      ...     return jax.lax.conv(x, jnp.ones((1, 1, 3, 3)), (1, 1), "SAME")
      >>> replace_operations(blur)(jnp.ones((1, 1, 2, 2)))
      Array([[[[4., 4.],
               [4., 4.]]]], dtype=float32)
    """

    @functools.wraps(fun)
    def replaced(*args: PyTree) -> PyTree:
        # A function of its own: JAX would return the last trace of a known one, even
        # if what it closes over has changed.
        closed, out = jax.make_jaxpr(lambda *args: fun(*args), return_shape=True)(*args)
        jaxpr = _replace(closed.jaxpr, {})
        if jaxpr is closed.jaxpr:
            return fun(*args)
        results = jax.core.eval_jaxpr(jaxpr, closed.consts, *jax.tree.leaves(args))
        types, structure = jax.tree.flatten(out)
        results = [
            result
            if isinstance(result, jax.Array)
            else jnp.asarray(result, type_.dtype)
            for result, type_ in zip(results, types, strict=True)
        ]
        return jax.tree.unflatten(structure, results)

    return replaced


def _replace(jaxpr: Any, done: dict[Any, Any]) -> Any:
    """Returns the jaxpr with our operations, or itself if it needs none.

    `done` has what was replaced before: a function called twice stays one function.
    """
    if jaxpr not in done:
        # Of newer versions of JAX a jaxpr has its constants, and is its own `jaxpr`.
        inner = getattr(jaxpr, "jaxpr", jaxpr)
        if inner is not jaxpr:
            new = _replace(inner, done)
            done[jaxpr] = jaxpr if new is inner else ClosedJaxpr(new, jaxpr.consts)
        else:
            eqns = _map(lambda eqn: _replace_in(eqn, done), jaxpr.eqns)
            done[jaxpr] = jaxpr if eqns is jaxpr.eqns else jaxpr.replace(eqns=eqns)
    return done[jaxpr]


def _replace_in(eqn: JaxprEqn, done: dict[Any, Any]) -> JaxprEqn:
    name = eqn.primitive.name
    if name in _OURS:
        return _called(eqn, _OURS[name](eqn))
    if name not in _TRANSPARENT:
        return eqn

    def replace(param: Any) -> Any:
        if isinstance(param, Jaxpr | ClosedJaxpr):
            return _replace(param, done)
        return _map(replace, param) if type(param) is tuple else param

    values = tuple(eqn.params.values())
    new = _map(replace, values)
    if new is values:
        return eqn
    return eqn.replace(params=dict(zip(eqn.params, new, strict=True)))


def _map(function: Callable[[Any], Any], items: Any) -> Any:
    """Maps a list or tuple; returns the very same one if no item has changed."""
    new = [function(item) for item in items]
    same = all(a is b for a, b in zip(new, items, strict=True))
    return items if same else type(items)(new)


def _convolution(eqn: JaxprEqn) -> Callable[..., jax.Array] | None:
    """Our form of a convolution, or None where it does not serve."""
    params = dict(eqn.params)
    if params.pop("out_sharding", None) is not None:
        return None
    return functools.partial(_JITTED_CONVOLUTION, **params)


def _max_pool(eqn: JaxprEqn) -> Callable[..., jax.Array] | None:
    """Our form of a pooling, or None where it does not serve."""
    params = eqn.params
    if set(params["base_dilation"] + params["window_dilation"]) != {1}:
        return None
    (image,) = _operands(eqn)
    if not jnp.issubdtype(image.dtype, jnp.floating):
        return None
    return functools.partial(
        _JITTED_MAX_POOL,
        window=params["window_dimensions"],
        strides=params["window_strides"],
        padding=params["padding"],
    )


def _random_bits(eqn: JaxprEqn) -> Callable[..., jax.Array] | None:
    """Our form of a draw of random bits, or None where it does not serve."""
    shape = eqn.params["shape"]
    plain = _of_one_key(eqn) and threefry.counts_by_place()
    if not plain or eqn.params["bit_width"] != 32 or math.prod(shape) >= 2**32:
        return None
    return functools.partial(_JITTED_RANDOM_BITS, shape=shape)


def _fold_in(eqn: JaxprEqn) -> Callable[..., jax.Array] | None:
    """Our form of a new key, or None where it does not serve."""
    return _JITTED_FOLD_IN if _of_one_key(eqn) else None


def _of_one_key(eqn: JaxprEqn) -> bool:
    """Whether all operands are scalars, the first of them a threefry key."""
    key = _operands(eqn)[0].dtype
    threefries = jax.random.key(0, impl=threefry.IMPL).dtype
    return key == threefries and not any(x.ndim for x in _operands(eqn))


# Jitted to be traced only once for all equations of the same shapes and options.
_JITTED_CONVOLUTION = jax.jit(conv_general_dilated, static_argnums=tuple(range(2, 11)))
_JITTED_MAX_POOL = jax.jit(max_pool, static_argnums=(1, 2, 3))
_JITTED_RANDOM_BITS = jax.jit(threefry.random_bits, static_argnames="shape")
_JITTED_FOLD_IN = jax.jit(threefry.fold_in)
_OURS = {
    "conv_general_dilated": _convolution,
    "reduce_window_max": _max_pool,
    "random_bits": _random_bits,
    "random_fold_in": _fold_in,
}


def _called(eqn: JaxprEqn, function: Callable[..., jax.Array] | None) -> JaxprEqn:
    """Returns the equation as a call of a jitted function, if there is one."""
    if function is None:
        return eqn
    (call,) = jax.make_jaxpr(function)(*_operands(eqn)).eqns
    return eqn.replace(
        primitive=call.primitive, params=call.params, effects=call.effects
    )


def _operands(eqn: JaxprEqn) -> list[jax.ShapeDtypeStruct]:
    avals: list[Any] = [atom.aval for atom in eqn.invars]
    return [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
