"""The plan: which trials share a program, and how each program is run."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxpack import trees
from jaxpack.detect import Detection, Finding, Kind, detect, kind_of
from jaxpack.engines import ADVANCE, PackSpec
from jaxpack.space import Space
from jaxpack.task import Task
from jaxpack.types import Trial

TINY = 10_000
"""Parameters below which a pack beats single trials on a CPU core."""
DEFAULT_LANES = 16


@dataclasses.dataclass(frozen=True)
class PlannedPack:
    """The trials of one program.

    Attributes:
      spec: The pack to build for them.
      key: The static hparams they have in common.
      trial_ids: The trials.
      num_params: Weights of one trial.
      reason: Why this engine and width.
    """

    spec: PackSpec
    key: tuple[tuple[str, Any], ...]
    trial_ids: tuple[int, ...]
    num_params: int
    reason: str

    @property
    def lane_bytes(self) -> int:
        """Memory of one lane's state: weights, optimizer state and the rest."""
        return trees.size_bytes(self.spec.state)

    def row(self) -> dict[str, Any]:
        """The pack as a plain record, for tables and files."""
        return {
            "static": dict(self.key),
            "engine": self.spec.engine,
            "lanes": self.spec.num_lanes,
            "trials": len(self.trial_ids),
            "params": self.num_params,
            "lane_bytes": self.lane_bytes,
            "reason": self.reason,
        }


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a call will run. `print(plan)` shows it.

    Attributes:
      packs: The packs, one a program.
      findings: For each hparam, whether it may differ between lanes, and why.
      workers: The device of each worker.
      failed: Trials whose program cannot be built, with the reason.
    """

    packs: tuple[PlannedPack, ...]
    findings: tuple[Finding, ...]
    workers: tuple[jax.Device, ...]
    failed: Mapping[int, str] = dataclasses.field(default_factory=dict)

    def pack_of(self, trial_id: int) -> PackSpec:
        """The pack that a trial fits into."""
        return self._packs_by_trial[trial_id]

    @property
    def _packs_by_trial(self) -> dict[int, PackSpec]:
        if "_by_trial" not in self.__dict__:
            by_trial = {i: p.spec for p in self.packs for i in p.trial_ids}
            object.__setattr__(self, "_by_trial", by_trial)
        return self.__dict__["_by_trial"]

    def __str__(self) -> str:
        """The plan as text: hparams, packs, workers."""
        names = max((len(f.name) for f in self.findings), default=4)
        lines = ["hparams"]
        for finding in self.findings:
            where = "per lane" if finding.per_lane else "static"
            line = f"  {finding.name:<{names}}  {where:<8}  {finding.reason}"
            lines.append(line)
            if finding.line:
                lines.append(f"  {'':<{names}}            {_short(finding.line)}")
        total = sum(len(pack.trial_ids) for pack in self.packs)
        programs = "program" if len(self.packs) == 1 else "programs"
        lines.append(f"{len(self.packs)} {programs} for {total} trials")
        for pack in self.packs:
            key = ", ".join(f"{name}={value}" for name, value in pack.key) or "all"
            lanes = f" x {pack.spec.num_lanes}" if pack.spec.num_lanes > 1 else ""
            lines.append(
                f"  {key}: {len(pack.trial_ids)} trials, {pack.spec.engine}{lanes}, "
                f"{pack.num_params:,} params, {_bytes(pack.lane_bytes)} a lane"
            )
        for reason in dict.fromkeys(pack.reason for pack in self.packs):
            lines.append(f"  {reason}")
        device = self.workers[0].device_kind
        lines.append(f"{len(self.workers)} workers on {device}")
        for trial_id, reason in self.failed.items():
            lines.append(f"trial {trial_id} cannot be built: {reason}")
        return "\n".join(lines)

    __repr__ = __str__


def plan(
    task: Task,
    trials: Sequence[Trial],
    kinds: Mapping[str, Kind],
    total_steps: Sequence[int],
    *,
    engine: str = "auto",
    max_lanes: int | None = None,
    workers: int | None = None,
) -> Plan:
    """Groups trials by program and chooses how each program is run.

    Args:
      task: The task.
      trials: The trials.
      kinds: The kind of each hparam.
      total_steps: Each trial's schedule horizon, in steps.
      engine: "packed", "solo" or "auto".
      max_lanes: Widest pack allowed.
      workers: Worker threads; a core each on a CPU, one a device elsewhere.

    Raises:
      ValueError: If an argument is not what it should be.
      Exception: Whatever the task's own functions raise for every trial alike.
    """
    _check(engine, max_lanes, workers)
    groups, failed = _group(task, trials, kinds, total_steps)
    devices = worker_devices(workers)
    packs = [
        _pack(detection, ids, engine, max_lanes, devices[0].platform, len(devices))
        for detection, ids in groups
    ]
    merged = _merge_findings([detection.findings for detection, _ in groups])
    _warn(merged, packs, len(trials))
    return Plan(tuple(packs), merged, devices, failed)


def kinds_of_space(space: Space) -> dict[str, Kind]:
    """The kind of each of a space's hparams."""
    kinds = {}
    for name, dim in space.dims.items():
        values = dim.values() or [dim.typical()]
        if isinstance(values, range):
            values = [values[0], values[-1]]
        kinds[name] = kind_of(values, dim.static)._replace(continuous=dim.continuous)
    return kinds


