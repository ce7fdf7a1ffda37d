"""Hyperband (Li et al., JMLR 18(185), 2018, Algorithm 1)."""

from __future__ import annotations

import dataclasses

from jaxpack import checks
from jaxpack.schedulers.brackets import Bracket, check_int
from jaxpack.schedulers.scheduler import UNITS, Scheduler, halve, max_halvings


@dataclasses.dataclass(frozen=True)
class Hyperband(Scheduler):
    """Successive halving at several exchange rates of trials against resource.

    Algorithm 1 of Li et al., "Hyperband: A Novel Bandit-Based Approach to
    Hyperparameter Optimization" (JMLR 2018). With the letters of the paper and
    `r = min_resource`: `s_max` is the largest `s` with `r * eta**s <= R`, and the
    brackets are `s = s_max, ..., 0`. Bracket `s` starts
    `n = ceil((s_max + 1) * eta**s / (s + 1))` trials, and its rung `i` has
    `max(1, n // eta**i)` of them at a resource of `R * eta**i // eta**s`; the last is
    `R` exactly. The ceil is Algorithm 1's; tables made with a floor start fewer
    trials. Integers only: a floating logarithm loses a bracket at R=243.

    Survivors go on from where they were, they are not trained again.

    Attributes:
      max_resource: The paper's `R`: what a trial gets that is never stopped.
      reduction_factor: The paper's `eta`: one in so many trials is promoted.
      min_resource: The least a trial gets before it may be stopped.
      unit: What is counted, `"epochs"` or `"steps"`.
      repeats: How many times the brackets are run, with new trials each time.

    Raises:
      ValueError: If an argument is not such an int, or `unit` is another word.

    Examples:
      >>> print(Hyperband(27))
      Hyperband: 49 trials, 357 epochs in 4 brackets
      rung  bracket 0  bracket 1  bracket 2  bracket 3
         0     27 x 1     12 x 3      6 x 9     4 x 27
         1      9 x 3      4 x 9     2 x 27
         2      3 x 9     1 x 27
         3     1 x 27
    """

    max_resource: int
    reduction_factor: int = 3
    min_resource: int = 1
    unit: str = "epochs"
    repeats: int = 1

    def __post_init__(self):
        check_int("min_resource", self.min_resource, least=1)
        check_int("max_resource", self.max_resource, least=self.min_resource)
        check_int("reduction_factor", self.reduction_factor, least=2)
        check_int("repeats", self.repeats, least=1, most=10**6)
        checks.word("unit", self.unit, UNITS)

    @property
    def num_trials(self) -> int:
        """How many trials are started in all."""
        return sum(bracket[0][0] for bracket in self.brackets())

    def brackets(self) -> tuple[Bracket, ...]:
        """The brackets, the one with most trials first.

        Examples:
          >>> Hyperband(9).brackets()
          (((9, 1), (3, 3), (1, 9)), ((5, 3), (1, 9)), ((3, 9),))
        """
        eta = self.reduction_factor
        s_max = max_halvings(self.max_resource, eta, self.min_resource)
        once = tuple(
            # -(-a // b) is the ceiling of a / b.
            halve(-(-(s_max + 1) * eta**s // (s + 1)), s, self.max_resource, eta)
            for s in range(s_max, -1, -1)
        )
        return once * self.repeats
