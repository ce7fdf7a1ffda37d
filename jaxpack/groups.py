"""Which trials share a program: those that one trace holds for."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jaxpack import threefry, trees
from jaxpack.detect import Detection, Kind, StaticHParamError, detect, kind_of
from jaxpack.dimensions import Dimension, Uniform
from jaxpack.space import Space
from jaxpack.step import BATCH_SIZE
from jaxpack.task import Task
from jaxpack.types import Trial
from jaxpack.widths import Load


class Architecture(NamedTuple):
    """What trials must have in common for one to tell what hparams do to another."""

    kinds: Mapping[str, Kind]
    model: Any

    def __str__(self) -> str:
        names = [name for name in self.kinds if name != "model"]
        model = [f"model={self.model!r}"] if "model" in self.kinds else []
        return ", ".join(model + names) or "no hparams"


@dataclasses.dataclass
class Group:
    """The trials of one program, and the steps they may be expected to train.

    `apart` has the fingerprints of the programs that they would have had apart.
    """

    detection: Detection
    architecture: Architecture
    trials: list[Trial] = dataclasses.field(default_factory=list)
    steps: float = 0.0
    apart: tuple[str, ...] = ()

    @property
    def num_params(self) -> int:
        """Weights of one trial."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.detection.state.params))

    def load(self, engine: str, slower: tuple[tuple[str, float], ...] = ()) -> Load:
        """The group, as the widths of its packs depend on it; see `Load`."""
        trials = tuple(trial.trial_id for trial in self.trials)
        found = self.detection
        state, mixed = trees.size_bytes(found.state), found.program.padded
        return Load(trials, engine, found.flops, state, slower, mixed=mixed)

    @property
    def family(self) -> tuple[Any, ...]:
        """What groups have in common that one measurement speaks for."""
        size = round(math.log(max(self.detection.flops, 1.0), 4))
        lanes = self.detection.program.lane_hparams
        return self.architecture.model, size, *(lane.name for lane in lanes)


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


def group_trials(
    task: Task,
    trials: Sequence[Trial],
    kinds: Sequence[Mapping[str, Kind]],
    total_steps: Sequence[int],
    expected_steps: Sequence[float],
) -> tuple[list[Group], dict[int, str]]:
    """Puts each trial to the first program that covers it, tracing new ones."""
    groups: list[Group] = []
    failed: dict[int, Exception] = {}
    architectures = [
        Architecture(its_kinds, trial.hparams.get("model"))
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
            group = Group(detection, architecture)
            groups.append(group)
        group.trials.append(trial)
        group.steps += steps
    _check_architectures(trials, architectures, failed)
    reasons = {i: f"{type(e).__name__}: {e}" for i, e in failed.items()}
    return groups, reasons


def _check_architectures(
    trials: Sequence[Trial],
    architectures: Sequence[Architecture],
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


def exchanged(
    groups: Sequence[Group], sets: Sequence[tuple[Sequence[Group], Group]]
) -> list[Group]:
    """The groups, with one in the place of each set of them."""
    gone = {id(group) for members, _ in sets for group in members}
    kept = [group for group in groups if id(group) not in gone]
    return kept + [one for _, one in sets]


def may_be_padded(group: Group) -> bool:
    """Whether batches of these trials may have padding that changes nothing."""
    kind = group.architecture.kinds.get(BATCH_SIZE)
    padded = kind is not None and kind.dtype == "int32" and not kind.static
    # Random numbers then depend on their place in the batch, not on its size.
    alike = padded and threefry.counts_by_place()
    return alike and not group.detection.program.mixes_examples


def but_for_batch_size(group: Group) -> Any:
    """What groups have in common that differ in their batch size alone."""
    detection, model = group.detection, group.architecture.model
    key = tuple((name, value) for name, value in detection.key if name != BATCH_SIZE)
    leaves, structure = jax.tree.flatten(detection.state)
    shapes = tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)
    return model, key, detection.program.lane_hparams, shapes, structure


def together(groups: Sequence[Group]) -> Group:
    """The trials of groups under the program of the largest batches."""
    largest = max(groups, key=lambda group: group.detection.program.batch_size)
    trials = [trial for group in groups for trial in group.trials]
    steps = sum(group.steps for group in groups)
    return dataclasses.replace(
        largest, trials=sorted(trials, key=lambda t: t.trial_id), steps=steps
    )


def merged(
    task: Task, groups: Sequence[Group], totals: Mapping[int, int]
) -> Group | None:
    """Groups of unlike batch sizes as one; None if no program can be that of all."""
    one = together(groups)
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
    apart = tuple(group.detection.program.fingerprint for group in groups)
    return dataclasses.replace(one, detection=found, apart=apart)
