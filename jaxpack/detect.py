"""Which hparams may differ between the lanes of one program, found by tracing.

Every hparam is first given as a traced value. Where the user's functions cannot take
one so (a layer's width, a string compared, a Python branch), it is static: a program
holds for one value of it. What is traced must then compute the same as what Python
values give: the two traces are compared equation by equation, and only where they
differ is one real step run both ways.
"""

from __future__ import annotations

import dataclasses
import linecache
import os
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import flax
import jax
import numpy as np
import optax

from jaxpack import jaxprs
from jaxpack.probe import Probe, Trace, agree, mixes_examples
from jaxpack.step import BATCH_SIZE, LaneHParam, Program
from jaxpack.task import Task
from jaxpack.types import HParams, PyTree

_LIBRARIES = tuple(
    os.path.dirname(os.path.abspath(module.__file__)) + os.sep
    for module in (jax, np, flax, optax)
)
_PADDED = "batches are padded to the largest"
_DIFFERS = "a step differs from the one that its Python value gives"
_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep


class Kind(NamedTuple):
    """How an hparam could enter a program, by the values it may take.

    Attributes:
      dtype: "float32", "int32" or "bool"; None if its values must be static.
      options: The strings it chooses between.
      continuous: Whether it is drawn from an interval, so that no two trials agree.
      static: What the user declared; None if nothing.
      why: Why its values must be static, where `dtype` is None.
      extremes: Its lowest and highest number, at which tracing is checked, too.
    """

    dtype: str | None
    options: tuple[str, ...] | None = None
    continuous: bool = False
    static: bool | None = None
    why: str = ""
    extremes: tuple[Any, ...] = ()


class StaticHParamError(ValueError):
    """An hparam has to be static without the user having said that it may be."""


class Finding(NamedTuple):
    """What was found out about one hparam.

    Attributes:
      name: Its name.
      per_lane: Whether it may differ between lanes of one program.
      reason: Why, in a few words.
      line: Where the user's code reads it, `file:line: code`; "" if nowhere.
    """

    name: str
    per_lane: bool
    reason: str
    line: str = ""


@dataclasses.dataclass(frozen=True)
class Detection:
    """The program that a trial belongs to, and how its hparams enter it.

    Attributes:
      program: The program.
      findings: One for each hparam.
      key: The hparams that fix the program, with the trial's values.
      state: Shapes and dtypes of one lane's state.
      flops: Of a training step, at least.
      scratch: Bytes of all values that a training step computes.
    """

    program: Program
    findings: tuple[Finding, ...]
    key: tuple[tuple[str, Any], ...]
    state: PyTree
    flops: float
    scratch: int

    def covers(self, hparams: Mapping[str, Any]) -> bool:
        """Whether a trial with these hparams has this program."""
        return all(
            (type(hparams[name]), hparams[name]) == (type(value), value)
            for name, value in self.key
        )


def kind_of(values: Sequence[Any], static: bool | None = None) -> Kind:
    """The kind of an hparam that takes these values.

    Examples:
      >>> kind_of([1, 2.5]).dtype, kind_of([3]).dtype, kind_of([True, False]).dtype
      ('float32', 'int32', 'bool')
      >>> kind_of(["relu", "tanh"]).options
      ('relu', 'tanh')
    """
    types = {type(value) for value in values}
    if static:
        return Kind(None, static=True, why="declared static")
    if types == {bool}:
        return Kind("bool", static=static)
    if types == {int}:
        if max(map(abs, values)) >= 2**31:
            return Kind(None, static=static, why="too large for int32")
        return Kind("int32", static=static, extremes=(min(values), max(values)))
    if types <= {int, float}:
        return Kind("float32", static=static, extremes=(min(values), max(values)))
    if types == {str}:
        options = tuple(dict.fromkeys(values))
        if len(options) > 1:
            return Kind("int32", options, static=static)
        return Kind(None, static=static, why="one string for all trials")
    return Kind(None, static=static, why="values of unlike types")


