"""A pack on a device: filled with trials, advanced, and drained."""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpack import executables, step, trees
from jaxpack.data import Dataset, deck, window_epochs
from jaxpack.engines import PackSpec
from jaxpack.types import HParams, LaneState, PyTree

SEGMENT_SECONDS = 2.0
"""Longest a segment should run, so that progress shows and a stop is heeded."""
FIRST_SEGMENT = 64
"""Steps of a pack's first segment, before its speed is known."""

MAX_EPOCHS = 4096
"""Epochs of the deck made at a time, at most: they take time to make, too."""


class Ready(NamedTuple):
    """A trial that is ready to train.

    Attributes:
      order: Sorts the ready trials; the smallest goes first.
      trial_id: The trial.
      pack: The pack it fits into.
      lane: Its per-lane hparams.
      trial_seed: What its random key comes from besides the sweep's seed.
      state: Where it goes on from, on the host; None to initialise it.
      step: Steps it has taken.
      stops: Steps at which it is evaluated, ascending; after the last it is done.
      hparams: Its hparams, by which a policy chooses its companions.
    """

    order: tuple[float, ...]
    trial_id: int
    pack: PackSpec
    lane: dict[str, np.generic]
    trial_seed: int
    state: LaneState | None
    step: int
    stops: tuple[int, ...]
    hparams: HParams = HParams({})


class Reading(NamedTuple):
    """A trial's evaluation.

    Attributes:
      trial_id: The trial.
      steps: Steps taken.
      metrics: The loss and each metric; empty if training failed before.
      train_loss: Mean training loss since the start of the last epoch.
      first_bad_step: The first step whose loss was not finite, or None.
      state: The trial's state, copied to the host.
      done: Whether the trial has left its lane.
      seconds: The trial's share of its pack's training time since its last reading.
      reason: Why the trial could not be trained, or None.
    """

    trial_id: int
    steps: int
    metrics: dict[str, float]
    train_loss: float
    first_bad_step: int | None
    state: LaneState | None
    done: bool
    seconds: float
    reason: str | None = None


class Feed:
    """The dataset and the deck on one device.

    Attributes:
      train: Training inputs and labels.
      evaluation: Inputs and labels of the other splits, one after the other.
      splits: Where each of those starts and how many examples it has.
      window: Epochs of the deck that are on the device at a time.
    """

    def __init__(
        self, dataset: Dataset, seed: int, num_epochs: int, device: jax.Device
    ):
        self.device = device
        self.train = jax.device_put(dataset.train, device)
        splits = {"validation": dataset.validation, "test": dataset.test}
        splits = {name: data for name, data in splits.items() if data is not None}
        self.evaluation = jax.device_put(
            jax.tree.map(lambda *leaves: np.concatenate(leaves), *splits.values()),
            device,
        )
        self.splits: dict[str, tuple[np.int32, np.int32]] = {}
        first = 0
        for name, data in splits.items():
            count = len(jax.tree.leaves(data)[0])
            self.splits[name] = np.int32(first), np.int32(count)
            first += count
        self.seed, self.num_examples = seed, dataset.num_train
        # A power of two, so that a longer call finds its programs compiled.
        self.num_epochs = max(num_epochs, 1)
        rows = min(1 << (self.num_epochs - 1).bit_length(), MAX_EPOCHS)
        self.window = window_epochs(self.num_examples, rows)
        self._lock = threading.Lock()
        self._first: int | None = None
        self._deck: jax.Array | None = None

    def deck(self, epoch: int) -> tuple[jax.Array, int]:
        """A window of the deck that holds `epoch`, and the epoch of its first row."""
        first = epoch if self.window < self.num_epochs else 0
        with self._lock:
            if self._deck is None or self._first != first:
                rows = np.zeros((self.window, self.num_examples), np.int32)
                filled = max(1, min(self.window, self.num_epochs - first))
                rows[:filled] = deck(self.seed, self.num_examples, filled, first)
                self._first, self._deck = first, jax.device_put(rows, self.device)
            return self._deck, first


class Usage(NamedTuple):
    """What a pack has used up since it was last asked.

    Attributes:
      lane_steps: Training steps, each lane's counted.
      computed: The same with empty and frozen lanes counted too.
      train_seconds: Time spent training.
      eval_seconds: Time spent evaluating.
      swaps: Trials put into a lane.
      swap_seconds: Time spent on that.
    """

    lane_steps: int = 0
    computed: int = 0
    train_seconds: float = 0.0
    eval_seconds: float = 0.0
    swaps: int = 0
    swap_seconds: float = 0.0


@dataclasses.dataclass
class _Lane:
    """A trial in a lane."""

    ready: Ready
    step: int
    stops: list[int]
    first_bad_step: int | None = None
    seconds: float = 0.0

    @property
    def steps_per_epoch(self) -> int:
        return int(self.ready.pack.program.steps_per_epoch(self.ready.lane))

    @property
    def due(self) -> bool:
        return self.first_bad_step is not None or self.step == self.stops[0]


