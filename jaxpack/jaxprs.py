"""Traced computations as lists of equations: to compare, to search, to name.

A computation is flattened: jitted sub-functions are inlined, variables are numbered
in order, and arithmetic on known scalars is carried out. Two computations with equal
lists compute the same.
"""

from __future__ import annotations

import functools
import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_ADDRESS = re.compile(r"( at)? 0x[0-9a-f]+")
_INLINED = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}
# Arithmetic on scalars, as a model or a schedule does it with its hparams.
_FOLDED = {
    "abs": np.abs,
    "add": np.add,
    "add_any": np.add,
    "and": np.bitwise_and,
    "ceil": np.ceil,
    "clamp": lambda low, x, high: np.clip(x, low, high),
    "convert_element_type": np.copy,
    "copy": np.copy,
    "cos": np.cos,
    "eq": np.equal,
    "exp": np.exp,
    "floor": np.floor,
    "ge": np.greater_equal,
    "gt": np.greater,
    "is_finite": np.isfinite,
    "le": np.less_equal,
    "log": np.log,
    "lt": np.less,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "ne": np.not_equal,
    "neg": np.negative,
    "not": np.invert,
    "or": np.bitwise_or,
    "pow": np.power,
    "rem": np.fmod,
    "select_n": lambda which, *cases: cases[int(which)],
    "sign": np.sign,
    "sin": np.sin,
    "sqrt": np.sqrt,
    "square": np.square,
    "sub": np.subtract,
    "tanh": np.tanh,
}


class Known(NamedTuple):
    """An operand whose scalar value is known."""

    value: Any


class Equation(NamedTuple):
    """One equation of a flattened computation.

    Attributes:
      primitive: Name of the operation.
      params: Its parameters, as text.
      operands: What it reads: a variable's number, or a `Known` scalar.
      results: The numbers of the variables it defines.
    """

    primitive: str
    params: str
    operands: tuple[int | Known, ...]
    results: tuple[int, ...]


class Flat(NamedTuple):
    """A flattened computation.

    Attributes:
      inputs: The inputs' types, as text.
      equations: What is computed, in order.
      outputs: What is returned.
      consts: Hash and type of each array the computation closes over.
    """

    inputs: tuple[str, ...]
    equations: tuple[Equation, ...]
    outputs: tuple[int | Known, ...]
    consts: tuple[str, ...]


def flatten(closed: Any, known: Mapping[int, Any] | None = None) -> Flat:
    """Flattens a closed jaxpr.

    Args:
      closed: What `jax.make_jaxpr` returns.
      known: Values of scalar inputs that are to be treated as known, by position.

    Examples:
      >>> step = jax.make_jaxpr(lambda lr, x: x - 2.0 * lr * x)
      >>> flat = flatten(step(0.5, np.zeros(3)), {0: 0.5})
      >>> [equation.primitive for equation in flat.equations]
      ['mul', 'sub']
    """
    known = known or {}
    equations: list[Equation] = []
    consts: list[str] = []
    count = 0

    def fresh() -> int:
        nonlocal count
        count += 1
        return count - 1

    def constant(value: Any) -> int | Known:
        if np.shape(value) == () and getattr(value.dtype, "kind", "") in set("bifu"):
            return Known(np.asarray(value)[()])
        consts.append(_digest(value))
        return fresh()

    def run(
        jaxpr: Any, values: Sequence[Any], operands: Sequence[int | Known]
    ) -> list[int | Known]:
        env: dict[Any, int | Known] = {}
        env.update(zip(jaxpr.constvars, map(constant, values), strict=True))
        env.update(zip(jaxpr.invars, operands, strict=True))

        def read(atom: Any) -> int | Known:
            if not hasattr(atom, "val"):
                return env[atom]
            return constant(np.asarray(atom.val, atom.aval.dtype))  # A scalar.

        for eqn in jaxpr.eqns:
            reads = tuple(map(read, eqn.invars))
            inner = eqn.params.get(_INLINED.get(eqn.primitive.name, ""))
            if inner is not None:
                results = run(inner.jaxpr, inner.consts, reads)
            elif (folded := _fold(eqn, reads)) is not None:
                results = [folded]
            else:
                results = [fresh() for _ in eqn.outvars]
                equations.append(
                    Equation(eqn.primitive.name, _text(eqn), reads, tuple(results))
                )
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    inputs = [
        Known(np.asarray(known[i], var.aval.dtype)[()]) if i in known else fresh()
        for i, var in enumerate(closed.jaxpr.invars)
    ]
    types = tuple(_type(var.aval) for var in closed.jaxpr.invars)
    outputs = run(closed.jaxpr, closed.consts, inputs)
    return Flat(types, tuple(equations), tuple(outputs), tuple(consts))


def same(a: Flat, b: Flat, rtol: float = 1e-6) -> bool:
    """Whether two computations are equal, known scalars up to `rtol`.

    Inputs that are known in one and absent in the other do not count.

    Examples:
      >>> f = jax.make_jaxpr(lambda lr, x: lr * x)
      >>> g = jax.make_jaxpr(lambda x: 0.5 * x)
      >>> x = np.zeros(3)
      >>> same(flatten(f(0.5, x), {0: 0.5}), flatten(g(x)))
      True
      >>> same(flatten(f(0.5, x), {0: 0.4}), flatten(g(x)))
      False
    """

    def equal(x: int | Known, y: int | Known) -> bool:
        if isinstance(x, Known) and isinstance(y, Known):
            return bool(np.isclose(x.value, y.value, rtol, 0, equal_nan=True))
        return x == y

    def all_equal(xs: Sequence[int | Known], ys: Sequence[int | Known]) -> bool:
        return len(xs) == len(ys) and all(map(equal, xs, ys))

    return (
        a.consts == b.consts
        and len(a.equations) == len(b.equations)
        and all(
            (x.primitive, x.params, x.results) == (y.primitive, y.params, y.results)
            and all_equal(x.operands, y.operands)
            for x, y in zip(a.equations, b.equations, strict=True)
        )
        and all_equal(a.outputs, b.outputs)
    )


