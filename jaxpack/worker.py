"""Workers: threads that take ready trials into lanes and advance them.

A `Pool` holds the trials that are ready to train. Its workers put them into the lanes
of packs, advance the packs segment by segment, evaluate the trials that have got to
where a score is wanted, and hand them on as readings.
"""

from __future__ import annotations

import bisect
import dataclasses
import logging
import math
import queue
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from jaxpack.bundle import Bundle
from jaxpack.data import Dataset
from jaxpack.engines import PackSpec
from jaxpack.executables import CompileLog, out_of_memory, settings, under
from jaxpack.pack import Feed, Reading, Ready, Usage, as_floats, evaluation
from jaxpack.policies import Candidate, Policy
from jaxpack.timeline import Timeline
from jaxpack.types import LaneState

_log = logging.getLogger("jaxpack")


@dataclasses.dataclass
class Stats:
    """What a call has cost so far.

    Attributes:
      lane_steps: Training steps, each lane's counted.
      lane_epochs: The same in epochs.
      compiles: Programs compiled (those found in a cache on disk do not count).
      compiles_by_name: The same by program.
      compile_seconds: Time spent compiling, summed over the workers.
      train_seconds: Time spent training, summed over the workers.
      eval_seconds: Time spent evaluating, summed over the workers.
      swaps: Trials put into a lane.
      swap_seconds: Time spent on that, summed over the workers.
      wall_seconds: Time from start to end.
      occupancy: Share of the lane-steps computed that trained a trial.
      workers: Worker threads.
      checkpoints: Checkpoints written to disk.
      checkpoint_seconds: Time spent writing them, beside the training.
      checkpoint_bytes: What the newest took up on disk.
      packs: A row a pack: its engine, width, trials, static hparams and why.
      timeline: The seconds and lane-steps above, and lane-steps `computed` (those of
        empty lanes too), by time; see `Timeline.row`.
    """

    lane_steps: int = 0
    lane_epochs: float = 0
    compiles: int = 0
    compiles_by_name: dict[str, int] = dataclasses.field(default_factory=dict)
    compile_seconds: float = 0.0
    train_seconds: float = 0.0
    eval_seconds: float = 0.0
    swaps: int = 0
    swap_seconds: float = 0.0
    wall_seconds: float = 0.0
    occupancy: float = 1.0
    workers: int = 1
    checkpoints: int = 0
    checkpoint_seconds: float = 0.0
    checkpoint_bytes: int = 0
    packs: tuple[dict[str, Any], ...] = dataclasses.field(default=(), repr=False)
    timeline: dict[str, Any] = dataclasses.field(default_factory=dict, repr=False)


