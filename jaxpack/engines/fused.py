"""Unlike packs side by side: each iteration of one loop steps every member.

The pack primitive of "Understanding and Optimizing Packed Neural Network Training for
Hyper-Parameter Tuning" (Liu et al., arXiv 2002.02885) as the paper has it: unlike
models concatenated into one program. No member depends on another within an
iteration, so that the device is free to compute them at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpack.step import Program, active
from jaxpack.types import LaneState, PyTree


def advance(
    members: Sequence[tuple[Program, Callable[..., LaneState]]],
    states: Sequence[LaneState],
    lanes: Sequence[Mapping[str, jax.Array]],
    data: tuple[PyTree, PyTree],
    deck: jax.Array,
    first_epoch: Any,
    num_steps: Any,
) -> tuple[LaneState, ...]:
    """Trains every member for up to `num_steps` steps.

    A member none of whose lanes trains on is passed over, and its state kept.

    Args:
      members: Each member's program, and the step that all its lanes take: a function
        of the program, its states, its lanes, the data, the deck and the first epoch.
      states: The members' states, one lane's or stacked.
      lanes: Their per-lane hparams, each `[]` or `[N]`.
      data: Training inputs and labels, leaves `[num_examples, ...]`, shared.
      deck: `[E, num_examples]` int32, shared.
      first_epoch: `[]` int32, the epoch in the deck's first row.
      num_steps: `[]` int32.
    """

    def one(
        member: tuple[Program, Callable[..., LaneState]],
        state: LaneState,
        lane: Mapping[str, jax.Array],
    ) -> LaneState:
        program, step = member
        go_on = active(state, first_epoch, deck.shape[0], program.steps_per_epoch)
        return jax.lax.cond(
            jnp.any(go_on),
            lambda state: step(program, state, lane, data, deck, first_epoch),
            lambda state: state,
            state,
        )

    def body(_: Any, states: tuple[LaneState, ...]) -> tuple[LaneState, ...]:
        return tuple(map(one, members, states, lanes))

    return jax.lax.fori_loop(0, num_steps, body, tuple(states))
