"""What was done when: sums of amounts in a bounded number of bins of time."""

from __future__ import annotations

from typing import Any

import numpy as np


class Timeline:
    """Adds up amounts by name over time; the bins widen as time goes on.

    Args:
      num_bins: How many bins there are, an even number: when time gets to the end of
        the last one, each two become one of twice the width.
      bin_seconds: Width of a bin at first.

    Examples:
      >>> timeline = Timeline(num_bins=4, bin_seconds=1.0)
      >>> timeline.add(0.5, 2.5, train=2.0)
      >>> timeline.row()
      {'bin_seconds': 1.0, 'train': [0.5, 1.0, 0.5]}
      >>> timeline.add(4.0, 6.0, train=2.0)
      >>> timeline.row()
      {'bin_seconds': 2.0, 'train': [1.5, 0.5, 2.0]}
    """

    def __init__(self, num_bins: int = 240, bin_seconds: float = 0.05):
        self.bin_seconds = bin_seconds
        self._num_bins = num_bins
        self._used = 0
        self._sums: dict[str, np.ndarray] = {}

    def add(self, start: float, end: float, **amounts: float) -> None:
        """Spreads amounts evenly over a stretch of time.

        Args:
          start: When it began, in seconds, at least 0.
          end: When it ended.
          **amounts: The amounts by name.
        """
        while end > self.bin_seconds * self._num_bins:
            self._widen()
        width = self.bin_seconds
        first = min(int(start / width), self._num_bins - 1)
        last = max(first, int(np.ceil(end / width)) - 1)
        edges = np.clip(np.arange(first, last + 2) * width, start, end)
        shares = np.diff(edges) / (end - start) if end > start else np.ones(1)
        for name, amount in amounts.items():
            sums = self._sums.setdefault(name, np.zeros(self._num_bins))
            sums[first : last + 1] += amount * shares
        self._used = max(self._used, last + 1)

    def row(self) -> dict[str, Any]:
        """The bins as a plain record: `bin_seconds`, and a list of sums a name."""
        sums = {
            name: [round(float(x), 6) for x in sums[: self._used]]
            for name, sums in self._sums.items()
        }
        return {"bin_seconds": self.bin_seconds, **sums}

    def _widen(self) -> None:
        self.bin_seconds *= 2
        self._used = -(-self._used // 2)
        for name, sums in self._sums.items():
            wider = np.zeros(self._num_bins)
            wider[: self._num_bins // 2] = sums.reshape(-1, 2).sum(axis=1)
            self._sums[name] = wider