def detect(
    task: Task,
    hparams: HParams,
    kinds: Mapping[str, Kind],
    total_steps: int,
    like: Detection | None = None,
    padded_to: int | None = None,
) -> Detection:
    """Finds the program of one trial.

    Args:
      task: The task.
      hparams: The trial's hparams.
      kinds: The kind of each hparam.
      total_steps: The schedule's horizon in steps.
      like: What was found for another trial of the task: a first guess.
      padded_to: The size that batches are padded to, so that `batch_size` may differ
        between lanes; None where it fixes the program.

    Returns:
      Its program, which other trials with the same `key` share.

    Raises:
      StaticHParamError: If a continuous hparam has to be static without being
        declared so, or one declared `static=False` has to be.
      Exception: Whatever the task's own functions raise with Python values.
    """
    probe = Probe(task, hparams, total_steps, padded_to)
    python = probe.plain()  # The user's own errors come from here, as they are.
    reads = probe.reads
    found = _Found()
    candidates = _candidates(kinds, reads, found, padded=padded_to is not None)
    traced = _guess(probe, candidates, python, like, found)
    if traced is None:  # Something cannot be traced: take them one by one.
        traced = _one_by_one(probe, candidates, python, found)
    if like is None:  # What hparams do to one program, they do to the others.
        astray = _astray(probe, traced, kinds)
        if astray:
            found.reasons.update(dict.fromkeys(astray, _DIFFERS))
            kept = [lane for lane in traced.lanes if lane.name not in astray]
            traced = _one_by_one(probe, kept, python, found)

    lanes, reasons, hints = traced.lanes, found.reasons, found.hints
    names = {lane.name for lane in lanes}
    static = {n: value for n, value in probe.values.items() if n not in names}
    unread = [name for name in static if name not in reads and name != BATCH_SIZE]
    key = [(name, value) for name, value in static.items() if name not in unread]
    _check_declared(kinds, key, reasons, hints, reads)
    mixes = mixes_examples(probe, lanes)
    program = Program(
        fingerprint=_fingerprint(probe, traced, mixes),
        lane_hparams=lanes,
        batch_size=probe.batch_size,
        num_examples=task.dataset.num_train,
        eval_batch_size=task.eval_batch_size,
        mixes_examples=mixes,
        functions=task.functions,
        static=tuple({"total_steps": total_steps, **static}.items()),
    )
    return Detection(
        program=program,
        findings=_findings(kinds, reasons, reads, traced),
        key=tuple(key),
        state=traced.state,
        flops=jaxprs.flops(traced.step),
        scratch=jaxprs.value_bytes(traced.step),
    )


def _fingerprint(probe: Probe, traced: Trace, mixes: bool) -> str:
    """What tells programs apart: what they compute, and the forms they give it."""
    flats = traced.flat()
    if mixes:  # The short last batch is computed at its own size, without a mask.
        short = probe.short_batch()
        for other in (probe, short):
            flats += other.trace(traced.lanes, masked=False).flat()
    names = [name for name, _ in probe.functions.metrics]
    structures = str(jax.tree.structure((traced.state, probe.data)))
    padded = ["padded"] * any(lane.name == BATCH_SIZE for lane in traced.lanes)
    return jaxprs.fingerprint(flats, names, structures, *padded)


@dataclasses.dataclass(frozen=True)
class _Found:
    """Why hparams cannot be traced, and what may be done about it."""

    reasons: dict[str, str] = dataclasses.field(default_factory=dict)
    hints: dict[str, str] = dataclasses.field(default_factory=dict)


def _candidates(
    kinds: Mapping[str, Kind],
    reads: Mapping[str, Any],
    found: _Found,
    *,
    padded: bool,
) -> list[LaneHParam]:
    candidates = []
    for name, kind in kinds.items():
        if name == BATCH_SIZE and not padded:
            found.reasons[name] = "fixes the shapes"
        elif kind.dtype is None:
            found.reasons[name] = kind.why
        else:
            candidates.append(LaneHParam(name, kind.dtype, kind.options))
    if "total_steps" in reads:
        candidates.append(LaneHParam("total_steps", "int32"))
    return candidates


def _guess(
    probe: Probe,
    candidates: Sequence[LaneHParam],
    python: Trace,
    like: Detection | None,
    found: _Found,
) -> Trace | None:
    """Traces all candidates at once, or those that another trial's program has."""
    if like is None:
        return _try(probe, candidates, python, _Found())
    lanes = {lane.name for lane in like.program.lane_hparams}
    reasons = {finding.name: finding.reason for finding in like.findings}
    guess = [c for c in candidates if c.name in lanes or c.name not in probe.reads]
    static = {c.name: reasons.get(c.name, "") for c in candidates if c not in guess}
    traced = _try(probe, guess, python, _Found())
    if traced is not None:
        found.reasons.update(static)
    return traced


def _one_by_one(
    probe: Probe, candidates: Sequence[LaneHParam], python: Trace, found: _Found
) -> Trace:
    """Traces with as many of the candidates as can be arguments together."""
    traced = probe.trace(())
    for candidate in candidates:
        wider = _try(probe, (*traced.lanes, candidate), python, found)
        traced = wider or traced
    return traced


def _astray(probe: Probe, traced: Trace, kinds: Mapping[str, Kind]) -> list[str]:
    """The lanes for which a trace does not hold at their lowest or highest number.

    A condition whose error was caught, or an integer that overflows, shows there.
    """
    extremes = {
        lane.name: kinds[lane.name].extremes
        for lane in traced.lanes
        if lane.name in kinds and kinds[lane.name].extremes
    }

    def holds(values: dict[str, Any]) -> bool:
        other = probe.at(values)
        try:
            python = other.plain()
        except Exception:  # Such a trial fails by itself.
            return True
        return agree(other, traced.lanes, traced, python)

    ends = (0, -1)
    if all(holds({name: e[end] for name, e in extremes.items()}) for end in ends):
        return []
    return [
        name
        for name, e in extremes.items()
        if not all(holds({name: e[end]}) for end in ends)
    ]


