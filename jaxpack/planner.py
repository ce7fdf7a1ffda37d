"""The plan: which trials share a program, and how each program is run."""

from __future__ import annotations

import dataclasses
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jaxpack import checks, trees
from jaxpack.combine import MOST_FUSED, filled, partition
from jaxpack.detect import (
    Detection,
    Finding,
    Kind,
    StaticHParamError,
    detect,
    kind_of,
)
from jaxpack.dimensions import Dimension, Uniform
from jaxpack.engines import ADVANCE, ENGINES, PackSpec
from jaxpack.space import Space
from jaxpack.task import Task
from jaxpack.tune import measure
from jaxpack.types import Trial

TINY = 10_000
"""Parameters below which a pack beats single trials on a CPU core."""
DEFAULT_LANES = 16
MOST_WORKERS = 1024
"""Threads that nobody can mean to have more of."""
FLOPS = 5e10
"""What a worker may be expected to compute a second."""
WORTH_MEASURING = 30.0
"""Seconds of expected work from which the engines are measured: some 20 compiles."""
WORTH_FUSING = 120.0
"""The same for fusing unlike packs, which takes a compile for each of them again."""


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
    """

    spec: PackSpec
    key: tuple[tuple[str, Any], ...]
    trial_ids: tuple[int, ...]
    num_params: int
    flops: float
    reason: str
    measured: tuple[tuple[str, float], ...] = ()
    fused: tuple[PackSpec, ...] = ()

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
            "flops": self.flops,
            "reason": self.reason,
            "measured": dict(self.measured),
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
    def fused(self) -> dict[PackSpec, tuple[PackSpec, ...]]:
        """For each pack that shares its program with others, all of that program's."""
        return {pack.spec: pack.fused for pack in self.packs if pack.fused}

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
            where = "per-lane" if finding.per_lane else "static"
            line = f"  {finding.name:<{names}}  {where:<8}  {finding.reason}"
            lines.append(line)
            if finding.line:
                lines.append(f"  {'':<{names}}            {_short(finding.line)}")
        total = sum(len(pack.trial_ids) for pack in self.packs)
        programs = list(dict.fromkeys(p.fused or (p.spec,) for p in self.packs))
        count = f"{len(programs)} program{'s' * (len(programs) != 1)}"
        lines.append(f"{count} for {total} trials")
        for pack in self.packs:
            key = ", ".join(f"{name}={value}" for name, value in pack.key) or "all"
            lanes = f" x {pack.spec.num_lanes}" if pack.spec.num_lanes > 1 else ""
            engine = f"{pack.spec.engine}{lanes}"
            if pack.fused:
                share = pack.fused.count(pack.spec) * pack.spec.num_lanes
                number = programs.index(pack.fused) + 1
                engine = f"fused, {share} of {pack.num_lanes} lanes of program {number}"
            lines.append(
                f"  {key}: {len(pack.trial_ids)} trials, {engine}, "
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
    kinds: Sequence[Mapping[str, Kind]],
    total_steps: Sequence[int],
    expected_steps: Sequence[float] | None = None,
    *,
    engine: str = "auto",
    max_lanes: int | None = None,
    workers: int | None = None,
) -> Plan:
    """Groups trials by program and chooses how each program is run.

    Args:
      task: The task.
      trials: The trials.
      kinds: For each trial, the kind of each of its hparams.
      total_steps: Each trial's schedule horizon, in steps.
      expected_steps: How many steps each trial may be expected to train; nothing is
        measured where this is not known.
      engine: "packed", "solo", "fused" or "auto".
      max_lanes: Widest pack allowed; for "fused", the most trials of one program.
      workers: Worker threads; a core each on a CPU, one a device elsewhere.

    Raises:
      ValueError: If an argument is not what it should be.
      Exception: Whatever the task's own functions raise for every trial alike that
        has certain hparams.
    """
    check(engine, max_lanes, workers)
    expected_steps = expected_steps or [0.0] * len(trials)
    groups, failed = _group(task, trials, kinds, total_steps, expected_steps)
    devices = worker_devices(workers)
    choices = _choose(task, groups, engine, devices, max_lanes)
    packs = [
        _pack(group, choice, _width(group, choice.engine, devices, max_lanes))
        for group, choice in zip(groups, choices, strict=True)
    ]
    if engine == "fused":
        packs = _fused_as_asked(packs, groups, devices, max_lanes or MOST_FUSED)
    elif engine == "auto":
        packs = _fused_where_faster(task, packs, groups, devices, max_lanes)
    merged = _merge_findings([group.detection.findings for group in groups])
    _warn(merged, packs, len(trials))
    return Plan(tuple(packs), merged, devices, failed)


