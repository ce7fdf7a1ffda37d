"""One trial's step on a small scale, traced or run in one way or another."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Generator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpack import jaxprs, nn, step, trees
from jaxpack.step import LaneHParam
from jaxpack.task import (
    Functions,
    Task,
    check_batch_size,
    mean_parts,
    per_example,
)
from jaxpack.types import HParams, LaneState, PyTree, TracedChoice

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
    evaluation: Any
    state: PyTree

    def flat(self, known: Mapping[int, Any] | None = None) -> tuple[jaxprs.Flat, ...]:
        """All three computations, flattened."""
        return tuple(
            jaxprs.flatten(jaxpr, known)
            for jaxpr in (self.init, self.step, self.evaluation)
        )


class Probe:
    """A trial's initialisation, one step and one evaluation.

    Args:
      task: The task.
      hparams: The trial's hparams.
      total_steps: Its schedule's horizon.
      padded_to: The size that its batches are padded to, if they are.

    Attributes:
      values: The hparams as Python values, `total_steps` among them.
      inactive: The hparams that only other trials have, and what theirs depend on.
      ragged: Whether a batch may have padding.
      reads: The hparams read so far, with the file and line that read each first.
    """

    SIZE = 4

    def __init__(
        self,
        task: Task,
        hparams: HParams,
        total_steps: int,
        padded_to: int | None = None,
    ):
        self.functions: Functions = task.functions
        self.batch_size = check_batch_size(
            hparams.get("batch_size", task.batch_size), task.dataset.num_train
        )
        self.values = dict(hparams) | {"total_steps": total_steps}
        self.inactive = hparams.inactive_
        self.num_examples = task.dataset.num_train
        self.own_batch_size = self.batch_size
        self.ragged = bool(self.num_examples % self.batch_size)
        if padded_to is not None:
            self.batch_size, self.ragged = padded_to, True
        self.eval_batch_size = task.eval_batch_size
        self.data = task.dataset.train
        self.reads: dict[str, tuple[str, int]] = {}

    def bind(
        self, lanes: Sequence[LaneHParam], values: Mapping[str, jax.Array]
    ) -> HParams:
        """The hparams with `lanes` taken from `values`, the rest Python values."""
        names = {lane.name for lane in lanes}
        static = tuple((n, v) for n, v in self.values.items() if n not in names)
        size: Any = self.values.get(step.BATCH_SIZE, self.own_batch_size)
        if step.BATCH_SIZE in names:
            size = values[step.BATCH_SIZE]
        spe = -(-self.num_examples // size)
        return step.bind_hparams(tuple(lanes), static, values, spe, self.inactive)

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
        """The state after one step, and the parts of the batch's loss."""
        with self._noting_reads(lanes, values) as hp:
            return step.update(self.functions, hp, state, x, y, mask)

    def evaluation(
        self,
        lanes: Sequence[LaneHParam],
        values: Any,
        state: LaneState,
        x: PyTree,
        y: PyTree,
        mask: Any,
    ) -> PyTree:
        """The parts of the loss and of each metric on a batch."""
        with self._noting_reads(lanes, values) as hp:
            return step.metric_parts(
                self.functions, hp, state.params, state.model_state, x, y, mask
            )

    def trace(self, lanes: Sequence[LaneHParam], *, masked: bool = True) -> Trace:
        """Traces all three with `lanes` as arguments, at the sizes that will run.

        Args:
          lanes: The hparams that are arguments.
          masked: Whether a short batch is padded and masked, as is usual.
        """
        lanes = tuple(lanes)
        values, seed = step.lane_avals(lanes), jax.ShapeDtypeStruct((), np.uint32)
        init = functools.partial(self.init, lanes)
        init_jaxpr, shapes = jax.make_jaxpr(init, return_shape=True)(
            values, seed, self.batch_avals(1)[0]
        )
        state = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), shapes)
        size = self.batch_size
        mask = _mask_aval(size) if self.ragged and masked else None
        update = functools.partial(self.step, lanes)
        step_jaxpr = jax.make_jaxpr(update)(
            values, state, *self.batch_avals(size), mask
        )
        size = self.eval_batch_size
        evaluate = functools.partial(self.evaluation, lanes)
        evaluation_jaxpr = jax.make_jaxpr(evaluate)(
            values, state, *self.batch_avals(size), _mask_aval(size)
        )
        return Trace(lanes, init_jaxpr, step_jaxpr, evaluation_jaxpr, state)

    def plain(self, choices: Sequence[LaneHParam] = ()) -> Trace:
        """Traces all three with Python values, to compare with what is traced.

        Stock dropout has the form it has at a traced rate. Otherwise every model with
        a rate of 0 would differ, and its step would have to be compiled and run.

        Args:
          choices: Choices between strings, which stay arguments.
        """
        with nn.any_rate():
            return self.trace(choices)

    def batch_avals(self, size: int) -> tuple[PyTree, PyTree]:
        """Shapes and dtypes of a batch."""
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((size, *leaf.shape[1:]), leaf.dtype),
            self.data,
        )

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
        for value in hp.values():
            if isinstance(value, TracedChoice) and value.refused:
                value.refuse()  # Again, as the user's code has caught it.

    def at(self, values: Mapping[str, Any]) -> Probe:
        """The same probe with other values of some hparams."""
        other = copy.copy(self)
        other.values, other.reads = {**self.values, **values}, dict(self.reads)
        return other

    def short_batch(self) -> Probe:
        """The same probe at the size of an epoch's last batch."""
        short = copy.copy(self)
        short.batch_size = jax.tree.leaves(self.data)[0].shape[0] % self.batch_size
        return short

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
    other = probe.plain(choices) if choices else python
    values = step.lane_values(tuple(lanes), probe.values)
    known = {
        i: values[name]
        for i, name in enumerate(sorted(values))
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
            new, loss = probe.step(lanes, values, state, x, y, mask)
            all_real = np.ones(size, bool)
            metrics = probe.evaluation(lanes, values, new, x, y, all_real)
            return state, new, loss, metrics

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

    Runs the training pass and the loss twice on a small batch, with quite other
    examples in the padding rows, and compares what the real rows, the loss and the
    model's state come to.
    """
    count = jax.tree.leaves(probe.data)[0].shape[0]
    if not probe.ragged or count < 2:
        return False
    real = min(2, count // 2)
    # Rows from all over the data, so that their integers differ, too.
    padding = np.linspace(count // 2, count - 1, Probe.SIZE - real).astype(int)
    mask = np.arange(Probe.SIZE) < real

    def others(leaf: np.ndarray) -> np.ndarray:
        rows = leaf[np.concatenate([np.arange(real), padding[::-1]])]
        if rows.dtype.kind not in "iub":
            rows[real:] = -3 * rows[real:] + 1
        return rows

    plain = jax.tree.map(
        lambda leaf: leaf[np.concatenate([np.arange(real), padding])], probe.data
    )
    other = jax.tree.map(others, probe.data)

    def train(values: Any, x: PyTree, y: PyTree) -> PyTree:
        hp = probe.bind(lanes, values)
        key = step.trial_key(np.uint32(0), np.uint32(0))
        variables = probe.functions.init(key, hp, x)
        x = step.augmented(probe.functions, hp, key, 0, x)
        outputs, model_state = probe.functions.apply(
            variables, hp, x, train=True, key=key, mask=mask
        )
        value, weight = per_example(
            probe.functions.loss, "loss", outputs, y, hp, Probe.SIZE
        )
        real_rows = jax.tree.map(lambda leaf: leaf[:real], outputs)
        return real_rows, mean_parts(value, weight, mask), model_state

    def compare(values: Any) -> jax.Array:
        distances = jax.tree.map(
            _distance, train(values, *plain), train(values, *other)
        )
        return jnp.stack(jax.tree.leaves(distances)).max()

    traced = jax.jit(compare).trace(step.lane_avals(lanes))

    def run() -> bool:
        compiled = traced.lower().compile(compiler_options=_CHEAP)
        return float(compiled(step.lane_values(lanes, probe.values))) > TOLERANCE

    name = jaxprs.fingerprint([jaxprs.flatten(traced.jaxpr)])
    return _once(("mixes", name), run)


def _mask_aval(size: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((size,), bool)


_answers: dict[Any, bool] = {}
_lock = threading.Lock()


def _once(question: Any, answer: Any) -> bool:
    """Answers a question about a computation once in the life of the process."""
    with _lock:
        if question not in _answers:
            _answers[question] = answer()
        return _answers[question]
