"""The plan: how each program is run, by rule or by measurement."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jaxpack import checks
from jaxpack.combine import MOST_FUSED, filled, partition
from jaxpack.data import Dataset
from jaxpack.detect import Finding, Kind
from jaxpack.engines import ENGINES, PackSpec
from jaxpack.forecast import Work
from jaxpack.groups import (
    Group,
    but_for_batch_size,
    exchanged,
    group_trials,
    may_be_padded,
    merged,
    together,
)
from jaxpack.memory import Need, lanes_that_fit
from jaxpack.plans import Plan, PlannedPack
from jaxpack.task import Task
from jaxpack.tune import measure
from jaxpack.types import Trial
from jaxpack.widths import (
    COMPILE_SECONDS,
    GAIN,
    Layout,
    Pace,
    Tail,
    lay_out,
    pace_of,
    widest,
)

TINY = 6e6
"""Operations of a training step below which a pack beats single trials on a CPU."""
MOST_WORKERS = 1024
"""Threads that nobody can mean to have more of."""
FLOPS = 5e10
"""What a worker may be expected to compute a second."""
PROGRAMS = 2
"""What a pack has compiled, in programs as long as its training step."""
WORTH_MEASURING = 30.0
"""Seconds of expected work from which the engines are measured: some 20 compiles."""
WORTH_FUSING = 120.0
"""The same for fusing unlike packs, which takes a compile for each of them again."""


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
    check(engine, max_lanes, workers)
    expected_steps = work.steps if work else [0.0] * len(trials)
    groups, failed = group_trials(task, trials, kinds, total_steps, expected_steps)
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
    findings = _merge_findings([group.detection.findings for group in groups])
    _warn(findings, packs, len(trials))
    return Plan(tuple(packs), findings, devices, failed, layout.forecast.occupancy)


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


class Choice(NamedTuple):
    """An engine, why it was chosen, and what was measured of which candidates."""

    engine: str
    reason: str
    measured: tuple[tuple[str, float], ...] = ()
    slower: tuple[tuple[str, float], ...] = ()


def _padded(
    task: Task,
    groups: list[Group],
    engine: str,
    widths: _Widths,
    totals: Mapping[int, int],
    padding: bool | None,
) -> list[Group]:
    """Puts groups that differ in their batch size alone together, where that pays.

    Their batches are then padded to the largest. What a padded step wastes is weighed
    against the compilations and the half-empty packs of programs of their own.
    """

    def choice(group: Group) -> Choice:
        if engine == "packed":
            return Choice("packed", "")
        return usual(widths.devices[0].platform, group.detection.flops)

    def cost(groups: Sequence[Group]) -> float:
        layout = widths.of(groups, [choice(group) for group in groups])
        programs = PROGRAMS * len(groups) / len(widths.devices)
        return layout.forecast.seconds + COMPILE_SECONDS * programs

    alike: dict[Any, list[Group]] = {}
    for group in groups:
        if choice(group).engine == "packed" and may_be_padded(group):
            alike.setdefault(but_for_batch_size(group), []).append(group)
    sets = [members for members in alike.values() if len(members) > 1]
    unknown = padding is None and widths.work is None
    if not sets or padding is False or unknown:
        return groups
    if padding is None:
        guessed = exchanged(groups, [(m, together(m)) for m in sets])
        if cost(guessed) > GAIN * cost(groups):
            return groups
    found = [(members, merged(task, members, totals)) for members in sets]
    return exchanged(groups, [(m, one) for m, one in found if one is not None])


def _pack(group: Group, choice: Choice, lanes: int, need: Need) -> PlannedPack:
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
        apart=group.apart,
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

    def of(self, groups: Sequence[Group], choices: Sequence[Choice]) -> Layout:
        """The widths of groups of trials, and their tails."""
        workers, most = len(self.devices), self.max_lanes or self.pace.lanes
        loads = []
        for group, choice in zip(groups, choices, strict=True):
            load = group.load(choice.engine, choice.slower)
            fit, _ = self.fit(group, load.width(most, workers))
            loads.append(dataclasses.replace(load, most=fit))
        if self.work is None:
            return widest(loads, workers, most)
        return lay_out(loads, self.work, workers, self.pace, most, alone=self.alone)

    def fit(self, group: Group, lanes: int) -> tuple[int, Need]:
        """How many of the lanes wanted fit into memory, and what a pack takes of it."""
        name = f"{group.detection.program.fingerprint} {lanes}"
        if name not in self.known:
            wanted = group.detection, self.dataset, self.devices, lanes
            self.known[name] = lanes_that_fit(*wanted)
        return self.known[name]


def _narrowed(spec: PackSpec, tail: Tail) -> PackSpec:
    return dataclasses.replace(spec, engine=tail.engine, num_lanes=tail.lanes)


def _choose(
    task: Task, groups: Sequence[Group], engine: str, widths: _Widths
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
    families: dict[Any, list[Group]] = {}
    for group in groups:
        if not group.detection.program.padded:
            families.setdefault(group.family, []).append(group)
    largest = {
        family: max(members, key=lambda g: g.detection.flops * g.steps)
        for family, members in families.items()
    }
    platform = widths.devices[0].platform
    choices = {
        f: usual(platform, group.detection.flops) for f, group in largest.items()
    }
    for family, members in families.items():
        work = sum(group.detection.flops * group.steps for group in members)
        if work / FLOPS / len(widths.devices) > WORTH_MEASURING:
            choices[family] = _fastest(task, groups, choices, largest[family], widths)
    shared = Choice("packed", "packed: batches of unlike sizes share a program")
    return [choices.get(group.family, shared) for group in groups]


def usual(platform: str, flops: float) -> Choice:
    """The engine for a training step of so many operations, where none is measured."""
    if platform != "cpu":
        return Choice("packed", f"packed: one trial does not fill a {platform}")
    if flops < TINY:
        size = f"{TINY / 1e6:g} million operations"
        reason = f"packed: on a CPU steps under {size} go faster in packs"
        return Choice("packed", reason)
    return Choice("solo", "solo: on a CPU one trial fills a core")


def _fastest(
    task: Task,
    groups: Sequence[Group],
    choices: Mapping[Any, Choice],
    group: Group,
    widths: _Widths,
) -> Choice:
    """The engine that trains a family the soonest by what its steps measure.

    The usual one unless it loses by a tenth. A pack that cannot be kept full is slower
    than its lanes are: what counts is the forecast of the whole.
    """
    detection, devices = group.detection, widths.devices

    def layout(choice: Choice) -> Layout:
        mine = {**choices, group.family: choice}
        packed = Choice("packed", "")  # What is padded stays so.
        return widths.of(groups, [mine.get(each.family, packed) for each in groups])

    place = next(i for i, each in enumerate(groups) if each is group)
    packed = layout(Choice("packed", "")).lanes[place]
    if packed < 2:
        return choices[group.family]
    candidates = [
        (PackSpec(detection.program, name, lanes, detection.state),)
        for name, lanes in (("packed", packed), ("solo", 1))
    ]
    trials = {detection.program: group.trials[0]}
    seconds = measure(task.dataset, trials, candidates, devices)
    load, found = group.load(choices[group.family].engine), {}
    for (spec,), time in seconds.items():
        step = time * spec.num_lanes * len(devices)
        load = load.measured(spec.engine, spec.num_lanes, step, widths.pace)
    for engine in ("packed", "solo"):
        of_engine = layout(Choice(engine, "", (), load.slower))
        found[engine] = of_engine.forecast.seconds
    before = choices[group.family].engine
    best = min(found, key=lambda name: found[name])
    if found[best] > 0.9 * found[before]:
        best = before
    figures = tuple(
        (f"{spec.engine} x {spec.num_lanes}", round(time * 1e6, 2))
        for (spec,), time in seconds.items()
    )
    shown = ", ".join(f"{name} {us:.4g} us" for name, us in figures)
    reason = f"{best}, by measurement; a lane-step, with all lanes full: {shown}"
    return Choice(best, reason, figures, load.slower)


def _fused_as_asked(
    packs: Sequence[PlannedPack],
    groups: Sequence[Group],
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
    groups: Sequence[Group],
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
        figures = (
            ("each alone", round(alone / lanes * 1e6, 2)),
            (f"fused of {len(members)}", round(seconds[members] * 1e6, 2)),
        )
        for i in part:
            fused[i] = dataclasses.replace(
                packs[i],
                reason=f"{packs[i].reason}; {reason}",
                measured=(*packs[i].measured, *figures),
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
