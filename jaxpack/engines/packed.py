"""A pack: trials stacked along a leading axis, each step taken by all at once.

The pack primitive of "Understanding and Optimizing Packed Neural Network Training for
Hyper-Parameter Tuning" (Liu et al., arXiv 2002.02885), as one `jax.vmap`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxpack.step import Program, active, train_step
from jaxpack.types import LaneState, PyTree


def advance(
    program: Program,
    states: LaneState,
    lanes: Mapping[str, jax.Array],
    data: tuple[PyTree, PyTree],
    deck: jax.Array,
    first_epoch: Any,
    num_steps: Any,
) -> LaneState:
    """Trains every lane of a pack for up to `num_steps` steps.

    A lane that is empty, has reached its target, or has met a loss that is not
    finite, keeps its state to the bit.

    Args:
      program: The program.
      states: The lanes' states, leaves `[N, ...]`.
      lanes: Their per-lane hparams, each `[N]`.
      data: Training inputs and labels, leaves `[num_examples, ...]`, shared.
      deck: `[E, num_examples]` int32, shared.
      first_epoch: `[]` int32, the epoch in the deck's first row.
      num_steps: `[]` int32.
    """

    def body(_: Any, states: LaneState) -> LaneState:
        return step(program, states, lanes, data, deck, first_epoch)

    return jax.lax.fori_loop(0, num_steps, body, states)


def step(
    program: Program,
    states: LaneState,
    lanes: Mapping[str, jax.Array],
    data: tuple[PyTree, PyTree],
    deck: jax.Array,
    first_epoch: Any,
) -> LaneState:
    """One step of every lane that trains on; see `advance` for the arguments."""

    def one(state: LaneState, lane: Mapping[str, jax.Array]) -> LaneState:
        spe = program.steps_per_epoch(lane)
        go_on = active(state, first_epoch, deck.shape[0], spe)
        new = train_step(program, state, lane, data, deck, first_epoch)
        return jax.tree.map(lambda a, b: jnp.where(go_on, a, b), new, state)

    return jax.vmap(one)(states, lanes)
