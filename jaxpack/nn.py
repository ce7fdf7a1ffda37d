"""What lets one traced model serve lanes whose hyper-parameters differ."""

from __future__ import annotations

import contextlib
import contextvars
import difflib
import functools
import inspect
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen
from jax import lax

from jaxpack.types import PyTree, TracedChoice


def switch(value: Any, branches: Mapping[Any, Any]) -> Any:
    """Picks the branch that an hparam names, for every lane its own.

    Where `value` is plain this is a look-up. Where it is a lane's choice in a traced
    program, the branches of all its options are computed and the lane's is selected.
    A branch that was not selected does no harm: its infinities and NaNs reach
    neither the result nor the gradient with respect to the arguments.

    Args:
      value: The hparam: a string, or any other key of `branches`.
      branches: For each name a function, or for each name a number, an array or a
        pytree of arrays. In a traced program their results must have one structure
        and shape.

    Returns:
      The branch; in a traced program a function that computes the lane's branch, or
      the lane's value.

    Raises:
      ValueError: If `value` or one of its options has no branch, or some branches
        are functions and some are not.
      TypeError: If `value` is a traced number.

    Examples:
      >>> switch("relu", {"relu": max, "tanh": min})
      <built-in function max>
      >>> switch("rleu", {"relu": max, "tanh": min})
      Traceback (most recent call last):
      ValueError: no branch 'rleu'; did you mean 'relu'?
    """
    if not isinstance(value, TracedChoice):
        return pick(value, branches)
    options = [pick(option, branches) for option in value.options]
    if len({callable(option) for option in options}) > 1:
        raise ValueError(
            f"the branches of switch on {value.name} must be all functions or all "
            f"values; they are {dict(zip(value.options, options, strict=True))}"
        )
    if callable(options[0]):
        return functools.partial(_call_selected, value.index, options)
    return select(value.index, options)


def pick(value: Any, branches: Mapping[Any, Any]) -> Any:
    """Returns the branch that a plain `value` names.

    Raises:
      ValueError: If there is none.
      TypeError: If `value` is traced.

    Examples:
      >>> pick(True, {True: "yes", False: "no"})
      'yes'
    """
    if isinstance(value, jax.Array):
        raise TypeError(
            "switch cannot look up a traced number; it takes an hparam that is a "
            "choice between strings, or static"
        )
    if value not in branches:
        names = [name for name in branches if isinstance(name, str)]
        near = difflib.get_close_matches(str(value), names, 1)
        hint = (
            f"did you mean {near[0]!r}?"
            if near
            else f"there are {', '.join(map(repr, branches))}"
        )
        raise ValueError(f"no branch {value!r}; {hint}")
    return branches[value]


def select(index: jax.Array, options: list[PyTree]) -> PyTree:
    """Returns `options[index]` for a traced `index`.

    Args:
      index: `[]` int32.
      options: Pytrees of one structure, whose matching leaves have one shape.

    Returns:
      A pytree of that structure.
    """

    def leaf(first: Any, *rest: Any) -> Any:
        for place, other in enumerate(rest, 1):
            first = jnp.where(index == place, other, first)
        return first

    return jax.tree.map(leaf, *options)


def _call_selected(
    index: jax.Array, functions: list[Callable[..., PyTree]], *args: Any, **kwargs: Any
) -> PyTree:
    def call(place: int) -> PyTree:
        def shield(leaf: Any) -> Any:
            # Elsewhere the branch sees a harmless constant: a NaN in its derivative
            # there is dropped by this selection, one in its value by the next.
            if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.floating):
                return jnp.where(index == place, leaf, 0.5)
            return leaf

        shielded_args, shielded_kwargs = jax.tree.map(shield, (args, kwargs))
        return functions[place](*shielded_args, **shielded_kwargs)

    return select(index, [call(place) for place in range(len(functions))])


_any_rate = contextvars.ContextVar("any_rate", default=False)


@contextlib.contextmanager
def any_rate() -> Generator[None]:
    """Makes stock dropout compute in one way whatever its rate, while it lasts.

    A rate that is a number is dropped with as a traced one is, 0 and 1 included, so
    that computations can be compared equation by equation.
    """
    token = _any_rate.set(True)
    try:
        yield
    finally:
        _any_rate.reset(token)


def takes(rate: Any) -> bool:
    """Whether dropout at `rate` is computed by `drop` rather than the stock layer."""
    return isinstance(rate, jax.Array) or _any_rate.get()


@contextlib.contextmanager
def intercept(
    mask: jax.Array | None = None, *, evaluates: bool = False
) -> Generator[None]:
    """Makes stock linen layers take traced rates and padded batches, while it lasts.

    Applied or initialised inside this context,

    - `nn.Dropout` takes a traced rate: the mask and the values are those of the
      stock layer with the same rate as a number;
    - `nn.BatchNorm` leaves padding out of the batch statistics: they and the running
      averages equal those of the smaller batch. This needs the examples on the first
      axis; a layer whose input has another first axis, and one to which the model
      gave a mask, are left alone.

    Subclasses with a `__call__` of their own, and dropout inside other stock layers
    (attention), are left alone too.

    Args:
      mask: `[B]` bool, false on padding, or None where there is no padding.
      evaluates: Whether to warn of dropout that drops.
    """

    def interceptor(next_fun, args, kwargs, context):
        if context.method_name == "__call__":
            method = type(context.module).__call__
            if (flag := _FLAGS.get(method)) is not None:
                told = _told(context.module, flag, args, kwargs)
                if evaluates and told is False and flag[0] == "deterministic":
                    warnings.warn(
                        "Dropout is told deterministic=False in evaluation, too, so "
                        f"scores are noisy; {_remedy(flag[1])}",
                        stacklevel=2,
                    )
            if method is linen.Dropout.__call__:
                if takes(context.module.rate):
                    return _dropout(context.module, *args, **kwargs)
            elif method is linen.BatchNorm.__call__ and mask is not None:
                kwargs = _masked(mask, context.module, args, kwargs)
        return next_fun(*args, **kwargs)

    with linen.intercept_methods(interceptor):
        yield