def kinds_of_trials(trials: Sequence[Trial]) -> dict[str, Kind]:
    """The kind of each hparam, by the values that some trials have."""
    names = dict.fromkeys(name for trial in trials for name in trial.hparams)
    for trial in trials:
        missing = [name for name in names if name not in trial.hparams]
        if missing:
            raise ValueError(
                f"trial {trial.trial_id} has no {missing[0]}, which others have; give "
                "every trial the same hparams"
            )
    return {name: kind_of([trial.hparams[name] for trial in trials]) for name in names}


def worker_devices(workers: int | None = None) -> tuple[jax.Device, ...]:
    """The device of each worker.

    On a CPU there is a worker for each core this process may use, all on one device:
    XLA runs them side by side. Elsewhere there is a worker for each device.
    """
    devices = jax.local_devices()
    if devices[0].platform == "cpu":
        count = workers or _num_cores()
        return (devices[0],) * count
    count = workers or len(devices)
    return tuple(devices[i % len(devices)] for i in range(count))


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _check(engine: str, max_lanes: int | None, workers: int | None) -> None:
    engines = ("auto", *ADVANCE)
    if engine not in engines:
        raise ValueError(f"engine is {engine!r}; it must be one of {engines}")
    for name, value in (("max_lanes", max_lanes), ("workers", workers)):
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}; it must be a whole number >= 1")


def _group(
    task: Task,
    trials: Sequence[Trial],
    kinds: Mapping[str, Kind],
    total_steps: Sequence[int],
) -> tuple[list[tuple[Detection, list[int]]], dict[int, str]]:
    """Puts each trial to the first program that covers it, tracing new ones."""
    groups: list[tuple[Detection, list[int]]] = []
    failed: dict[int, Exception] = {}
    for trial, steps in zip(trials, total_steps, strict=True):
        values = dict(trial.hparams) | {"total_steps": steps}
        group = next((g for g in groups if g[0].covers(values)), None)
        if group is None:
            like = groups[0][0] if groups else None
            try:
                found = detect(task, trial.hparams, kinds, steps, like)
            except Exception as error:
                failed[trial.trial_id] = error
                continue
            group = found, []
            groups.append(group)
        group[1].append(trial.trial_id)
    if failed and not groups:
        raise next(iter(failed.values()))
    reasons = {i: f"{type(e).__name__}: {e}" for i, e in failed.items()}
    return groups, reasons


def _pack(
    detection: Detection,
    trial_ids: list[int],
    engine: str,
    max_lanes: int | None,
    platform: str,
    workers: int,
) -> PlannedPack:
    num_params = sum(leaf.size for leaf in jax.tree.leaves(detection.state.params))
    reason = "as asked for"
    if engine == "auto":
        engine, reason = _choose(platform, num_params)
    lanes = 1
    if engine == "packed":
        # No wider than the trials need once every worker has a pack.
        share = -(-len(trial_ids) // workers)
        lanes = min(max_lanes or DEFAULT_LANES, 1 << (share - 1).bit_length())
    spec = PackSpec(detection.program, engine, lanes, detection.state)
    return PlannedPack(spec, detection.key, tuple(trial_ids), num_params, reason)


def _choose(platform: str, num_params: int) -> tuple[str, str]:
    if platform != "cpu":
        return "packed", f"packed: one trial does not fill a {platform}"
    if num_params < TINY:
        return "packed", f"packed: under {TINY:,} params a pack beats single trials"
    return "solo", "solo: on a CPU one trial fills a core"


def _merge_findings(groups: Sequence[Sequence[Finding]]) -> tuple[Finding, ...]:
    """One finding an hparam: static if it is in any program, used if it is in any."""
    merged: dict[str, Finding] = {}
    for finding in (finding for group in groups for finding in group):
        known = merged.get(finding.name)
        if known is None or _tells_more(finding, known):
            merged[finding.name] = finding
    return tuple(merged.values())


def _tells_more(new: Finding, known: Finding) -> bool:
    if known.reason == "never used":
        return new.reason != "never used"
    return known.per_lane and not new.per_lane


def _warn(
    findings: Sequence[Finding], packs: Sequence[PlannedPack], num_trials: int
) -> None:
    for finding in findings:
        if finding.reason == "never used":
            warnings.warn(
                f"hparam {finding.name} is never used by the model or the optimizer",
                stacklevel=4,
            )
    if len(packs) > max(4, num_trials / 4):
        warnings.warn(
            f"{num_trials} trials need {len(packs)} programs, each of which takes "
            "seconds to compile: static hparams with fewer values would need fewer",
            stacklevel=4,
        )


def _short(text: str, width: int = 72) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