def kinds_of_space(space: Space, trials: Sequence[Trial]) -> list[dict[str, Kind]]:
    """For each trial of a space, the kind of each hparam it has."""
    return [
        {name: _kind_of_dim(dim) for name, dim in space.dims_of(trial.hparams).items()}
        for trial in trials
    ]


def kinds_of_dims(
    dims: Mapping[str, Dimension], trials: Sequence[Trial]
) -> list[dict[str, Kind]]:
    """The same by the dimensions alone, for trials of a space that is not at hand."""
    return [
        {name: _kind_of_dim(dims[name]) for name in trial.hparams} for trial in trials
    ]


def _kind_of_dim(dim: Dimension) -> Kind:
    values = dim.values() or [dim.typical()]
    if isinstance(values, range):
        values = [values[0], values[-1]]
    kind = kind_of(values, dim.static)
    if not isinstance(dim, Uniform):
        return kind
    # Just inside: at 0 a dropout, say, is not the same computation any more.
    margin = 1e-3 * (dim.hi - dim.lo)
    return kind._replace(continuous=True, extremes=(dim.lo + margin, dim.hi - margin))


def kinds_of_trials(trials: Sequence[Trial]) -> list[dict[str, Kind]]:
    """For each trial, the kind of each hparam it has, by the values given for it."""
    values: dict[str, list[Any]] = {}
    for trial in trials:
        for name, value in trial.hparams.items():
            values.setdefault(name, []).append(value)
    kinds = {name: kind_of(of_name) for name, of_name in values.items()}
    return [{name: kinds[name] for name in trial.hparams} for trial in trials]


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


def check(engine: str, max_lanes: int | None, workers: int | None) -> None:
    """Raises ValueError unless the arguments of `plan` with these names are valid."""
    checks.word("engine", engine, ("auto", *ENGINES))
    if max_lanes is not None:
        checks.whole("max_lanes", max_lanes)
    if workers is not None:
        checks.whole("workers", workers, below=MOST_WORKERS + 1)


class _Architecture(NamedTuple):
    """What trials must have in common for one to tell what hparams do to another."""

    kinds: Mapping[str, Kind]
    model: Any

    def __str__(self) -> str:
        names = [name for name in self.kinds if name != "model"]
        model = [f"model={self.model!r}"] if "model" in self.kinds else []
        return ", ".join(model + names) or "no hparams"


@dataclasses.dataclass
class _Group:
    """The trials of one program, and the steps they may be expected to train."""

    detection: Detection
    architecture: _Architecture
    trials: list[Trial] = dataclasses.field(default_factory=list)
    steps: float = 0.0

    @property
    def num_params(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(self.detection.state.params))

    @property
    def family(self) -> tuple[Any, ...]:
        """What groups have in common that one measurement speaks for."""
        size = round(math.log(max(self.detection.flops, 1.0), 4))
        return size, *(lane.name for lane in self.detection.program.lane_hparams)


class Choice(NamedTuple):
    """An engine, why it was chosen, and what was measured of which candidates."""

    engine: str
    reason: str
    measured: tuple[tuple[str, float], ...] = ()