class Pack:
    """The states of the trials of one program that train together on one device.

    A `Bundle` advances it.

    Args:
      spec: What to build.
      feed: The data on the device.
      seed: The sweep's seed.
      log: Where compilations are recorded.
    """

    def __init__(
        self, spec: PackSpec, feed: Feed, seed: int, log: executables.CompileLog
    ):
        self.spec, self.feed, self.log = spec, feed, log
        self.seed = np.uint32(seed)
        self.live: dict[int, _Lane] = {}
        self.usage = Usage()
        self.steps: Counter[int] = Counter()  # lane-steps by steps an epoch
        self.spans: list[tuple[float, dict[str, float]]] = []
        self._lane_avals = step.lane_avals(spec.program.lane_hparams)
        self._states_avals, hparams_avals = argument_avals(spec)
        self._hparams = trees.zeros(hparams_avals)
        # An empty lane's target is 0: it is not trained.
        self._states = jax.device_put(trees.zeros(self._states_avals), feed.device)

    @property
    def order(self) -> tuple[float, ...]:
        """That of its first trial."""
        return min(lane.ready.order for lane in self.live.values())

    @property
    def num_free(self) -> int:
        """Lanes without a trial."""
        return self.spec.num_lanes - len(self.live)

    def put(self, ready: Ready) -> None:
        """Puts a trial into a free lane."""
        lane = next(i for i in range(self.spec.num_lanes) if i not in self.live)
        state = ready.state
        if state is None:
            _ = self._init  # Compiled before the clock starts.
        if self.spec.lane_axis is not None:
            _ = self._put
        start = time.perf_counter()
        if state is None:
            seeds = self.seed, np.uint32(ready.trial_seed)
            state = self._init(ready.lane, *seeds, self.feed.train)
        state = state._replace(target_step=np.int32(ready.stops[-1]))
        if self.spec.lane_axis is None:
            # Copied, because it is donated: the caller's arrays must stay as they are.
            self._states = jax.device_put(state, self.feed.device, may_alias=False)
            self._hparams = ready.lane
        else:
            self._states = self._put(self._states, state, np.int32(lane))
            for name, value in ready.lane.items():
                self._hparams[name][lane] = value
        self.live[lane] = _Lane(ready, ready.step, list(ready.stops))
        self._use(swaps=1, swap_seconds=time.perf_counter() - start)

    @property
    def running(self) -> list[_Lane]:
        """The lanes that have not got to where they are evaluated."""
        return [lane for lane in self.live.values() if not lane.due]

    @property
    def arguments(self) -> tuple[LaneState, dict[str, Any]]:
        """The lanes' states and hparams, as a program takes them."""
        return self._states, self._hparams

    def replace(self, states: LaneState) -> None:
        """Takes the lanes' new states, as a program has returned them."""
        self._states = states

    def book(self, steps: int, end: int, seconds: float) -> None:
        """Books a segment that the states have been through.

        Args:
          steps: Its steps.
          end: The epoch at whose start the deck on the device ends.
          seconds: What it took, for each lane that was trained.
        """
        bad = np.atleast_1d(self._states.first_bad_step)
        running = {
            i: lane
            for i, lane in self.live.items()
            if not lane.due and lane.step < end * lane.steps_per_epoch
        }
        before = sum(lane.step for lane in running.values())
        for i, lane in running.items():
            self.steps[lane.steps_per_epoch] -= lane.step
            lane.seconds += seconds
            lane.step += steps
            if bad[i] >= 0:
                lane.first_bad_step = int(bad[i])
                lane.step = lane.first_bad_step + 1
            self.steps[lane.steps_per_epoch] += lane.step
        self._use(
            lane_steps=sum(lane.step for lane in running.values()) - before,
            computed=steps * self.spec.num_lanes if running else 0,
            train_seconds=seconds * len(running),
        )

    def drain(self) -> list[Reading]:
        """Evaluates the lanes that have got to a stop, and frees those that are done.

        A trial whose training failed is done at once, without an evaluation.
        """
        due = [(i, lane) for i, lane in self.live.items() if lane.due]
        if any(lane.first_bad_step is None for _, lane in due):
            _ = self._evaluate  # Compiled before the clock starts.
        start = time.perf_counter()
        evaluated = [self._evaluated(i, lane) for i, lane in due]
        evaluated = [(trees.to_host(s), jax.device_get(m)) for s, m in evaluated]
        self._use(eval_seconds=time.perf_counter() - start)
        return [
            self._reading(i, lane, *states_and_metrics)
            for (i, lane), states_and_metrics in zip(due, evaluated, strict=True)
        ]

    def rescue(self) -> list[Ready]:
        """The pack's trials, ready to go on elsewhere; the pack is of no more use.

        A trial goes on from where it is, or, should its state have been lost with a
        step that failed, from where it entered its lane.
        """
        leaves = jax.tree.leaves(self._states)
        if any(isinstance(x, jax.Array) and x.is_deleted() for x in leaves):
            return [lane.ready for lane in self.live.values()]
        states = self.states()
        rescued = []
        for lane in self.live.values():
            state = states[lane.ready.trial_id]
            going_on = {"state": state, "step": lane.step, "stops": tuple(lane.stops)}
            rescued.append(lane.ready._replace(**going_on))
        return rescued

    def states(self) -> dict[int, LaneState]:
        """The state of every trial in the pack, copied to the host."""
        states = trees.to_host(self._states)
        axis = self.spec.lane_axis
        return {
            lane.ready.trial_id: states
            if axis is None
            else jax.tree.map(lambda leaf, i=i: np.array(leaf[i]), states)
            for i, lane in self.live.items()
        }

    def _evaluated(self, i: int, lane: _Lane) -> tuple[LaneState, dict[str, Any]]:
        """A lane's state and metrics, on the device; nothing waits for them here."""
        state = self._states
        if self.spec.lane_axis is not None:
            state = self._take(self._states, np.int32(i))
        if lane.first_bad_step is not None:
            return state, {}
        metrics = self._evaluate(
            state.params,
            state.model_state,
            lane.ready.lane,
            self.feed.evaluation,
            *self.feed.splits["validation"],
        )
        return state, metrics

    def _reading(
        self, i: int, lane: _Lane, state: LaneState, metrics: dict[str, Any]
    ) -> Reading:
        bad = lane.first_bad_step
        done = bad is not None or len(lane.stops) == 1
        reading = Reading(
            trial_id=lane.ready.trial_id,
            steps=lane.step,
            metrics=as_floats(metrics),
            train_loss=_train_loss(state),
            first_bad_step=bad,
            state=state,
            done=done,
            seconds=lane.seconds,
        )
        lane.seconds = 0.0
        if done:
            del self.live[i]
        else:
            lane.stops.pop(0)
        return reading

    def _use(self, **amounts: float) -> None:
        used = {name: getattr(self.usage, name) + n for name, n in amounts.items()}
        self.usage = self.usage._replace(**used)
        self.spans.append((time.perf_counter(), amounts))

    @functools.cached_property
    def _init(self) -> Callable[..., LaneState]:
        program = self.spec.program

        def init(lane: Any, seed: Any, trial: Any, train: Any) -> LaneState:
            x = jax.tree.map(lambda leaf: leaf[:1], train[0])
            hp = step.bind(program, lane)
            return step.init(program.functions, hp, seed, trial, x)

        seed = jax.ShapeDtypeStruct((), np.uint32)
        arguments = (self._lane_avals, seed, seed, trees.avals(self.feed.train))
        return self._compiled("init", init, arguments, program, runs_rarely=True)

    @functools.cached_property
    def _put(self) -> Callable[..., LaneState]:
        arguments = (self._states_avals, self.spec.state, _INT)
        return self._compiled("put", trees.put, arguments, None, donate=(0,))

    @functools.cached_property
    def _take(self) -> Callable[..., LaneState]:
        return self._compiled("take", trees.take, (self._states_avals, _INT), None)

    @functools.cached_property
    def _evaluate(self) -> Callable[..., dict[str, jax.Array]]:
        return evaluation(self.spec, self.feed, self.log)

    def _compiled(
        self,
        name: str,
        function: Callable[..., Any],
        arguments: Sequence[PyTree],
        identity: Any,
        donate: tuple[int, ...] = (),
        runs_rarely: bool = False,
    ) -> Callable[..., Any]:
        return executables.get(
            name,
            function,
            arguments,
            identity=identity,
            device=self.feed.device,
            log=self.log,
            donate=donate,
            runs_rarely=runs_rarely,
        )