def _try(
    probe: Probe,
    lanes: Sequence[LaneHParam],
    python: Trace,
    found: _Found,
) -> Trace | None:
    """Traces with `lanes` as arguments; None, and the last one's reason, if it fails.

    Any exception of the user's code under tracers makes the hparam static: there is
    no list of the ways in which Python code can need a value.
    """
    name = lanes[-1].name if lanes else ""
    reasons = found.reasons
    try:
        traced = probe.trace(lanes)
    except Exception as error:
        reasons[name], found.hints[name] = _explain(error)
        return None
    expected = python.state
    if choices := tuple(lane for lane in lanes if lane.options):
        # A switched optimizer has the states of all options once it is traced.
        expected = expected._replace(opt_state=probe.trace(choices).state.opt_state)
    if jax.tree.structure(traced.state) != jax.tree.structure(expected):
        reasons[name] = "the model's or optimizer's structure depends on it"
        return None
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(traced.state),
        jax.tree.leaves(expected),
        strict=True,
    ):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            leaf = jax.tree_util.keystr(path)
            reasons[name] = f"the shape or dtype of {leaf} depends on it"
            return None
    if not agree(probe, lanes, traced, python):
        reasons[name] = _DIFFERS
        return None
    return traced


def _explain(error: Exception) -> tuple[str, str]:
    """Why an hparam cannot be traced, with the place, and a remedy ("" if none)."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if _is_user_code(f.filename)]
    reason, hint = _reason(error)
    if own:
        place = own[-1]
        reason += f" at {os.path.basename(place.filename)}:{place.lineno}"
    if any(os.path.join("optax", "schedules") in f.filename for f in frames):
        hint = "take the schedule from jaxpack.schedules in place of optax's"
    return reason, hint


def _reason(error: Exception) -> tuple[str, str]:
    message = (str(error).strip().splitlines() or [""])[0]
    if isinstance(error, jax.errors.TracerArrayConversionError):
        hint = "use jax.numpy in place of numpy (jnp.log for np.log)"
        return "numpy needs its value", hint
    if isinstance(error, jax.errors.TracerBoolConversionError):
        hint = "use jnp.where in place of a Python condition"
        return "a Python condition needs its value", hint
    if isinstance(error, jax.errors.ConcretizationTypeError) or "hapes" in message:
        return "Python needs its value, for a size or the like", ""
    if isinstance(error, TypeError) and message.startswith("hparam "):
        return "its string is needed outside of jaxpack.switch", ""
    return f"{type(error).__name__}: {message[:80]}", ""


def _is_user_code(filename: str) -> bool:
    path = os.path.abspath(filename)
    if path.startswith(os.path.join(_PACKAGE, "models")):
        return True
    return not path.startswith((*_LIBRARIES, _PACKAGE)) and not filename.startswith("<")


def _place(filename: str, line: int) -> str:
    code = linecache.getline(filename, line).strip()
    return f"{os.path.basename(filename)}:{line}: {code}".rstrip(": ")


def _check_declared(
    kinds: Mapping[str, Kind],
    key: Sequence[tuple[str, Any]],
    reasons: Mapping[str, str],
    hints: Mapping[str, str],
    reads: Mapping[str, tuple[str, int]],
) -> None:
    for name, _ in key:
        kind = kinds.get(name)
        if kind is None or kind.static is True:
            continue
        if not kind.continuous and kind.static is not False:
            continue
        what = "is declared static=False" if kind.static is False else "is continuous"
        place = f" (read at {_place(*reads[name])})" if name in reads else ""
        remedy = hints.get(name, "")
        remedy = f"{remedy[0].upper()}{remedy[1:]}, or give" if remedy else "Give"
        raise StaticHParamError(
            f"hparam {name} {what}, but cannot differ between lanes{place}: "
            f"{reasons.get(name, 'it fixes the program')}. {remedy} it static=True to "
            "accept a program, and a compilation, for every value."
        )


def _findings(
    kinds: Mapping[str, Kind],
    reasons: Mapping[str, str],
    reads: Mapping[str, tuple[str, int]],
    traced: Trace,
) -> tuple[Finding, ...]:
    reached = set().union(*map(jaxprs.used, traced.flat()))
    order = sorted(lane.name for lane in traced.lanes)
    findings = []
    for name in kinds:
        line = _place(*reads[name]) if name in reads else ""
        per_lane = name in order
        if name == BATCH_SIZE:
            reason = reasons.get(name, _PADDED)
        elif name == "seed" and name not in reads:
            reason = "enters the trial's random key"
        elif name not in reads or (per_lane and order.index(name) not in reached):
            per_lane, reason = True, "never used"
        elif per_lane:
            reason = "a traced argument"
        else:
            reason = reasons.get(name, "")
        findings.append(Finding(name, per_lane, reason, line))
    return tuple(findings)
