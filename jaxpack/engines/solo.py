"""One trial a program, its whole segment in one dispatch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from jaxpack.step import Program, active, train_step
from jaxpack.types import LaneState, PyTree


def advance(
    program: Program,
    state: LaneState,
    lane: Mapping[str, jax.Array],
    data: tuple[PyTree, PyTree],
    deck: jax.Array,
    first_epoch: Any,
    num_steps: Any,
) -> LaneState:
    """Trains one trial for up to `num_steps` steps.

    Args:
      program: The program.
      state: The trial's state.
      lane: Its per-lane hparams, each `[]`.
      data: Training inputs and labels, leaves `[num_examples, ...]`.
      deck: `[E, num_examples]` int32.
      first_epoch: `[]` int32, the epoch in the deck's first row.
      num_steps: `[]` int32; fewer are done where the trial reaches its target, its
        loss is no longer finite, or the deck ends.
    """
    end, spe = state.step + num_steps, program.steps_per_epoch(lane)

    def go_on(state: LaneState) -> jax.Array:
        return (state.step < end) & active(state, first_epoch, deck.shape[0], spe)

    def body(state: LaneState) -> LaneState:
        return train_step(program, state, lane, data, deck, first_epoch)

    return jax.lax.while_loop(go_on, body, state)