_INT = jax.ShapeDtypeStruct((), np.int32)


def argument_avals(spec: PackSpec) -> tuple[PyTree, PyTree]:
    """Shapes and dtypes of a pack's states and hparams, as a program takes them."""
    width = spec.lane_axis
    hparams = step.lane_avals(spec.program.lane_hparams, width)
    return trees.avals(spec.state, width), hparams


def evaluation(
    spec: PackSpec, feed: Feed, log: executables.CompileLog
) -> Callable[..., dict[str, jax.Array]]:
    """The compiled `step.evaluate` of one trial, for every split and engine."""
    arguments = (
        spec.state.params,
        spec.state.model_state,
        step.lane_avals(spec.program.lane_hparams),
        trees.avals(feed.evaluation),
        _INT,
        _INT,
    )
    return executables.get(
        "evaluate",
        functools.partial(step.evaluate, spec.program),
        arguments,
        identity=spec.program,
        device=feed.device,
        log=log,
    )


def as_floats(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Metrics as Python floats, each the shortest that rounds to its float32.

    Examples:
      >>> as_floats({"accuracy": np.float32(0.944)})
      {'accuracy': 0.944}
    """
    return {name: float(str(np.float32(value))) for name, value in metrics.items()}


def _train_loss(state: LaneState) -> float:
    """The mean training loss of the epoch in progress or just done; NaN before any."""
    weight = float(state.epoch_weight)
    return float(state.epoch_loss) / weight if weight else math.nan