def used(flat: Flat) -> set[int]:
    """Numbers of the inputs and variables that the outputs depend on.

    Examples:
      >>> used(flatten(jax.make_jaxpr(lambda x, y: x + 1.0)(1.0, 2.0)))
      {0, 2}
    """
    needed = {output for output in flat.outputs if isinstance(output, int)}
    for equation in reversed(flat.equations):
        if needed.intersection(equation.results):
            needed.update(o for o in equation.operands if isinstance(o, int))
    return needed


def flops(closed: Any) -> float:
    """Multiplications and additions in the matrix products and convolutions.

    Loops count once, and what is not one of the two does not count: a lower bound.

    Examples:
      >>> flops(jax.make_jaxpr(lambda x, w: x @ w)(np.ones((2, 3)), np.ones((3, 5))))
      60.0
    """
    total = 0.0
    for eqn in closed.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            shape = eqn.invars[0].aval.shape
            depth = math.prod(shape[axis] for axis in contracted)
            total += 2.0 * depth * eqn.outvars[0].aval.size
        elif eqn.primitive.name == "conv_general_dilated":
            kernel = eqn.invars[1].aval
            features = eqn.params["dimension_numbers"].rhs_spec[0]
            depth = kernel.size / kernel.shape[features]
            total += 2.0 * depth * eqn.outvars[0].aval.size
        for inner in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns")):
            total += flops(inner) if hasattr(inner, "eqns") else 0.0
    return total


def value_bytes(closed: Any) -> int:
    """Bytes of all values that are computed, as if every one were kept to the end.

    Loops count once, as do the values inside of functions that are called.

    Examples:
      >>> value_bytes(jax.make_jaxpr(lambda x, y: x + 2 * y)(*np.ones((2, 3))))
      24
    """
    total = 0
    for eqn in closed.eqns:
        for out in eqn.outvars:
            total += out.aval.size * _itemsize(out.aval.dtype)
        for inner in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns")):
            total += value_bytes(inner) if hasattr(inner, "eqns") else 0
    return total


def _itemsize(dtype: Any) -> int:
    """Bytes of an element; a random key's are those of threefry."""
    return 8 if jnp.issubdtype(dtype, jax.dtypes.prng_key) else dtype.itemsize


def fingerprint(flats: Sequence[Flat], *more: Any) -> str:
    """A hash of what is computed, and more, the same in every process."""
    return hashlib.sha256(repr((tuple(flats), more)).encode()).hexdigest()[:16]


def _fold(eqn: Any, operands: tuple[int | Known, ...]) -> Known | None:
    """The result of arithmetic on known scalars, or None if it is not that."""
    name = eqn.primitive.name
    values = [operand.value for operand in operands if isinstance(operand, Known)]
    if len(values) < len(operands):
        return None
    if len(eqn.outvars) != 1 or eqn.outvars[0].aval.shape != ():
        return None
    dtype = eqn.outvars[0].aval.dtype
    with np.errstate(all="ignore"):
        if name in _FOLDED:
            result = _FOLDED[name](*values)
        elif name == "div":
            result = np.divide(*values)  # Towards zero for integers, by the cast.
        elif name == "integer_pow":
            result = np.power(values[0], eqn.params["y"])
        else:
            return None
        return Known(np.asarray(result).astype(dtype)[()])


def _text(eqn: Any) -> str:
    shown = (f"{name}={_shown(eqn.params[name], str)}" for name in sorted(eqn.params))
    params = ", ".join(shown)
    # A callback's address is all that tells it from another one.
    if "callback" not in eqn.primitive.name:
        params = _ADDRESS.sub("", params)
    params += "".join(_hidden(eqn.params))
    return f"[{params}] -> {', '.join(_type(var.aval) for var in eqn.outvars)}"


def _shown(value: Any, leaf: Callable[[Any], str] = repr) -> str:
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_shown, value))})"
    return _shown_jaxpr(value) if hasattr(value, "eqns") else leaf(value)


@functools.lru_cache(maxsize=1000)  # One of a jitted function is met many times.
def _shown_jaxpr(jaxpr: Any) -> str:
    return str(jaxpr)


def _hidden(params: Any) -> Iterator[str]:
    """What the text of sub-jaxprs does not show: their constants and callbacks."""
    for value in params.values() if isinstance(params, Mapping) else params:
        if isinstance(value, tuple | list):
            yield from _hidden(value)
        for const in getattr(value, "consts", ()):
            yield _digest(const)
        for eqn in getattr(value, "eqns", ()):
            if "callback" in eqn.primitive.name:
                yield str(eqn.params["callback"])
            yield from _hidden(eqn.params)


def _digest(value: Any) -> str:
    """Type and hash of an array, or of the data of a random key."""
    if hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    array = np.asarray(value)
    digest = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
    return f"{array.dtype}{array.shape}{digest}"


def _type(aval: Any) -> str:
    if isinstance(aval, jax.core.ShapedArray):
        return f"{aval.dtype}{list(aval.shape)}"
    return str(aval)
