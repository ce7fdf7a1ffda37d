"""A plan as a record: its packs, why they are as they are, and the text of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from jaxpack import trees
from jaxpack.detect import Finding
from jaxpack.engines import PackSpec


@dataclasses.dataclass(frozen=True)
class PlannedPack:
    """The trials of one program.

    Attributes:
      spec: The pack to build for them.
      key: The static hparams they have in common.
      trial_ids: The trials.
      num_params: Weights of one trial.
      flops: Of one training step, at least.
      reason: Why this engine and width.
      measured: Candidates and their microseconds a lane-step, where measured.
      fused: The packs that share this one's program, itself included; empty where it
        has a program of its own.
      memory_bytes: What its program takes on each worker, the data included: a bound.
      memory_compiled: Whether it is no bound, but what compiled programs say.
      apart: Fingerprints of the programs that trials of each batch size would have
        had, where they share this one.
      tail: A number of steps, and the narrower pack of trials that are to have had as
        many in all, or more; None where all train in one pack.
    """

    spec: PackSpec
    key: tuple[tuple[str, Any], ...]
    trial_ids: tuple[int, ...]
    num_params: int
    flops: float
    reason: str
    measured: tuple[tuple[str, float], ...] = ()
    fused: tuple[PackSpec, ...] = ()
    tail: tuple[int, PackSpec] | None = None
    memory_bytes: int = 0
    memory_compiled: bool = False
    apart: tuple[str, ...] = ()

    @property
    def engine(self) -> str:
        """The engine that advances it."""
        return "fused" if self.fused else self.spec.engine

    @property
    def num_lanes(self) -> int:
        """Lanes of its program."""
        return sum(spec.num_lanes for spec in self.fused or (self.spec,))

    @property
    def lane_bytes(self) -> int:
        """Memory of one lane's state: weights, optimizer state and the rest."""
        return trees.size_bytes(self.spec.state)

    def row(self) -> dict[str, Any]:
        """The pack as a plain record, for tables and files."""
        return {
            "static": dict(self.key),
            "engine": self.engine,
            "lanes": self.num_lanes,
            "trials": len(self.trial_ids),
            "params": self.num_params,
            "lane_bytes": self.lane_bytes,
            "memory_bytes": self.memory_bytes,
            "memory_compiled": self.memory_compiled,
            "flops": self.flops,
            "reason": self.reason,
            "padded": self.spec.program.padded,
            "measured": dict(self.measured),
            "tail": self.tail
            and [self.tail[0], self.tail[1].engine, self.tail[1].num_lanes],
        }


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a call will run. `print(plan)` shows it.

    Attributes:
      packs: The packs, one a program.
      findings: For each hparam, whether it may differ between lanes, and why.
      workers: The device of each worker.
      failed: Trials whose program cannot be built, with the reason.
      occupancy: Share of the lane-steps computed that is expected to train a trial.
    """

    packs: tuple[PlannedPack, ...]
    findings: tuple[Finding, ...]
    workers: tuple[jax.Device, ...]
    failed: Mapping[int, str] = dataclasses.field(default_factory=dict)
    occupancy: float = 1.0

    def pack_of(self, trial_id: int, steps: int = 0) -> PackSpec:
        """The pack of a trial that trains until it has had `steps` steps."""
        pack = self._packs_by_trial[trial_id]
        if pack.tail is not None and steps >= pack.tail[0]:
            return pack.tail[1]
        return pack.spec

    @property
    def fused(self) -> dict[PackSpec, tuple[PackSpec, ...]]:
        """For each pack that shares its program with others, all of that program's."""
        return {pack.spec: pack.fused for pack in self.packs if pack.fused}

    @property
    def _packs_by_trial(self) -> dict[int, PlannedPack]:
        if "_by_trial" not in self.__dict__:
            by_trial = {i: p for p in self.packs for i in p.trial_ids}
            object.__setattr__(self, "_by_trial", by_trial)
        return self.__dict__["_by_trial"]

    def __str__(self) -> str:
        """The plan as text: hparams, packs, workers."""
        names = max((len(f.name) for f in self.findings), default=4)
        lines = ["hparams"]
        for finding in self.findings:
            where = "per-lane" if finding.per_lane else "static"
            line = f"  {finding.name:<{names}}  {where:<8}  {finding.reason}"
            lines.append(line)
            if finding.line:
                lines.append(f"  {'':<{names}}            {_short(finding.line)}")
        total = sum(len(pack.trial_ids) for pack in self.packs)
        programs = list(dict.fromkeys(p.fused or (p.spec,) for p in self.packs))
        programs += [(pack.tail[1],) for pack in self.packs if pack.tail]
        count = f"{len(programs)} program{'s' * (len(programs) != 1)}"
        lines.append(f"{count} for {total} trials")
        for pack in self.packs:
            key = ", ".join(f"{name}={value}" for name, value in pack.key) or "all"
            engine = _engine(pack.spec)
            if pack.tail:
                engine += f", from {pack.tail[0]:,} steps {_engine(pack.tail[1])}"
            if pack.fused:
                share = pack.fused.count(pack.spec) * pack.spec.num_lanes
                number = programs.index(pack.fused) + 1
                engine = f"fused, {share} of {pack.num_lanes} lanes of program {number}"
            memory = f"in {'' if pack.memory_compiled else 'at most '}"
            lines.append(
                f"  {key}: {len(pack.trial_ids)} trials, {engine}, "
                f"{pack.num_params:,} params, {_bytes(pack.lane_bytes)} a lane, "
                f"{memory}{_bytes(pack.memory_bytes)}"
            )
        for reason in dict.fromkeys(pack.reason for pack in self.packs):
            lines.append(f"  {reason}")
        if self.occupancy < 1:
            lines.append(f"  lanes are expected to be {self.occupancy:.0%} full")
        device = self.workers[0].device_kind
        lines.append(f"{len(self.workers)} workers on {device}")
        for trial_id, reason in self.failed.items():
            lines.append(f"trial {trial_id} cannot be built: {reason}")
        return "\n".join(lines)

    __repr__ = __str__


def _engine(spec: PackSpec) -> str:
    lanes = f" x {spec.num_lanes}" if spec.num_lanes > 1 else ""
    return f"{spec.engine}{lanes}"


def _short(text: str, width: int = 72) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