def _group(
    task: Task,
    trials: Sequence[Trial],
    kinds: Sequence[Mapping[str, Kind]],
    total_steps: Sequence[int],
    expected_steps: Sequence[float],
) -> tuple[list[_Group], dict[int, str]]:
    """Puts each trial to the first program that covers it, tracing new ones."""
    groups: list[_Group] = []
    failed: dict[int, Exception] = {}
    architectures = [
        _Architecture(its_kinds, trial.hparams.get("model"))
        for trial, its_kinds in zip(trials, kinds, strict=True)
    ]
    for trial, architecture, total, steps in zip(
        trials, architectures, total_steps, expected_steps, strict=True
    ):
        values = dict(trial.hparams) | {"total_steps": total}
        alike = [g for g in groups if g.architecture.kinds == architecture.kinds]
        group = next((g for g in alike if g.detection.covers(values)), None)
        if group is None:
            known = (g.detection for g in alike if g.architecture == architecture)
            like = next(known, None)
            try:
                detection = detect(task, trial.hparams, architecture.kinds, total, like)
            except StaticHParamError:
                raise
            except Exception as error:
                failed[trial.trial_id] = error
                continue
            group = _Group(detection, architecture)
            groups.append(group)
        group.trials.append(trial)
        group.steps += steps
    _check_architectures(trials, architectures, failed)
    reasons = {i: f"{type(e).__name__}: {e}" for i, e in failed.items()}
    return groups, reasons


def _check_architectures(
    trials: Sequence[Trial],
    architectures: Sequence[_Architecture],
    failed: Mapping[int, Exception],
) -> None:
    """Raises what fails for all trials of an architecture: no value is at fault."""
    built = [
        architecture
        for trial, architecture in zip(trials, architectures, strict=True)
        if trial.trial_id not in failed
    ]
    for trial, architecture in zip(trials, architectures, strict=True):
        if architecture in built:
            continue
        error = failed[trial.trial_id]
        if architectures.count(architecture) < len(trials):
            error.add_note(
                f"All trials with the hparams {architecture} fail like this one, trial "
                f"{trial.trial_id}."
            )
        raise error


def _pack(group: _Group, choice: Choice, lanes: int) -> PlannedPack:
    detection = group.detection
    return PlannedPack(
        spec=PackSpec(detection.program, choice.engine, lanes, detection.state),
        key=detection.key,
        trial_ids=tuple(trial.trial_id for trial in group.trials),
        num_params=group.num_params,
        flops=detection.flops,
        reason=choice.reason,
        measured=choice.measured,
    )


