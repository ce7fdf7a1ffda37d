"""One trial's step on a small scale, traced or run in one way or another."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Generator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpack import jaxprs, step, trees
from jaxpack.step import LaneHParam
from jaxpack.task import Functions, Task, check_batch_size
from jaxpack.types import HParams, LaneState, PyTree

TOLERANCE = 1e-5
_CHEAP: dict[str, bool | str] = {"xla_backend_optimization_level": "0"}


class Trace(NamedTuple):
    """The probe traced with `lanes` as arguments, the other hparams Python values.

    The step is traced apart from the initialisation: after it, the first step's
    count would be a known zero, and schedules would fold away.
    """

    lanes: tuple[LaneHParam, ...]
    init: Any
    step: Any
    state: PyTree

    def flat(self, known: Mapping[int, Any] | None = None) -> tuple[jaxprs.Flat, ...]:
        """Both computations, flattened."""
        return tuple(jaxprs.flatten(jaxpr, known) for jaxpr in (self.init, self.step))


class Probe:
    """A trial's initialisation, one step and one evaluation.

    Args:
      task: The task.
      hparams: The trial's hparams.
      total_steps: Its schedule's horizon.

    Attributes:
      values: The hparams as Python values, `total_steps` among them.
      ragged: Whether an epoch ends with a short batch.
      reads: The hparams read so far, with the file and line that read each first.
    """

    SIZE = 4

    def __init__(self, task: Task, hparams: HParams, total_steps: int):
        self.functions: Functions = task.functions
        self.batch_size = check_batch_size(
            hparams.get("batch_size", task.batch_size), task.dataset.num_train
        )
        self.values = dict(hparams) | {"total_steps": total_steps}
        self.steps_per_epoch = -(-task.dataset.num_train // self.batch_size)
        self.ragged = bool(task.dataset.num_train % self.batch_size)
        self.data = task.dataset.train
        self.reads: dict[str, tuple[str, int]] = {}

    def bind(
        self, lanes: Sequence[LaneHParam], values: Mapping[str, jax.Array]
    ) -> HParams:
        """The hparams with `lanes` taken from `values`, the rest Python values."""
        names = {lane.name for lane in lanes}
        static = tuple((n, v) for n, v in self.values.items() if n not in names)
        return step.bind_hparams(tuple(lanes), static, values, self.steps_per_epoch)

    def init(
        self, lanes: Sequence[LaneHParam], values: Any, seed: Any, x: PyTree
    ) -> LaneState:
        """The trial's state before its first step."""
        with self._noting_reads(lanes, values) as hp:
            return step.init(self.functions, hp, seed, seed, x)

    def step(
        self,
        lanes: Sequence[LaneHParam],
        values: Any,
        state: LaneState,
        x: PyTree,
        y: PyTree,
        mask: Any,
    ) -> tuple[LaneState, PyTree]:
        """The state after one step, and the parts of the metrics on its batch."""
        with self._noting_reads(lanes, values) as hp:
            new, _ = step.update(self.functions, hp, state, x, y, mask)
            return new, step.metric_parts(
                self.functions, hp, new.params, new.model_state, x, y, mask
            )

    def trace(self, lanes: Sequence[LaneHParam]) -> Trace:
        """Traces both with `lanes` as arguments, at the trial's batch size."""
        lanes = tuple(lanes)
        values = step.lane_avals(lanes)
        size = self.batch_size
        batch = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((size, *leaf.shape[1:]), leaf.dtype),
            self.data,
        )
        seed = jax.ShapeDtypeStruct((), np.uint32)
        mask = jax.ShapeDtypeStruct((size,), bool) if self.ragged else None
        init = functools.partial(self.init, lanes)
        init_jaxpr, shapes = jax.make_jaxpr(init, return_shape=True)(
            values, seed, batch[0]
        )
        state = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), shapes)
        one_step = functools.partial(self.step, lanes)
        step_jaxpr = jax.make_jaxpr(one_step)(values, state, *batch, mask)
        return Trace(lanes, init_jaxpr, step_jaxpr, state)

    @contextlib.contextmanager
    def _noting_reads(
        self, lanes: Sequence[LaneHParam], values: Mapping[str, jax.Array]
    ) -> Generator[HParams]:
        hp = self.bind(lanes, values)
        try:
            yield hp
        finally:
            for name, place in hp.reads_.items():
                self.reads.setdefault(name, place)

    def small_batch(self) -> tuple[PyTree, PyTree]:
        """A few training examples, for checks that run."""
        return jax.tree.map(lambda leaf: leaf[: self.SIZE], self.data)


