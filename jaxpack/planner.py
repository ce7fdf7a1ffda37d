"""The plan: which trials share a program, and how each program is run."""

from __future__ import annotations

import dataclasses
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jaxpack import threefry, trees
from jaxpack.combine import MOST_FUSED, filled, partition
from jaxpack.data import Dataset
from jaxpack.detect import (
    Detection,
    Finding,
    Kind,
    StaticHParamError,
    detect,
    kind_of,
)
from jaxpack.dimensions import Dimension, Uniform
from jaxpack.engines import ENGINES, PackSpec
from jaxpack.forecast import Work
from jaxpack.memory import Need, lanes_that_fit
from jaxpack.space import Space
from jaxpack.step import BATCH_SIZE
from jaxpack.task import Task
from jaxpack.tune import measure
from jaxpack.types import Trial
from jaxpack.widths import (
    COMPILE_SECONDS,
    GAIN,
    Layout,
    Load,
    Pace,
    Tail,
    lay_out,
    pace_of,
    widest,
)

TINY = 10_000
"""Parameters below which a pack beats single trials on a CPU core."""
FLOPS = 5e10
"""What a worker may be expected to compute a second."""
PROGRAMS = 2
"""What a pack has compiled, in programs as long as its training step."""
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
      memory_bytes: What its program takes on each worker, the data included: a bound.
      memory_compiled: Whether it is no bound, but what compiled programs say.
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


def plan(
    task: Task,
    trials: Sequence[Trial],
    kinds: Sequence[Mapping[str, Kind]],
    total_steps: Sequence[int],
    work: Work | None = None,
    *,
    engine: str = "auto",
    max_lanes: int | None = None,
    workers: int | None = None,
    padding: bool | None = None,
) -> Plan:
    """Groups trials by program and chooses how each program is run.

    Args:
      task: The task.
      trials: The trials.
      kinds: For each trial, the kind of each of its hparams.
      total_steps: Each trial's schedule horizon, in steps.
      work: What is to be trained; where this is not known, nothing is measured, and
        packs are as wide as there are trials for.
      engine: "packed", "solo", "fused" or "auto".
      max_lanes: Widest pack allowed; for "fused", the most trials of one program.
      workers: Worker threads; a core each on a CPU, one a device elsewhere.
      padding: Whether trials of unlike batch sizes share packs, their batches padded to
        the largest; None for what the forecast says.

    Raises:
      ValueError: If an argument is not what it should be.
      Exception: Whatever the task's own functions raise for every trial alike that
        has certain hparams.
    """
    _check(engine, max_lanes, workers)
    expected_steps = work.steps if work else [0.0] * len(trials)
    groups, failed = _group(task, trials, kinds, total_steps, expected_steps)
    devices = worker_devices(workers)
    alone = engine == "auto"
    widths = _Widths(task.dataset, work, devices, max_lanes, alone)
    if engine in ("auto", "packed"):
        totals = {t.trial_id: n for t, n in zip(trials, total_steps, strict=True)}
        groups = _padded(task, groups, engine, widths, totals, padding)
    choices = _choose(task, groups, engine, widths)
    layout = widths.of(groups, choices)
    packs = [
        _pack(group, choice, lanes, widths.fit(group, lanes)[1])
        for group, choice, lanes in zip(groups, choices, layout.lanes, strict=True)
    ]
    packs = [
        pack
        if tail is None
        else dataclasses.replace(pack, tail=(tail.steps, _narrowed(pack.spec, tail)))
        for pack, tail in zip(packs, layout.tails, strict=True)
    ]
    if engine == "fused":
        packs = _fused_as_asked(packs, groups, devices, max_lanes or MOST_FUSED)
    elif engine == "auto":
        packs = _fused_where_faster(task, packs, groups, devices, max_lanes)
    merged = _merge_findings([group.detection.findings for group in groups])
    _warn(merged, packs, len(trials))
    return Plan(tuple(packs), merged, devices, failed, layout.forecast.occupancy)


def kinds_of_space(space: Space, trials: Sequence[Trial]) -> list[dict[str, Kind]]:
    """For each trial of a space, the kind of each hparam it has."""
    return [
        {name: _kind_of_dim(dim) for name, dim in space.dims_of(trial.hparams).items()}
        for trial in trials
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


def _check(engine: str, max_lanes: int | None, workers: int | None) -> None:
    engines = ("auto", *ENGINES)
    if engine not in engines:
        raise ValueError(f"engine is {engine!r}; it must be one of {engines}")
    for name, value in (("max_lanes", max_lanes), ("workers", workers)):
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}; it must be a whole number >= 1")


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

    def load(self, choice: _Choice) -> Load:
        """The group, as the widths of its packs depend on it."""
        trials = tuple(trial.trial_id for trial in self.trials)
        flops, mixed = self.detection.flops, self.detection.program.padded
        return Load(trials, choice.engine, flops, choice.slower, mixed=mixed)

    @property
    def family(self) -> tuple[Any, ...]:
        """What groups have in common that one measurement speaks for."""
        size = round(math.log(max(self.detection.flops, 1.0), 4))
        lanes = self.detection.program.lane_hparams
        return self.architecture.model, size, *(lane.name for lane in lanes)


