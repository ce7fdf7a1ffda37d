"""Successive halving (Jamieson and Talwalkar, AISTATS 2016)."""

from __future__ import annotations

import dataclasses

from jaxpack import checks
from jaxpack.schedulers.brackets import Bracket, check_int
from jaxpack.schedulers.scheduler import UNITS, Scheduler, halve, max_halvings


@dataclasses.dataclass(frozen=True)
class SuccessiveHalving(Scheduler):
    """One bracket: all trials start small, and one in `eta` of them goes on.

    The method of Jamieson and Talwalkar, "Non-stochastic Best Arm Identification and
    Hyperparameter Optimization" (AISTATS 2016), with the rungs of Hyperband's first
    bracket. Once a single trial is left, it goes on alone through the last rungs;
    `min_resource` makes the first rung longer where there are few trials.

    Attributes:
      num_trials: How many trials are started.
      max_resource: What a trial gets that is never stopped, `R`.
      reduction_factor: One in so many trials is promoted, `eta`.
      min_resource: The least a trial gets before it may be stopped.
      unit: What is counted, `"epochs"` or `"steps"`.

    Raises:
      ValueError: If an argument is not such an int, or `unit` is another word.

    Examples:
      >>> SuccessiveHalving(20, max_resource=9).brackets()
      (((20, 1), (6, 3), (2, 9)),)
    """

    num_trials: int
    max_resource: int
    reduction_factor: int = 3
    min_resource: int = 1
    unit: str = "epochs"

    def __post_init__(self):
        check_int("num_trials", self.num_trials, least=1)
        check_int("min_resource", self.min_resource, least=1)
        check_int("max_resource", self.max_resource, least=self.min_resource)
        check_int("reduction_factor", self.reduction_factor, least=2)
        checks.word("unit", self.unit, UNITS)

    def brackets(self) -> tuple[Bracket, ...]:
        """The one bracket."""
        eta = self.reduction_factor
        s_max = max_halvings(self.max_resource, eta, self.min_resource)
        return (halve(self.num_trials, s_max, self.max_resource, eta),)
