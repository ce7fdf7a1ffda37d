"""What packs take on a device, known before they run, and how many lanes fit.

A lane's memory has a cheap bound: its state, and every value that its step computes, as
if all were kept to the end. Where packs fit even so, nothing is compiled. Otherwise
two narrow packs are, and what a compiled program says of itself is linear in its lanes,
once it has two.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from jaxpack import executables, trees
from jaxpack.bundle import program
from jaxpack.data import Dataset
from jaxpack.detect import Detection
from jaxpack.engines import PackSpec

SHARE = 0.8
"""Of what is free that is planned with: not all that a program takes is known."""
OBVIOUS = 0.5
"""A share of that, below which the bound is good enough."""
SCRATCH = 2
"""Times a step's values: on a CPU, convolutions have as much again beside them."""
WIDTHS = (2, 4)
"""Of the packs compiled; one lane is another program."""


class Need(NamedTuple):
    """Bytes that a program takes on its device.

    Attributes:
      shared: Whatever its width is; of this, the data are there once for all workers.
      lane: For each lane.
      compiled: Whether compiled programs say so; else it is a bound.
    """

    shared: int
    lane: int
    compiled: bool

    def of(self, lanes: int) -> int:
        """What a program of so many lanes takes.

        Examples:
          >>> Need(1000, 10, compiled=False).of(16)
          1160
        """
        return self.shared + lanes * self.lane


def bound(detection: Detection, dataset: Dataset) -> Need:
    """No less than what a program takes, by what its step computes."""
    lane = 2 * trees.size_bytes(detection.state) + SCRATCH * detection.scratch
    return Need(trees.size_bytes(dataset.train), lane, compiled=False)


def compiled(detection: Detection, dataset: Dataset, device: jax.Device) -> Need:
    """What compiled packs of two widths say, for all others."""
    few, more = (
        executables.memory_bytes(
            program(
                (PackSpec(detection.program, "packed", lanes, detection.state),),
                trees.avals(dataset.train),
                jax.ShapeDtypeStruct((1, dataset.num_train), np.int32),
                device,
                executables.CompileLog(),
            )
        )
        for lanes in WIDTHS
    )
    lane = max(0, more - few) // (WIDTHS[1] - WIDTHS[0])
    return Need(max(0, few - WIDTHS[0] * lane), lane, compiled=True)


def lanes_that_fit(
    detection: Detection,
    dataset: Dataset,
    devices: Sequence[jax.Device],
    lanes: int,
) -> tuple[int, Need]:
    """How many of the lanes wanted fit, at least 1, and what a program takes.

    Args:
      detection: The program.
      dataset: The data.
      devices: The device of each worker.
      lanes: The lanes wanted.
    """
    need, device = bound(detection, dataset), devices[0]
    free = free_bytes(device)
    if free is None:
        return lanes, need
    workers = max(devices.count(device) for device in set(devices))
    for_each = SHARE * free / workers
    if need.of(lanes) > OBVIOUS * for_each:
        need = compiled(detection, dataset, device)
    while lanes > 1 and need.of(lanes) > for_each:
        lanes = 1 << ((lanes - 1).bit_length() - 1)
    return lanes, need


def free_bytes(device: jax.Device) -> int | None:
    """Memory of a device that is not in use; None if it cannot be told."""
    if device.platform == "cpu":
        return _host_bytes()
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0)


def _host_bytes() -> int | None:
    """Memory of this machine, or of its container, that is available."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        (kilobytes,) = (x.split()[1] for x in lines if x.startswith("MemAvailable"))
    except (OSError, ValueError):
        names = ("SC_PHYS_PAGES", "SC_PAGE_SIZE")
        if not set(names) <= os.sysconf_names.keys():
            return None
        return os.sysconf(names[0]) * os.sysconf(names[1])
    groups = Path("/sys/fs/cgroup")
    try:
        limit = int((groups / "memory.max").read_text())
        used = int((groups / "memory.current").read_text())
    except (OSError, ValueError):  # "max" if there is no limit.
        return 1024 * int(kilobytes)
    return min(1024 * int(kilobytes), limit - used)