class _Choice(NamedTuple):
    engine: str
    reason: str
    measured: tuple[tuple[str, float], ...] = ()
    slower: tuple[tuple[str, float], ...] = ()


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


def _padded(
    task: Task,
    groups: list[_Group],
    engine: str,
    widths: _Widths,
    totals: Mapping[int, int],
    padding: bool | None,
) -> list[_Group]:
    """Puts groups that differ in their batch size alone together, where that pays.

    Their batches are then padded to the largest. What a padded step wastes is weighed
    against the compilations and the half-empty packs of programs of their own.
    """

    def usual(group: _Group) -> _Choice:
        if engine == "packed":
            return _Choice("packed", "")
        return _usual(widths.devices[0].platform, group.num_params)

    def cost(groups: Sequence[_Group]) -> float:
        layout = widths.of(groups, [usual(group) for group in groups])
        programs = PROGRAMS * len(groups) / len(widths.devices)
        return layout.forecast.seconds + COMPILE_SECONDS * programs

    alike: dict[Any, list[_Group]] = {}
    for group in groups:
        if usual(group).engine == "packed" and _may_be_padded(group):
            alike.setdefault(_but_for_batch_size(group), []).append(group)
    sets = [members for members in alike.values() if len(members) > 1]
    unknown = padding is None and widths.work is None
    if not sets or padding is False or unknown:
        return groups
    if padding is None:
        guessed = _exchanged(groups, [(m, _together(m)) for m in sets])
        if cost(guessed) > GAIN * cost(groups):
            return groups
    found = [(members, _merged(task, members, totals)) for members in sets]
    return _exchanged(groups, [(m, one) for m, one in found if one is not None])


def _exchanged(
    groups: Sequence[_Group], sets: Sequence[tuple[Sequence[_Group], _Group]]
) -> list[_Group]:
    """The groups, with one in the place of each set of them."""
    gone = {id(group) for members, _ in sets for group in members}
    kept = [group for group in groups if id(group) not in gone]
    return kept + [one for _, one in sets]


def _may_be_padded(group: _Group) -> bool:
    kind = group.architecture.kinds.get(BATCH_SIZE)
    padded = kind is not None and kind.dtype == "int32" and not kind.static
    # Random numbers then depend on their place in the batch, not on its size.
    alike = padded and threefry.counts_by_place()
    return alike and not group.detection.program.mixes_examples


def _but_for_batch_size(group: _Group) -> Any:
    """What groups have in common that differ in their batch size alone."""
    detection, model = group.detection, group.architecture.model
    key = tuple((name, value) for name, value in detection.key if name != BATCH_SIZE)
    leaves, structure = jax.tree.flatten(detection.state)
    shapes = tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)
    return model, key, detection.program.lane_hparams, shapes, structure


def _together(groups: Sequence[_Group]) -> _Group:
    """The trials of groups under the program of the largest batches."""
    largest = max(groups, key=lambda group: group.detection.program.batch_size)
    trials = [trial for group in groups for trial in group.trials]
    steps = sum(group.steps for group in groups)
    return dataclasses.replace(
        largest, trials=sorted(trials, key=lambda t: t.trial_id), steps=steps
    )


def _merged(
    task: Task, groups: Sequence[_Group], totals: Mapping[int, int]
) -> _Group | None:
    """Groups of unlike batch sizes as one; None if no program can be that of all."""
    one = _together(groups)
    kinds = one.architecture.kinds
    # The largest that may come: with more trials, the program stays the same.
    size = min(max(kinds[BATCH_SIZE].extremes), task.dataset.num_train)
    first = one.trials[0]
    total = totals[first.trial_id]
    found = detect(task, first.hparams, kinds, total, padded_to=size)
    values = (dict(t.hparams) | {"total_steps": totals[t.trial_id]} for t in one.trials)
    fits = found.program.padded and not found.program.mixes_examples
    if not fits or not all(map(found.covers, values)):
        return None
    return dataclasses.replace(one, detection=found)


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


def _pack(group: _Group, choice: _Choice, lanes: int, need: Need) -> PlannedPack:
    detection = group.detection
    return PlannedPack(
        spec=PackSpec(detection.program, choice.engine, lanes, detection.state),
        key=detection.key,
        trial_ids=tuple(trial.trial_id for trial in group.trials),
        num_params=group.num_params,
        flops=detection.flops,
        reason=choice.reason,
        measured=choice.measured,
        memory_bytes=need.of(lanes),
        memory_compiled=need.compiled,
    )


