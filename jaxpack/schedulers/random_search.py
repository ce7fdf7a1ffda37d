"""Random search (Bergstra and Bengio, JMLR 13, 2012)."""

from __future__ import annotations

import dataclasses

from jaxpack import checks
from jaxpack.schedulers.brackets import Bracket, check_int
from jaxpack.schedulers.scheduler import UNITS, Scheduler


@dataclasses.dataclass(frozen=True)
class RandomSearch(Scheduler):
    """Trains every trial to the end: one bracket of one rung.

    The method of Bergstra and Bengio, "Random Search for Hyper-Parameter
    Optimization" (JMLR 2012).

    Attributes:
      num_trials: How many trials are trained.
      max_resource: What each of them gets.
      unit: What is counted, `"epochs"` or `"steps"`.

    Raises:
      ValueError: If a number is not an int of at least 1, or `unit` is another word.

    Examples:
      >>> RandomSearch(num_trials=8, max_resource=5).brackets()
      (((8, 5),),)
    """

    num_trials: int
    max_resource: int
    unit: str = "epochs"

    def __post_init__(self):
        check_int("num_trials", self.num_trials, least=1)
        check_int("max_resource", self.max_resource, least=1)
        checks.word("unit", self.unit, UNITS)

    def brackets(self) -> tuple[Bracket, ...]:
        """The one bracket."""
        return (((self.num_trials, self.max_resource),),)
