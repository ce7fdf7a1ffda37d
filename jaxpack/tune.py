"""Measures how fast the candidates for a program train on the device at hand."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax

from jaxpack import executables, step
from jaxpack.bundle import Bundle
from jaxpack.data import Dataset
from jaxpack.engines import PackSpec
from jaxpack.pack import Feed, Ready
from jaxpack.step import Program
from jaxpack.types import Trial

ROUNDS = 3
ROUND_SECONDS = 0.15
"""How long each candidate runs in each round."""


def measure(
    dataset: Dataset,
    trials: Mapping[Program, Trial],
    candidates: Sequence[tuple[PackSpec, ...]],
    devices: Sequence[jax.Device],
) -> dict[tuple[PackSpec, ...], float]:
    """Trains copies of a trial in every lane of each candidate, every worker busy.

    The candidates take turns, warm and blocked, whole training steps with the data
    on the device; the median of the rounds counts. What is found is kept on disk, so
    that another process on this machine makes the same choice.

    Args:
      dataset: The data.
      trials: A trial of each program.
      candidates: Each a pack, or several that share a program.
      devices: The device of each worker.

    Returns:
      Seconds a lane-step takes, by candidate, with all workers together.
    """
    name = _name(candidates, devices)
    known = _read(name)
    if known is not None and len(known) == len(candidates):
        return dict(zip(candidates, known, strict=True))
    # As many epochs as keep the trials running throughout.
    spe = min(p.steps_per_epoch(trials[p].hparams) for p in trials)
    epochs = -(-4096 // spe)
    feeds = {device: Feed(dataset, 0, epochs, device) for device in set(devices)}
    limit = epochs * spe // (ROUNDS + 2)
    bundles = {
        members: [_filled(members, feeds[device], trials) for device in devices]
        for members in candidates
    }
    times: dict[tuple[PackSpec, ...], list[float]] = {m: [] for m in candidates}
    with ThreadPoolExecutor(len(devices)) as threads:
        steps = {}
        for members in candidates:
            _run(threads, bundles[members], 1)
            once = _run(threads, bundles[members], 1)
            steps[members] = max(1, min(limit, int(ROUND_SECONDS / once)))
        for _ in range(ROUNDS):
            for members in candidates:
                seconds = _run(threads, bundles[members], steps[members])
                lanes = sum(spec.num_lanes for spec in members) * len(devices)
                times[members].append(seconds / steps[members] / lanes)
    found = {members: statistics.median(times[members]) for members in candidates}
    _write(name, list(found.values()))
    return found


def _filled(
    members: tuple[PackSpec, ...], feed: Feed, trials: Mapping[Program, Trial]
) -> Bundle:
    """Packs whose lanes all train their program's trial, without an end."""
    bundle = Bundle(members, feed, 0, executables.CompileLog())
    for spec, free in bundle.free.items():
        program = spec.program
        values = dict(trials[program].hparams) | dict(program.static)
        values.setdefault("total_steps", 2**20)
        lane = step.lane_values(program.lane_hparams, values)
        for i in range(free):
            bundle.put(Ready((i,), i, spec, lane, i, None, 0, (2**30,)))
    return bundle


def _run(threads: ThreadPoolExecutor, bundles: Sequence[Bundle], steps: int) -> float:
    start = time.perf_counter()
    list(threads.map(lambda bundle: bundle.run(steps, bundle.feed.deck(0)), bundles))
    return time.perf_counter() - start


def _name(
    candidates: Sequence[tuple[PackSpec, ...]], devices: Sequence[jax.Device]
) -> str:
    described = ", ".join(
        "+".join(
            f"{spec.engine}{spec.num_lanes} {spec.program.fingerprint}"
            for spec in members
        )
        for members in candidates
    )
    return f"{devices[0].device_kind} x{len(devices)} | {described}"


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