class Pool:
    """Worker threads over one queue of ready trials.

    Args:
      dataset: The data, put on each device once.
      seed: The sweep's seed, which fixes the order of the data.
      num_epochs: Epochs that the longest trial may train.
      devices: One for each worker; a device may be named more than once.
      fused: For each pack that shares its program with others, all of that program's.
      policy: Chooses which ready trials share a pack; None takes them in their order.
        Where single trials are fused, it also chooses what is fused: each choice of
        unlike trials is compiled as it comes.
    """

    def __init__(
        self,
        dataset: Dataset,
        seed: int,
        num_epochs: int,
        devices: Sequence[jax.Device],
        fused: Mapping[PackSpec, tuple[PackSpec, ...]] | None = None,
        policy: Policy | None = None,
    ):
        self.seed = seed
        self.log = CompileLog()
        self._start = time.perf_counter()
        self._settings = settings()  # A worker's thread would not have the caller's.
        self._events: queue.SimpleQueue[Reading | BaseException] = queue.SimpleQueue()
        self._ready: list[Ready] = []
        self._condition = threading.Condition()
        self._closed = False
        self._asked: set[threading.Thread] = set()  # workers that are to hand in
        self._handed: dict[int, LaneState] = {}
        self._smaller: dict[PackSpec, PackSpec] = {}  # packs that did not fit
        self._fused = dict(fused or {})
        self._policy = policy
        self._most = max(map(len, self._fused.values()), default=1)
        self._usage: Counter[str] = Counter()
        self._timeline = Timeline()
        self._steps: Counter[int] = Counter()  # lane-steps by steps an epoch
        feeds = {
            device: Feed(dataset, seed, num_epochs, device) for device in set(devices)
        }
        self._feed = feeds[devices[0]]
        self._workers = [
            threading.Thread(
                target=self._work,
                args=(feeds[device],),
                name=f"jaxpack-worker-{i}",
                daemon=True,
            )
            for i, device in enumerate(devices)
        ]
        for worker in self._workers:
            worker.start()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        # Who interrupts does not want to wait.
        self.close(wait=kind is None or not issubclass(kind, KeyboardInterrupt))

    def submit(self, trials: Iterable[Ready]) -> None:
        """Adds ready trials."""
        with self._condition:
            for trial in trials:
                fitting = trial._replace(pack=self._fitting(trial.pack))
                bisect.insort(self._ready, fitting, key=lambda ready: ready.order)
            self._condition.notify_all()

    def get(self, timeout: float | None = None) -> Reading | None:
        """The next reading, or None if there is none within `timeout` seconds.

        Raises:
          BaseException: What a worker raised.
        """
        try:
            event = self._events.get(timeout=timeout)
        except queue.Empty:
            return None
        if isinstance(event, BaseException):
            raise event
        return event

    def evaluate(self, trial: Ready, state: LaneState, split: str) -> dict[str, float]:
        """The metrics of a trial's state on a split of the data."""
        run = evaluation(trial.pack, self._feed, self.log)
        split_range = self._feed.splits[split]
        metrics = run(
            state.params,
            state.model_state,
            trial.lane,
            self._feed.evaluation,
            *split_range,
        )
        return as_floats(metrics)

    def close(self, *, wait: bool = True) -> None:
        """Lets every worker finish its segment, and ends them.

        Args:
          wait: Whether to wait until they have ended.
        """
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        for worker in self._workers if wait else ():
            worker.join()

    def ask(self) -> None:
        """Asks the workers to hand in copies of the states they train.

        Each does so when its segment ends, at the latest as it ends itself.
        """
        with self._condition:
            self._asked = set(self._workers)
            self._condition.notify_all()

    def handed(self) -> tuple[dict[int, LaneState], bool]:
        """The states handed in since the last call, and whether those are all."""
        with self._condition:
            states, self._handed = self._handed, {}
            return states, not self._asked

    def stats(self) -> Stats:
        """What has been done so far."""
        with self._condition:
            used = Usage(**self._usage)
            epochs = sum(steps / spe for spe, steps in self._steps.items())
        return Stats(
            lane_steps=used.lane_steps,
            lane_epochs=round(epochs, 6),
            compiles=sum(self.log.compiles.values()),
            compiles_by_name=dict(self.log.compiles),
            compile_seconds=self.log.seconds,
            train_seconds=used.train_seconds,
            eval_seconds=used.eval_seconds,
            swaps=used.swaps,
            swap_seconds=used.swap_seconds,
            wall_seconds=time.perf_counter() - self._start,
            occupancy=used.lane_steps / used.computed if used.computed else 1.0,
            workers=len(self._workers),
        )

    def timeline(self) -> dict[str, Any]:
        """What has been done when, for `Stats.timeline`; call it once, at the end."""
        with self._condition:
            for end, seconds in self.log.spans:
                self._book(end, compile_seconds=seconds)
            return self._timeline.row()

    def _work(self, feed: Feed) -> None:
        """What a worker does until the pool is closed."""
        with under(self._settings):
            self._train(feed)

    def _train(self, feed: Feed) -> None:
        packs: dict[tuple[PackSpec, ...], Bundle] = {}
        try:
            while (chosen := self._choose(packs)) is not None:
                members, trials = chosen
                packs = {m: p for m, p in packs.items() if p.live or m == members}
                try:
                    self._advance(members, trials, packs, feed)
                except Exception as error:
                    if not out_of_memory(error):
                        raise
                    pack = packs.pop(members, None)
                    if pack is not None:
                        self._count(pack)
                        trials += pack.rescue()
                    self._make_do(members, trials, error)
                self._hand_in(packs)
            self._hand_in(packs)
        except BaseException as error:
            self._events.put(error)

    def _advance(
        self,
        members: tuple[PackSpec, ...],
        trials: list[Ready],
        packs: dict[tuple[PackSpec, ...], Bundle],
        feed: Feed,
    ) -> None:
        """Fills packs, advances them by a segment, and hands on what is due.

        Trials leave `trials` as they enter their pack.
        """
        if members not in packs:
            packs[members] = Bundle(members, feed, self.seed, self.log)
        pack = packs[members]
        while trials:
            pack.put(trials[0])
            trials.pop(0)
        pack.advance()
        readings = pack.drain()
        self._count(pack)
        for reading in readings:
            self._events.put(reading)

    def _make_do(
        self,
        members: tuple[PackSpec, ...],
        trials: list[Ready],
        error: BaseException,
    ) -> None:
        """Puts trials whose packs did not fit into memory into half as many lanes.

        A trial that does not fit even alone has failed.
        """
        lanes = sum(spec.num_lanes for spec in members)
        if lanes > 1:
            with self._condition:
                self._halve(members)
                waiting, self._ready = self._ready, []
            _log.warning("out of memory with %d lanes: going on with half", lanes)
            self.submit([*trials, *waiting])
            return
        for trial in trials:
            reason = f"out of memory: {str(error).splitlines()[0]}"
            lost = {"metrics": {}, "train_loss": math.nan, "first_bad_step": None}
            self._events.put(
                Reading(
                    trial_id=trial.trial_id,
                    steps=trial.step,
                    state=None,
                    done=True,
                    seconds=0.0,
                    reason=reason,
                    **lost,
                )
            )

    def _halve(self, members: tuple[PackSpec, ...]) -> None:
        """Has half of the packs, or a pack half as wide, in the place of these."""
        if self._free_to_fuse(members):
            self._most = min(self._most, len(members) // 2)
            return
        if len(members) == 1:
            (spec,) = members
            narrower = dataclasses.replace(spec, num_lanes=spec.num_lanes // 2)
            self._smaller.setdefault(spec, narrower)
            return
        middle = len(members) // 2
        for half in (members[:middle], members[middle:]):
            for spec in half:
                if self._members(spec) == members:  # No other worker has halved it.
                    self._fused[spec] = half

    def _members(self, spec: PackSpec) -> tuple[PackSpec, ...]:
        """The packs that are advanced together with this one."""
        return self._fused.get(spec, (spec,))

    def _fitting(self, spec: PackSpec) -> PackSpec:
        while spec in self._smaller:
            spec = self._smaller[spec]
        return spec

    def _choose(
        self, packs: dict[tuple[PackSpec, ...], Bundle]
    ) -> tuple[tuple[PackSpec, ...], list[Ready]] | None:
        """The packs that a worker advances next, and the ready trials they take in.

        Those that hold the first of all ready and running trials are next. Waits
        until there are any; None when the pool is closed.
        """
        with self._condition:
            while not self._closed:
                choices = [(r.order, self._to_build()) for r in self._ready[:1]]
                choices += [(p.order, m) for m, p in packs.items() if p.live]
                if choices:
                    _, members = min(choices, key=lambda choice: choice[0])
                    free = packs[members].free if members in packs else _lanes(members)
                    return members, self._take(free)
                self._hand_in(packs)
                self._condition.wait()
        return None

    def _to_build(self) -> tuple[PackSpec, ...]:
        """The packs that the first ready trial is advanced in."""
        first = self._ready[0].pack
        members = self._members(first)
        if not self._free_to_fuse(members):
            return members
        chosen = self._by_policy(self._ready, self._most)
        # In one order, so that equal choices are one program.
        specs = list(dict.fromkeys(spec for m in self._fused.values() for spec in m))
        places = sorted(specs.index(self._ready[i].pack) for i in chosen)
        return tuple(specs[i] for i in places)

    def _free_to_fuse(self, members: tuple[PackSpec, ...]) -> bool:
        """Whether it is a policy that puts these packs together."""
        fused = all(m in self._fused and m.engine == "solo" for m in members)
        return self._policy is not None and fused

    def _take(self, free: Counter[PackSpec]) -> list[Ready]:
        """Ready trials that fit into free lanes; they are not ready any more then.

        The first ones, or the first and the companions that the policy chooses.
        """
        order = list(range(len(self._ready)))
        fitting = [i for i in order if free[self._ready[i].pack]]
        if self._policy is not None and fitting:
            candidates = [self._ready[i] for i in fitting]
            chosen = self._by_policy(candidates, free.total())
            order = [fitting[place] for place in chosen]
        taken = []
        for i in order:
            if free[self._ready[i].pack] > 0:
                free[self._ready[i].pack] -= 1
                taken.append(i)
        trials = [self._ready[i] for i in taken]
        self._ready = [r for i, r in enumerate(self._ready) if i not in set(taken)]
        return trials

    def _by_policy(self, ready: Sequence[Ready], size: int) -> list[int]:
        """The places of the first of some trials and of its companions."""
        assert self._policy is not None
        return self._policy([Candidate(r.hparams, r.pack) for r in ready], size)

    def _hand_in(self, packs: Mapping[tuple[PackSpec, ...], Bundle]) -> None:
        """Copies the states of a worker's trials to the host, if that is asked for."""
        worker = threading.current_thread()
        if worker not in self._asked:
            return
        states = [bundle.states() for bundle in packs.values() if bundle.live]
        with self._condition:
            for some in states:
                self._handed.update(some)
            self._asked.discard(worker)

    def _count(self, bundle: Bundle) -> None:
        with self._condition:
            for pack in bundle.packs:
                self._usage.update(pack.usage._asdict())
                self._steps.update(pack.steps)
                for end, amounts in pack.spans:
                    self._book(end, **amounts)
                pack.usage, pack.spans, pack.steps = Usage(), [], Counter()

    def _book(self, end: float, **amounts: float) -> None:
        """Adds what took the time until `end` to the timeline."""
        end -= self._start
        seconds = sum(n for name, n in amounts.items() if name.endswith("_seconds"))
        self._timeline.add(max(0.0, end - seconds), end, **amounts)


def _lanes(members: Sequence[PackSpec]) -> Counter[PackSpec]:
    """Lanes by the pack that a trial has to fit into."""
    lanes: Counter[PackSpec] = Counter()
    for spec in members:
        lanes[spec] += spec.num_lanes
    return lanes