def agree(
    probe: Probe, lanes: Sequence[LaneHParam], traced: Trace, python: Trace
) -> bool:
    """Whether the traced probe computes what the Python-valued one does.

    A choice between strings stays traced on both sides: `TracedChoice` lets nothing
    but a switch look at it, so it cannot lead the user's code astray.
    """
    choices = tuple(lane for lane in lanes if lane.options)
    other = probe.trace(choices) if choices else python
    values = step.lane_values(tuple(lanes), probe.values)
    names = sorted(values)
    known = {
        i: values[name]
        for i, name in enumerate(names)
        if name not in {choice.name for choice in choices}
    }
    a, b = traced.flat(known), other.flat()
    if all(map(jaxprs.same, a, b)):
        return True
    return _once(
        ("agree", jaxprs.fingerprint(a), jaxprs.fingerprint(b)),
        lambda: _difference(probe, lanes, choices) <= TOLERANCE,
    )


def _difference(
    probe: Probe, lanes: Sequence[LaneHParam], others: Sequence[LaneHParam]
) -> float:
    """Runs the probe with two sets of traced hparams and compares the states."""
    x, y = probe.small_batch()
    size = jax.tree.leaves(x)[0].shape[0]
    mask = np.ones(size, bool) if probe.ragged else None

    def compare(values: Any, other_values: Any, seed: Any) -> jax.Array:
        def run(lanes: Sequence[LaneHParam], values: Any) -> PyTree:
            state = probe.init(lanes, values, seed, x)
            return state, probe.step(lanes, values, state, x, y, mask)

        a, b = run(lanes, values), run(others, other_values)
        return jnp.stack(jax.tree.leaves(jax.tree.map(_distance, a, b))).max()

    arguments = [step.lane_values(tuple(ls), probe.values) for ls in (lanes, others)]
    shapes = [step.lane_avals(tuple(ls)) for ls in (lanes, others)]
    seed = np.uint32(0)
    lowered = jax.jit(compare).lower(*shapes, trees.avals(seed))
    return float(lowered.compile(compiler_options=_CHEAP)(*arguments, seed))


def _distance(a: jax.Array, b: jax.Array) -> jax.Array:
    """Largest difference, relative above 1; NaN agrees with NaN."""
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        return jnp.any(a != b).astype(jnp.float32)
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    close = (a == b) | (jnp.isnan(a) & jnp.isnan(b))
    distance = jnp.abs(a - b) / jnp.maximum(1, jnp.abs(b))
    distance = jnp.where(jnp.isnan(distance), jnp.inf, distance)
    return jnp.max(jnp.where(close, 0, distance), initial=0)


def mixes_examples(probe: Probe, lanes: tuple[LaneHParam, ...]) -> bool:
    """Whether padding rows change a training step in spite of the mask.

    Runs the training pass twice on a small batch, with other examples in the padding
    rows, and compares what the real rows and the model's state come to.
    """
    x, _ = probe.small_batch()
    size = jax.tree.leaves(x)[0].shape[0]
    if not probe.ragged or size < 2:
        return False
    real = size // 2
    mask = np.arange(size) < real

    def train(values: Any, x: PyTree) -> tuple[PyTree, PyTree]:
        hp = probe.bind(lanes, values)
        key = step.trial_key(np.uint32(0), np.uint32(0))
        variables = probe.functions.init(key, hp, x)
        outputs, model_state = probe.functions.apply(
            variables, hp, x, train=True, key=key, mask=mask
        )
        return jax.tree.map(lambda leaf: leaf[:real], outputs), model_state

    def compare(values: Any) -> jax.Array:
        def others(leaf: np.ndarray) -> np.ndarray:
            return np.concatenate([leaf[:real], np.roll(leaf, 1, 0)[real:][::-1]])

        a, b = train(values, x), train(values, jax.tree.map(others, x))
        return jnp.stack(jax.tree.leaves(jax.tree.map(_distance, a, b))).max()

    traced = jax.jit(compare).trace(step.lane_avals(lanes))

    def run() -> bool:
        compiled = traced.lower().compile(compiler_options=_CHEAP)
        return float(compiled(step.lane_values(lanes, probe.values))) > TOLERANCE

    name = jaxprs.fingerprint([jaxprs.flatten(traced.jaxpr)])
    return _once(("mixes", name), run)


_answers: dict[Any, bool] = {}
_lock = threading.Lock()


def _once(question: Any, answer: Any) -> bool:
    """Answers a question about a computation once in the life of the process."""
    with _lock:
        if question not in _answers:
            _answers[question] = answer()
        return _answers[question]