def _width(
    group: _Group, engine: str, devices: Sequence[jax.Device], widest: int | None
) -> int:
    """A pack's width: no wider than the trials need once every worker has a pack."""
    if engine == "solo":
        return 1
    share = -(-len(group.trials) // len(devices))
    return min(widest or DEFAULT_LANES, 1 << (share - 1).bit_length())


def _choose(
    task: Task,
    groups: Sequence[_Group],
    engine: str,
    devices: Sequence[jax.Device],
    max_lanes: int | None,
) -> list[Choice]:
    """An engine for each group: the one asked for, the usual one, or the fastest.

    Groups of one family share a choice. It is measured, on the group with the most
    work, only where the work ahead is long enough for that to pay.
    """
    if engine == "fused":
        reason = (
            "fused, as asked for: trials side by side in one program, which takes as "
            "long to compile as all of theirs"
        )
        return [Choice("solo", reason)] * len(groups)
    if engine != "auto":
        return [Choice(engine, "as asked for")] * len(groups)
    families: dict[Any, list[_Group]] = {}
    for group in groups:
        families.setdefault(group.family, []).append(group)
    choices = {}
    for family, members in families.items():
        work = sum(group.detection.flops * group.steps for group in members)
        largest = max(members, key=lambda g: g.detection.flops * g.steps)
        choices[family] = usual(devices[0].platform, largest.num_params)
        if work / FLOPS / len(devices) > WORTH_MEASURING:
            choices[family] = _fastest(
                task, largest, choices[family], devices, max_lanes
            )
    return [choices[group.family] for group in groups]


def usual(platform: str, num_params: int) -> Choice:
    """The engine for models of a size, where nothing is measured."""
    if platform != "cpu":
        return Choice("packed", f"packed: one trial does not fill a {platform}")
    if num_params < TINY:
        reason = f"packed: under {TINY:,} params a pack beats single trials on a CPU"
        return Choice("packed", reason)
    return Choice("solo", "solo: on a CPU one trial fills a core")


def _fastest(
    task: Task,
    group: _Group,
    usual: Choice,
    devices: Sequence[jax.Device],
    max_lanes: int | None,
) -> Choice:
    """The engine that measures fastest; the usual one unless it loses by a tenth."""
    detection = group.detection
    widths = {name: _width(group, name, devices, max_lanes) for name in ADVANCE}
    candidates = [
        (PackSpec(detection.program, name, width, detection.state),)
        for name, width in widths.items()
        if name == "solo" or width > 1
    ]
    if len(candidates) < 2:
        return usual
    trials = {detection.program: group.trials[0]}
    seconds = measure(task.dataset, trials, candidates, devices)
    by_engine = {spec.engine: time for (spec,), time in seconds.items()}
    best = min(by_engine, key=lambda name: by_engine[name])
    if by_engine[best] > 0.9 * by_engine[usual.engine]:
        best = usual.engine
    figures = tuple(
        (f"{spec.engine} x {spec.num_lanes}", round(time * 1e6, 2))
        for (spec,), time in seconds.items()
    )
    shown = ", ".join(f"{name} {us:.4g} us" for name, us in figures)
    return Choice(best, f"{best}, by measurement; a lane-step: {shown}", figures)


def _fused_as_asked(
    packs: Sequence[PlannedPack],
    groups: Sequence[_Group],
    devices: Sequence[jax.Device],
    most: int,
) -> list[PlannedPack]:
    """Shares all packs out among fused programs of up to `most` trials each."""
    fused = list(packs)
    trials = [len(group.trials) for group in groups]
    for part in partition([group.steps for group in groups], most):
        numbers = filled(part, trials, most, len(devices))
        members = tuple(packs[i].spec for i in numbers)
        for i in part:
            fused[i] = dataclasses.replace(packs[i], fused=members)
    return fused


def _fused_where_faster(
    task: Task,
    packs: Sequence[PlannedPack],
    groups: Sequence[_Group],
    devices: Sequence[jax.Device],
    max_lanes: int | None,
) -> list[PlannedPack]:
    """Fuses packs that measure faster together than one after the other.

    Measured only where the work ahead is long enough for that to pay. Members take
    their steps together, so what counts is the time of one step of each.
    """
    fused = list(packs)
    for part in partition([group.steps for group in groups], MOST_FUSED):
        members = tuple(packs[i].spec for i in part)
        lanes = sum(spec.num_lanes for spec in members)
        work = sum(groups[i].detection.flops * groups[i].steps for i in part)
        worth = work / FLOPS / len(devices) > WORTH_FUSING
        if len(set(members)) < 2 or not worth or lanes > (max_lanes or lanes):
            continue
        apart = [(spec,) for spec in members]
        trials = {groups[i].detection.program: groups[i].trials[0] for i in part}
        seconds = measure(task.dataset, trials, [*apart, members], devices)
        alone = sum(seconds[one] * one[0].num_lanes for one in apart)
        together = seconds[members] * lanes
        wins = together < 0.9 * alone
        shown = f"{together * 1e6:.4g} us together, {alone * 1e6:.4g} us alone"
        reason = f"{'' if wins else 'not '}fused, by measurement; a step each: {shown}"
        figure = (f"fused of {len(members)}", round(seconds[members] * 1e6, 2))
        for i in part:
            fused[i] = dataclasses.replace(
                packs[i],
                reason=f"{packs[i].reason}; {reason}",
                measured=(*packs[i].measured, figure),
                fused=members if wins else (),
            )
    return fused


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
                f"hparam {finding.name} is never used by the task",
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
