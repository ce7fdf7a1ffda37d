"""Optimizers whose kind may differ between lanes."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpack.nn import pick, select
from jaxpack.types import PyTree, TracedChoice


def switch(
    value: Any, branches: Mapping[Any, optax.GradientTransformation]
) -> optax.GradientTransformation:
    """Picks the optimizer that an hparam names, for every lane its own.

    Where `value` is plain this is a look-up. Where it is a lane's choice in a traced
    program, every lane carries the states of all options and computes the updates of
    all; its own optimizer's are selected, and the states of the others stay as they
    were initialised. A step costs the sum of the optimizers.

    Args:
      value: The hparam: a string, or any other key of `branches`.
      branches: An optax transformation for each name.

    Returns:
      The transformation, which gives each lane the updates of its own.

    Raises:
      ValueError: If `value` or one of its options has no branch, or a branch is no
        transformation.

    Examples:
      >>> tx = switch("sgd", {"sgd": optax.sgd(0.1), "adam": optax.adam(0.1)})
      >>> tx.update({"w": 1.0}, tx.init({"w": 0.0}))[0]
      {'w': -0.1}
    """
    for name, branch in branches.items():
        if not isinstance(branch, optax.GradientTransformation):
            raise ValueError(
                f"the branch {name!r} is {branch!r}; it must be an optax transformation"
            )
    if not isinstance(value, TracedChoice):
        return pick(value, branches)
    options = [
        optax.with_extra_args_support(pick(option, branches))
        for option in value.options
    ]

    def init(params: PyTree) -> tuple[PyTree, ...]:
        return tuple(option.init(params) for option in options)

    def update(
        updates: PyTree,
        state: PyTree,
        params: PyTree | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree, PyTree]:
        results, states = [], []
        for place, (option, old) in enumerate(zip(options, state, strict=True)):
            result, new = option.update(updates, old, params, **extra_args)
            results.append(result)
            states.append(_where(value.index == place, new, old))
        return select(value.index, results), tuple(states)

    return optax.GradientTransformationExtraArgs(init, update)


def _where(condition: jax.Array, yes: PyTree, no: PyTree) -> PyTree:
    return jax.tree.map(functools.partial(jnp.where, condition), yes, no)
