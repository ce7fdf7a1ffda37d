"""`verify` and `devices`."""

from __future__ import annotations

import os
from typing import Annotated

import jax
import tyro

from jaxpack.cli import modules
from jaxpack.cli.errors import DONE, FAILED
from jaxpack.cli.flags import Int
from jaxpack.cli.reading import Directory
from jaxpack.load import load
from jaxpack.planner import TINY, usual, worker_devices
from jaxpack.verify import verify as check
from jaxpack.widths import pace_of

ModuleFlag = Annotated[
    str | None, tyro.conf.arg(metavar="MODULE", help_behavior_hint="")
]


def verify(
    directory: Directory,
    k: int = 3,
    module: ModuleFlag = None,
    seed: int = 0,
    workers: Int = None,
) -> int:
    """Trains some of a sweep's trials again, each alone, and compares the scores.

    The exit code is 1 if one differs by more than it may: not at all where the sweep
    trained single trials (solo), else by what rounding does.

        python -m jaxpack verify runs/a --k 5

    Args:
      directory: The sweep's directory.
      k: How many trials, drawn at random.
      module: The module with the task. By default the one that the sweep was run from.
      seed: Of the draw.
      workers: Threads that train. By default one a CPU core, or one a GPU.
    """
    result = load(directory)
    found = modules.noted(directory) if module is None else modules.load(module)
    verification = check(result, k, found.task, seed=seed, workers=workers)
    print(verification)
    return DONE if verification.ok else FAILED


def devices() -> int:
    """Shows what this machine has, and how a sweep would use it.

    python -m jaxpack devices
    """
    workers = worker_devices()
    for device in jax.local_devices():
        print(f"{device.platform} {device.id}: {device.device_kind}{_memory(device)}")
    each = "core" if workers[0].platform == "cpu" else "device"
    print(f"{len(workers)} workers by default, one a {each}")
    sizes, most = (TINY / 2, TINY), pace_of(workers[0].platform).lanes
    print(f"engine by default, where it is not measured, packs up to {most}:")
    for reason in dict.fromkeys(usual(workers[0].platform, n).reason for n in sizes):
        print(f"  {reason}")
    return DONE


def _memory(device: jax.Device) -> str:
    """What a device may use, or the machine's memory where it does not say."""
    size = (device.memory_stats() or {}).get("bytes_limit")
    if size is None and hasattr(os, "sysconf"):
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return "" if size is None else f", {size / 2**30:.1f} GiB"
