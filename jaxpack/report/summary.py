"""What a report is made from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jaxpack.dimensions import Dimension
from jaxpack.types import TrialResult
from jaxpack.worker import Stats


@dataclasses.dataclass(frozen=True)
class Summary:
    """What a report shows of a sweep.

    Attributes:
      name: The sweep's name.
      trials: Every trial.
      metric: The metric that they are ranked by.
      mode: "min" or "max".
      unit: What resources are counted in, "epochs" or "steps".
      dims: The dimensions of the space, as far as they are known.
      stats: What the sweep cost.
      stopped: What ended the sweep early, or None.
      ended: False if it was still running.
      test_metrics: The winner's metrics on the test split, or None.
    """

    name: str
    trials: Sequence[TrialResult]
    metric: str
    mode: str
    unit: str
    dims: Mapping[str, Dimension]
    stats: Stats
    stopped: str | None = None
    ended: bool = True
    test_metrics: Mapping[str, float] | None = None