@dataclasses.dataclass(frozen=True)
class _Widths:
    """What the widths of packs depend on besides the packs."""

    dataset: Dataset
    work: Work | None
    devices: tuple[jax.Device, ...]
    max_lanes: int | None
    alone: bool
    known: dict[str, tuple[int, Need]] = dataclasses.field(default_factory=dict)

    @property
    def pace(self) -> Pace:
        return pace_of(self.devices[0].platform)

    def of(self, groups: Sequence[_Group], choices: Sequence[_Choice]) -> Layout:
        """The widths of groups of trials, and their tails."""
        workers, most = len(self.devices), self.max_lanes or self.pace.lanes
        loads = []
        for group, choice in zip(groups, choices, strict=True):
            load = group.load(choice)
            fit, _ = self.fit(group, load.width(most, workers))
            loads.append(dataclasses.replace(load, most=fit))
        if self.work is None:
            return widest(loads, workers, most)
        return lay_out(loads, self.work, workers, self.pace, most, alone=self.alone)

    def fit(self, group: _Group, lanes: int) -> tuple[int, Need]:
        """How many of the lanes wanted fit into memory, and what a pack takes of it."""
        name = f"{group.detection.program.fingerprint} {lanes}"
        if name not in self.known:
            wanted = group.detection, self.dataset, self.devices, lanes
            self.known[name] = lanes_that_fit(*wanted)
        return self.known[name]


def _narrowed(spec: PackSpec, tail: Tail) -> PackSpec:
    return dataclasses.replace(spec, engine=tail.engine, num_lanes=tail.lanes)


def _choose(
    task: Task, groups: Sequence[_Group], engine: str, widths: _Widths
) -> list[_Choice]:
    """An engine for each group: the one asked for, the usual one, or the fastest.

    Groups of one family share a choice. It is measured, on the group with the most
    work, only where the work ahead is long enough for that to pay.
    """
    if engine == "fused":
        reason = (
            "fused, as asked for: trials side by side in one program, which takes as "
            "long to compile as all of theirs"
        )
        return [_Choice("solo", reason)] * len(groups)
    if engine != "auto":
        return [_Choice(engine, "as asked for")] * len(groups)
    families: dict[Any, list[_Group]] = {}
    for group in groups:
        if not group.detection.program.padded:
            families.setdefault(group.family, []).append(group)
    largest = {
        family: max(members, key=lambda g: g.detection.flops * g.steps)
        for family, members in families.items()
    }
    platform = widths.devices[0].platform
    choices = {f: _usual(platform, group.num_params) for f, group in largest.items()}
    for family, members in families.items():
        work = sum(group.detection.flops * group.steps for group in members)
        if work / FLOPS / len(widths.devices) > WORTH_MEASURING:
            choices[family] = _fastest(task, groups, choices, largest[family], widths)
    together = _Choice("packed", "packed: batches of unlike sizes share a program")
    return [choices.get(group.family, together) for group in groups]


def _usual(platform: str, num_params: int) -> _Choice:
    if platform != "cpu":
        return _Choice("packed", f"packed: one trial does not fill a {platform}")
    if num_params < TINY:
        reason = f"packed: under {TINY:,} params a pack beats single trials on a CPU"
        return _Choice("packed", reason)
    return _Choice("solo", "solo: on a CPU one trial fills a core")


def _fastest(
    task: Task,
    groups: Sequence[_Group],
    choices: Mapping[Any, _Choice],
    group: _Group,
    widths: _Widths,
) -> _Choice:
    """The engine that trains a family the soonest by what its steps measure.

    The usual one unless it loses by a tenth. A pack that cannot be kept full is slower
    than its lanes are: what counts is the forecast of the whole.
    """
    detection, devices = group.detection, widths.devices

    def layout(choice: _Choice) -> Layout:
        mine = {**choices, group.family: choice}
        packed = _Choice("packed", "")  # What is padded stays so.
        return widths.of(groups, [mine.get(each.family, packed) for each in groups])

    place = next(i for i, each in enumerate(groups) if each is group)
    packed = layout(_Choice("packed", "")).lanes[place]
    if packed < 2:
        return choices[group.family]
    candidates = [
        (PackSpec(detection.program, name, lanes, detection.state),)
        for name, lanes in (("packed", packed), ("solo", 1))
    ]
    trials = {detection.program: group.trials[0]}
    seconds = measure(task.dataset, trials, candidates, devices)
    load, found = group.load(choices[group.family]), {}
    for (spec,), time in seconds.items():
        step = time * spec.num_lanes * len(devices)
        load = load.measured(spec.engine, spec.num_lanes, step, widths.pace)
    for engine in ("packed", "solo"):
        of_engine = layout(_Choice(engine, "", (), load.slower))
        found[engine] = of_engine.forecast.seconds
    best, usual = min(found, key=lambda name: found[name]), choices[group.family].engine
    if found[best] > 0.9 * found[usual]:
        best = usual
    figures = tuple(
        (f"{spec.engine} x {spec.num_lanes}", round(time * 1e6, 2))
        for (spec,), time in seconds.items()
    )
    shown = ", ".join(f"{name} {us:.4g} us" for name, us in figures)
    reason = f"{best}, by measurement; a lane-step, with all lanes full: {shown}"
    return _Choice(best, reason, figures, load.slower)


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
                tail=None if wins else packs[i].tail,
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
