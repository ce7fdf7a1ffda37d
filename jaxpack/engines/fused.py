"""Unlike packs side by side in one program.

The pack primitive of "Understanding and Optimizing Packed Neural Network Training for
Hyper-Parameter Tuning" (Liu et al., arXiv 2002.02885) as the paper has it: unlike
models concatenated into one program. One loop steps every member, and none depends on
another within an iteration, so that the device is free to compute them at the same
time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpack.step import Program, active
from jaxpack.types import LaneState, PyTree


class Member(NamedTuple):
    """A pack among others in one program.

    Attributes:
      program: The program its trials share.
      step: One step of its lanes: a function of the program, its states, its lanes,
        the data, the deck and the first epoch.
      advance: Its engine, for steps it takes without the others.
    """

    program: Program
    step: Callable[..., LaneState]
    advance: Callable[..., LaneState]


def advance(
    members: Sequence[Member],
    states: Sequence[LaneState],
    lanes: Sequence[Mapping[str, jax.Array]],
    data: tuple[PyTree, PyTree],
    deck: jax.Array,
    first_epoch: Any,
    num_steps: Any,
) -> tuple[LaneState, ...]:
    """Trains every member for up to `num_steps` steps.

    As long as each member has a lane that trains on, they step together. Then those
    that still have one take the rest of their steps one after the other: an empty
    member, or one whose loss is no longer finite, costs nothing.

    Args:
      members: The members.
      states: Their states, one lane's or stacked.
      lanes: Their per-lane hparams, each `[]` or `[N]`.
      data: Training inputs and labels, leaves `[num_examples, ...]`, shared.
      deck: `[E, num_examples]` int32, shared.
      first_epoch: `[]` int32, the epoch in the deck's first row.
      num_steps: `[]` int32.
    """

    def trains(
        member: Member, state: LaneState, lane: Mapping[str, jax.Array]
    ) -> jax.Array:
        spe = member.program.steps_per_epoch(lane)
        return jnp.any(active(state, first_epoch, deck.shape[0], spe))

    def go_on(carry: tuple[Any, tuple[LaneState, ...]]) -> jax.Array:
        taken, states = carry
        train = map(trains, members, states, lanes)
        return jnp.array([taken < num_steps, *train]).all()

    def body(carry: tuple[Any, tuple[LaneState, ...]]) -> Any:
        taken, states = carry
        states = tuple(
            member.step(member.program, state, lane, data, deck, first_epoch)
            for member, state, lane in zip(members, states, lanes, strict=True)
        )
        return taken + 1, states

    start = jnp.int32(0), tuple(states)
    taken, states = jax.lax.while_loop(go_on, body, start)
    left = [
        jnp.where(trains(member, state, lane), num_steps - taken, 0)
        for member, state, lane in zip(members, states, lanes, strict=True)
    ]
    return tuple(
        member.advance(member.program, state, lane, data, deck, first_epoch, steps)
        for member, state, lane, steps in zip(members, states, lanes, left, strict=True)
    )
