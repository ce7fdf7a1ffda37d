"""Measures how fast the candidates for a program train on the device at hand."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax

from jaxpack import executables, step
from jaxpack.data import Dataset
from jaxpack.detect import Detection
from jaxpack.engines import PackSpec
from jaxpack.pack import Feed, Pack, Ready
from jaxpack.types import Trial

ROUNDS = 3
ROUND_SECONDS = 0.15
"""How long each candidate runs in each round."""


def measure(
    dataset: Dataset,
    detection: Detection,
    trial: Trial,
    specs: Sequence[PackSpec],
    devices: Sequence[jax.Device],
) -> dict[PackSpec, float]:
    """Trains copies of one trial in each candidate, every worker busy at once.

    The candidates take turns, warm and blocked, whole training steps with the data
    on the device; the median of the rounds counts. What is found is kept on disk, so
    that another process on this machine makes the same choice.

    Args:
      dataset: The data.
      detection: The trial's program.
      trial: The trial.
      specs: The candidates.
      devices: The device of each worker.

    Returns:
      Seconds a lane-step takes, by candidate, with all workers together.
    """
    name = _name(detection, specs, devices)
    known = _read(name)
    if known is not None and len(known) == len(specs):
        return dict(zip(specs, known, strict=True))
    # As many epochs as keep the trials running throughout.
    epochs = -(-4096 // detection.program.steps_per_epoch)
    feeds = {device: Feed(dataset, 0, epochs, device) for device in set(devices)}
    limit = epochs * detection.program.steps_per_epoch // (ROUNDS + 2)
    packs = {
        spec: [_filled(spec, feeds[device], detection, trial) for device in devices]
        for spec in specs
    }
    times: dict[PackSpec, list[float]] = {spec: [] for spec in specs}
    with ThreadPoolExecutor(len(devices)) as threads:
        steps = {}
        for spec in specs:
            _run(threads, packs[spec], 1)
            once = _run(threads, packs[spec], 1)
            steps[spec] = max(1, min(limit, int(ROUND_SECONDS / once)))
        for _ in range(ROUNDS):
            for spec in specs:
                seconds = _run(threads, packs[spec], steps[spec])
                lanes = spec.num_lanes * len(devices)
                times[spec].append(seconds / steps[spec] / lanes)
    found = {spec: statistics.median(times[spec]) for spec in specs}
    _write(name, list(found.values()))
    return found


def _filled(spec: PackSpec, feed: Feed, detection: Detection, trial: Trial) -> Pack:
    """A pack whose lanes all train the same trial, without an end."""
    values = dict(trial.hparams) | dict(detection.program.static)
    values.setdefault("total_steps", 2**20)
    pack = Pack(spec, feed, 0, executables.CompileLog())
    lane = step.lane_values(detection.program.lane_hparams, values)
    for i in range(spec.num_lanes):
        pack.put(Ready((i,), i, spec, lane, i, None, 0, (2**30,)))
    return pack


def _run(threads: ThreadPoolExecutor, packs: Sequence[Pack], steps: int) -> float:
    start = time.perf_counter()
    list(threads.map(lambda pack: pack.run(steps, pack.feed.deck(0)), packs))
    return time.perf_counter() - start


def _name(
    detection: Detection, specs: Sequence[PackSpec], devices: Sequence[jax.Device]
) -> str:
    candidates = ",".join(f"{spec.engine}{spec.num_lanes}" for spec in specs)
    kind = f"{devices[0].device_kind} x{len(devices)}"
    return f"{kind} | {detection.program.fingerprint} | {candidates}"


def _path() -> Path:
    return executables.cache_directory() / "measured.json"


def _read(name: str) -> list[float] | None:
    if not executables.disk_cache_wanted():
        return None
    try:
        return json.loads(_path().read_text()).get(name)
    except (OSError, ValueError):
        return None


def _write(name: str, seconds: list[float]) -> None:
    """Adds a measurement to those on disk, where there is a disk to write to."""
    if not executables.disk_cache_wanted():
        return
    path = _path()
    try:
        known = json.loads(path.read_text()) if path.exists() else {}
        known[name] = seconds
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(known, indent=1))
        os.replace(temporary, path)
    except (OSError, ValueError):
        return
