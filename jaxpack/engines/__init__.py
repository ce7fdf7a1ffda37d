"""How trials become a program: one at a time, or many in one.

Every engine is a pure function `advance(program, states, lanes, data, deck,
first_epoch, num_steps) -> states`. A trial comes to the same state in all of them;
they differ in what the chip makes of it.
"""

from __future__ import annotations

import dataclasses

from jaxpack.engines import packed, solo
from jaxpack.step import Program
from jaxpack.types import PyTree

ADVANCE = {"packed": packed.advance, "solo": solo.advance}


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
