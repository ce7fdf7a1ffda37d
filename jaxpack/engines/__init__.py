"""How trials become a program: one at a time, or many in one.

`packed` and `solo` are pure functions `advance(program, states, lanes, data, deck,
first_epoch, num_steps) -> states` of trials that share a program; `fused` puts several
of those into one. A trial comes to the same state in all of them; they differ in what
the chip makes of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxpack.engines import fused, packed, solo
from jaxpack.step import Program, train_step
from jaxpack.types import LaneState, PyTree

ADVANCE = {"packed": packed.advance, "solo": solo.advance}
STEP = {"packed": packed.step, "solo": train_step}
ENGINES = (*ADVANCE, "fused")


@dataclasses.dataclass(frozen=True)
class PackSpec:
    """A pack to be built: its program, its engine and its width.

    Attributes:
      program: The program its trials share.
      engine: "packed" or "solo".
      num_lanes: Its width; 1 for `solo`, whose states have no lane axis.
      state: Shapes and dtypes of one lane's state.
    """

    program: Program
    engine: str
    num_lanes: int
    state: PyTree = dataclasses.field(compare=False, repr=False)

    @property
    def lane_axis(self) -> int | None:
        """The width as an axis of the states, or None where there is no axis."""
        return self.num_lanes if self.engine == "packed" else None


def name_of(members: Sequence[PackSpec]) -> str:
    """The engine that advances these packs together."""
    return members[0].engine if len(members) == 1 else "fused"


def advance(
    members: Sequence[PackSpec],
    states: Sequence[LaneState],
    lanes: Sequence[Mapping[str, jax.Array]],
    data: tuple[PyTree, PyTree],
    deck: jax.Array,
    first_epoch: Any,
    num_steps: Any,
) -> tuple[LaneState, ...]:
    """Trains packs together for up to `num_steps` steps.

    Args:
      members: The packs.
      states: Their states, one lane's or stacked.
      lanes: Their per-lane hparams, each `[]` or `[N]`.
      data: Training inputs and labels, leaves `[num_examples, ...]`.
      deck: `[E, num_examples]` int32.
      first_epoch: `[]` int32, the epoch in the deck's first row.
      num_steps: `[]` int32.
    """
    shared = data, deck, first_epoch, num_steps
    if len(members) == 1:
        alone = ADVANCE[members[0].engine]
        return (alone(members[0].program, states[0], lanes[0], *shared),)
    together = [
        fused.Member(spec.program, STEP[spec.engine], ADVANCE[spec.engine])
        for spec in members
    ]
    return fused.advance(together, states, lanes, *shared)