_FLAGS = {
    linen.Dropout.__call__: ("deterministic", "deterministic=not train"),
    linen.BatchNorm.__call__: ("use_running_average", "use_running_average=not train"),
}
"""What tells a layer that it trains, and how to give it."""


def _remedy(argument: str) -> str:
    return (
        "write `def __call__(self, x, *, train)`, which jaxpack calls with train, and "
        f"give the layer {argument}"
    )


def _told(
    module: linen.Module,
    flag: tuple[str, str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Returns a layer's flag; raises if it is not told whether it trains."""
    name, argument = flag
    told = kwargs.get(name, *args[1:2])  # Positional, it comes after the inputs.
    told = getattr(module, name) if told is None else told
    if told is None:
        layer = type(module).__name__
        raise ValueError(f"{layer} is not told whether it trains: {_remedy(argument)}")
    return told


def _dropout(
    module: linen.Dropout,
    inputs: jax.Array,
    deterministic: bool | None = None,
    rng: jax.Array | None = None,
) -> jax.Array:
    """`nn.Dropout.__call__` without its comparisons of the rate with 0 and 1."""
    deterministic = linen.merge_param(
        "deterministic", module.deterministic, deterministic
    )
    if deterministic:
        return inputs
    rng = module.make_rng(module.rng_collection) if rng is None else rng
    return drop(inputs, module.rate, rng, module.broadcast_dims)


def drop(
    inputs: jax.Array, rate: Any, key: jax.Array, broadcast_dims: Sequence[int]
) -> jax.Array:
    """Dropout with the mask and the values of flax's layers, at a traced rate.

    Args:
      inputs: `[B, ...]`.
      rate: `[]`, the probability to drop a value.
      key: The key of the mask.
      broadcast_dims: Axes along which the mask is the same.
    """
    keep = 1.0 - jnp.asarray(rate)
    shape = list(inputs.shape)
    for axis in broadcast_dims:
        shape[axis] = 1
    kept = jax.random.bernoulli(key, p=keep.astype(float), shape=shape)
    kept = jnp.broadcast_to(kept, inputs.shape)
    # At a rate of 1 nothing is kept, but the gradient would be 0 / 0.
    divisor = jnp.where(keep > 0, keep, 1).astype(inputs.dtype)
    return lax.select(kept, inputs / divisor, jnp.zeros_like(inputs))


def _masked(
    mask: jax.Array,
    module: linen.BatchNorm,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> dict[str, Any]:
    x = args[0] if args else kwargs["x"]
    if kwargs.get("mask") is not None:
        return kwargs
    return {**kwargs, "mask": mask_for(mask, x, module.axis)}


def mask_for(
    mask: jax.Array, x: jax.Array, axis: int | Sequence[int]
) -> jax.Array | None:
    """The mask that a BatchNorm needs to leave padding out.

    Args:
      mask: `[B]` bool, false on padding.
      x: What is normalised.
      axis: The axes it is not normalised over.

    Returns:
      `[B, 1, ...]`, or None where the first axis of `x` is not that of the examples.
    """
    axes = axis if isinstance(axis, Sequence) else (axis,)
    if x.shape[0] != mask.shape[0] or 0 in [a % x.ndim for a in axes]:
        return None
    return mask.reshape(-1, *(1,) * (x.ndim - 1))


class CallSignature(NamedTuple):
    """What a module's `__call__` takes besides its input.

    Attributes:
      flag: `"train"`, `"training"`, `"deterministic"`, or None if it takes none.
      mask: Whether it takes `mask`.
    """

    flag: str | None
    mask: bool

    def arguments(self, train: bool, mask: jax.Array | None) -> dict[str, Any]:
        """Returns the keyword arguments of a call.

        Args:
          train: Whether the call is part of training.
          mask: `[B]` bool, false on padding, or None.

        Examples:
          >>> CallSignature("deterministic", mask=False).arguments(True, None)
          {'deterministic': False}
        """
        arguments: dict[str, Any] = {}
        if self.flag is not None:
            arguments[self.flag] = train != (self.flag == "deterministic")
        if self.mask:
            arguments["mask"] = mask
        return arguments


def call_signature(module: Any) -> CallSignature:
    """Finds out what the module's `__call__` takes besides its input.

    Of several flags the first of `train`, `training`, `deterministic` counts.

    Examples:
      >>> class Net(linen.Module):
      ...     def __call__(self, x, *, training):
      ...         return x
      >>> call_signature(Net())
      CallSignature(flag='training', mask=False)
    """
    parameters = inspect.signature(type(module).__call__).parameters
    named = {
        name
        for name, parameter in parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    flags = [f for f in ("train", "training", "deterministic") if f in named]
    return CallSignature(flags[0] if flags else None, "mask" in named)
