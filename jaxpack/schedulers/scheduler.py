"""What all schedulers share: the plan, known before any score is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from jaxpack.schedulers.brackets import Bracket, Brackets

UNITS = ("epochs", "steps")


class Scheduler:
    """What every scheduler does, once it says what its brackets are."""

    if TYPE_CHECKING:
        # Fields of the frozen subclasses, which a property would hide.

        @property
        def num_trials(self) -> int:
            """How many trials are started in all."""

        @property
        def max_resource(self) -> int:
            """What a trial gets that is never stopped."""

        @property
        def unit(self) -> str:
            """What is counted, `"epochs"` or `"steps"`."""

    def brackets(self) -> tuple[Bracket, ...]:
        """The brackets, each a tuple of `(num_trials, resource)` rungs."""
        raise NotImplementedError

    def total_resource(self, resume: bool = True) -> int:
        """What all trials consume together, in the scheduler's unit.

        Args:
          resume: Whether a promoted trial goes on from where it was, as it does here;
            False counts what training it afresh at every rung would take.
        """
        return sum(
            trials * (resource - (before if resume else 0))
            for bracket in self.brackets()
            for before, (trials, resource) in _steps(bracket)
        )

    def start(self, mode: str, num_trials: int | None = None) -> Brackets:
        """Starts a run; see `Brackets` for the arguments."""
        return Brackets(self.brackets(), mode, num_trials)

    def __str__(self) -> str:
        """The plan as a table: a column a bracket, a row a rung."""
        brackets = self.brackets()
        distinct = list(dict.fromkeys(brackets))
        times = len(brackets) // len(distinct)
        title = (
            f"{type(self).__name__}: {self.num_trials} trials, {self.total_resource()} "
            f"{self.unit} in {len(brackets)} bracket{'s' if brackets[1:] else ''}"
            f"{f' (these, {times} times)' if times > 1 else ''}"
        )
        rows = [["rung", *(f"bracket {i}" for i in range(len(distinct)))]]
        for rung in range(max(map(len, distinct))):
            cells = [bracket[rung : rung + 1] for bracket in distinct]
            words = [f"{n} x {resource}" for cell in cells for n, resource in cell]
            rows.append([str(rung), *words])
        widths = [
            max(map(len, column))
            for column in itertools.zip_longest(*rows, fillvalue="")
        ]
        return "\n".join(
            [title] + ["  ".join(map(str.rjust, row, widths)) for row in rows]
        )


def max_halvings(max_resource: int, reduction_factor: int, min_resource: int) -> int:
    """The largest `s` with `min_resource * reduction_factor**s <= max_resource`.

    Examples:
      >>> max_halvings(243, 3, 1), max_halvings(242, 3, 1), max_halvings(1000, 10, 1)
      (5, 4, 3)
    """
    s = 0
    while min_resource * reduction_factor ** (s + 1) <= max_resource:
        s += 1
    return s


def halve(
    num_trials: int, halvings: int, max_resource: int, reduction_factor: int
) -> Bracket:
    """A bracket whose rung `i` keeps one in `reduction_factor**i` trials.

    Args:
      num_trials: How many trials the first rung has.
      halvings: How many rungs follow the first.
      max_resource: The resource of the last rung.
      reduction_factor: By how much each rung is smaller and longer than the last.

    Returns:
      The rungs, `(num_trials, resource)` each; no rung has less than one trial.

    Examples:
      >>> halve(27, halvings=2, max_resource=10, reduction_factor=3)
      ((27, 1), (9, 3), (3, 10))
    """
    return tuple(
        (
            max(1, num_trials // reduction_factor**i),
            max_resource * reduction_factor**i // reduction_factor**halvings,
        )
        for i in range(halvings + 1)
    )


def _steps(bracket: Bracket) -> Iterator[tuple[int, tuple[int, int]]]:
    """Pairs each rung with the resource of the rung before."""
    return zip((0, *(resource for _, resource in bracket)), bracket, strict=False)
