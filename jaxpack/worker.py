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
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from jaxpack.data import Dataset
from jaxpack.engines import PackSpec
from jaxpack.executables import CompileLog, out_of_memory, settings, under
from jaxpack.pack import Feed, Pack, Reading, Ready, Usage, as_floats, evaluation
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
      wall_seconds: Time from start to end.
      occupancy: Share of the lane-steps computed that trained a trial.
      workers: Worker threads.
      checkpoints: Checkpoints written to disk.
      checkpoint_seconds: Time spent writing them, beside the training.
      checkpoint_bytes: What the newest took up on disk.
      packs: A row a pack: its engine, width, trials, static hparams and why.
    """

    lane_steps: int = 0
    lane_epochs: float = 0
    compiles: int = 0
    compiles_by_name: dict[str, int] = dataclasses.field(default_factory=dict)
    compile_seconds: float = 0.0
    train_seconds: float = 0.0
    eval_seconds: float = 0.0
    swaps: int = 0
    wall_seconds: float = 0.0
    occupancy: float = 1.0
    workers: int = 1
    checkpoints: int = 0
    checkpoint_seconds: float = 0.0
    checkpoint_bytes: int = 0
    packs: tuple[dict[str, Any], ...] = dataclasses.field(default=(), repr=False)


class Pool:
    """Worker threads over one queue of ready trials.

    Args:
      dataset: The data, put on each device once.
      seed: The sweep's seed, which fixes the order of the data.
      num_epochs: Epochs that the longest trial may train.
      devices: One for each worker; a device may be named more than once.
    """

    def __init__(
        self,
        dataset: Dataset,
        seed: int,
        num_epochs: int,
        devices: Sequence[jax.Device],
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
        self._usage: Counter[str] = Counter()
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
            wall_seconds=time.perf_counter() - self._start,
            occupancy=used.lane_steps / used.computed if used.computed else 1.0,
            workers=len(self._workers),
        )

    def _work(self, feed: Feed) -> None:
        """What a worker does until the pool is closed."""
        with under(self._settings):
            self._train(feed)

    def _train(self, feed: Feed) -> None:
        packs: dict[PackSpec, Pack] = {}
        try:
            while (chosen := self._choose(packs)) is not None:
                spec, trials = chosen
                packs = {s: pack for s, pack in packs.items() if pack.live or s == spec}
                try:
                    self._advance(spec, trials, packs, feed)
                except Exception as error:
                    if not out_of_memory(error):
                        raise
                    pack = packs.pop(spec, None)
                    if pack is not None:
                        self._count(pack)
                        trials += pack.rescue()
                    self._make_do(spec, trials, error)
                self._hand_in(packs)
            self._hand_in(packs)
        except BaseException as error:
            self._events.put(error)

    def _advance(
        self,
        spec: PackSpec,
        trials: list[Ready],
        packs: dict[PackSpec, Pack],
        feed: Feed,
    ) -> None:
        """Fills a pack, advances it by a segment, and hands on what is due.

        Trials leave `trials` as they enter the pack.
        """
        if spec not in packs:
            packs[spec] = Pack(spec, feed, self.seed, self.log)
        pack = packs[spec]
        while trials:
            pack.put(trials[0])
            trials.pop(0)
        pack.advance()
        readings = pack.drain()
        self._count(pack)
        for reading in readings:
            self._events.put(reading)

    def _make_do(
        self, spec: PackSpec, trials: list[Ready], error: BaseException
    ) -> None:
        """Puts trials whose pack did not fit into memory into one half as wide.

        A trial that does not fit even alone has failed.
        """
        if spec.num_lanes > 1:
            narrower = dataclasses.replace(spec, num_lanes=spec.num_lanes // 2)
            with self._condition:
                self._smaller.setdefault(spec, narrower)
                waiting, self._ready = self._ready, []
            _log.warning(
                "out of memory with %d lanes: going on with %d",
                spec.num_lanes,
                narrower.num_lanes,
            )
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

    def _fitting(self, spec: PackSpec) -> PackSpec:
        while spec in self._smaller:
            spec = self._smaller[spec]
        return spec

    def _choose(
        self, packs: dict[PackSpec, Pack]
    ) -> tuple[PackSpec, list[Ready]] | None:
        """A worker's next pack, and the ready trials that go into its free lanes.

        The pack that holds the first of all ready and running trials is next. Waits
        until there is one; None when the pool is closed.
        """
        with self._condition:
            while not self._closed:
                choices = [(ready.order, ready.pack) for ready in self._ready[:1]]
                choices += [(p.order, spec) for spec, p in packs.items() if p.live]
                if choices:
                    _, spec = min(choices, key=lambda choice: choice[0])
                    free = packs[spec].num_free if spec in packs else spec.num_lanes
                    chosen = [r for r in self._ready if r.pack == spec][:free]
                    taken = {ready.trial_id for ready in chosen}
                    self._ready = [r for r in self._ready if r.trial_id not in taken]
                    return spec, chosen
                self._hand_in(packs)
                self._condition.wait()
        return None

    def _hand_in(self, packs: dict[PackSpec, Pack]) -> None:
        """Copies the states of a worker's trials to the host, if that is asked for."""
        worker = threading.current_thread()
        if worker not in self._asked:
            return
        states = [pack.states() for pack in packs.values() if pack.live]
        with self._condition:
            for some in states:
                self._handed.update(some)
            self._asked.discard(worker)

    def _count(self, pack: Pack) -> None:
        with self._condition:
            self._usage.update(pack.usage._asdict())
            spe = pack.spec.program.steps_per_epoch
            self._steps[spe] += pack.usage.lane_steps
        pack.usage = Usage()
