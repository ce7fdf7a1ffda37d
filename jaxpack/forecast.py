"""How long a sweep's packs will take, by a run of its brackets without training.

Which trials will be promoted is not known, but how many is, and lanes do not care
which. So the run takes the same decisions as the workers would, on made-up scores, and
says how full the lanes are. It depends on nothing that is measured while training.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from jaxpack.schedulers import Assignment, Brackets
from jaxpack.schedulers.brackets import Bracket


class Work(NamedTuple):
    """What is to be trained, as far as it is known before any score is.

    Attributes:
      brackets: The brackets; trials are numbered through the first, then the next.
      units: How many steps a unit of the brackets' resource is for each trial.
    """

    brackets: tuple[Bracket, ...]
    units: tuple[int, ...]

    @classmethod
    def of(cls, steps: Sequence[int]) -> Work:
        """Trials that train for so many steps each, none of them stopped."""
        return cls(tuple(((1, target),) for target in steps), (1,) * len(steps))

    @property
    def steps(self) -> list[float]:
        """How many steps each trial may be expected to train, whatever the scores.

        Examples:
          >>> Work((((3, 1), (1, 4)), ((1, 4),)), (10, 10, 10, 5)).steps
          [20.0, 20.0, 20.0, 20.0]
        """
        steps = []
        for bracket in self.brackets:
            before, total = 0, 0
            for trials, resource in bracket:
                total += trials * (resource - before)
                before = resource
            count = min(bracket[0][0], len(self.units) - len(steps))
            units = self.units[len(steps) : len(steps) + count]
            steps += [total / bracket[0][0] * unit for unit in units]
        return steps


class Place(NamedTuple):
    """A pack as a forecast sees it.

    Attributes:
      name: Trials of one name share lanes.
      lanes: Its width.
      seconds: What a step of it takes.
    """

    name: Hashable
    lanes: int
    seconds: float


class Forecast(NamedTuple):
    """What a run of the brackets came to.

    Attributes:
      seconds: From start to end, evaluations and compilations left out.
      occupancy: Share of the lane-steps computed that train a trial.
    """

    seconds: float
    occupancy: float


class _Lane(NamedTuple):
    order: tuple[float, int]
    trial_id: int
    step: int
    target: int


def forecast(
    work: Work,
    place_of: Callable[[int, int], Place],
    workers: int,
    pause: float = 0.0,
) -> Forecast:
    """Runs through the brackets as the workers do.

    Args:
      work: What is to be trained.
      place_of: The pack of a trial that trains up to a number of steps.
      workers: Workers; each has packs of its own.
      pause: Seconds from the end of a pack's steps to the next, besides evaluations.

    Examples:
      >>> work = Work((((4, 1), (1, 3)),), (10,) * 4)
      >>> forecast(work, lambda trial, target: Place("wide", 4, 4.0), workers=1)
      Forecast(seconds=120.0, occupancy=0.5)
      >>> def narrowed(trial, target):
      ...     return Place("one", 1, 1.0) if target > 10 else Place("wide", 4, 4.0)
      >>> forecast(work, narrowed, workers=1)
      Forecast(seconds=60.0, occupancy=1.0)
    """
    run = _Run(work, place_of)
    idle, busy = list(range(workers)), []
    now, number = 0.0, itertools.count()
    packs: list[dict[Place, list[_Lane]]] = [defaultdict(list) for _ in idle]
    while True:
        waiting = []
        for worker in idle:
            place = run.fill(packs[worker])
            if place is None:
                waiting.append(worker)
                continue
            seconds = pause + run.advance(packs[worker][place], place)
            heapq.heappush(busy, (now + seconds, next(number), worker, place))
        if not busy:
            break
        now, _, worker, place = heapq.heappop(busy)
        run.drain(packs[worker][place])
        idle = [*waiting, worker]
    return Forecast(now, run.used / run.computed if run.computed else 1.0)


class _Run:
    """The brackets, and the trials that are ready, while a forecast runs."""

    def __init__(self, work: Work, place_of: Callable[[int, int], Place]):
        self._units, self._place_of = work.units, place_of
        self._brackets = Brackets(work.brackets, "min", len(work.units))
        self._ready: dict[Place, list[_Lane]] = defaultdict(list)
        self._steps: dict[int, int] = {}
        self.used = self.computed = 0
        self._submit(self._brackets.ready())

    def fill(self, packs: dict[Place, list[_Lane]]) -> Place | None:
        """Fills the pack that a worker advances next; None if it has nothing to do."""
        first = [(ready[0].order, place) for place, ready in self._ready.items()]
        first += [(min(lanes).order, place) for place, lanes in packs.items() if lanes]
        if not first:
            return None
        _, place = min(first, key=lambda choice: choice[0])
        lanes, ready = packs[place], self._ready.get(place, [])
        while ready and len(lanes) < place.lanes:
            lanes.append(heapq.heappop(ready))
        if not ready:
            self._ready.pop(place, None)
        return place

    def advance(self, lanes: list[_Lane], place: Place) -> float:
        """Trains to the next stop of any lane; returns the seconds it takes."""
        steps = min(lane.target - lane.step for lane in lanes)
        lanes[:] = [lane._replace(step=lane.step + steps) for lane in lanes]
        self.used += steps * len(lanes)
        self.computed += steps * place.lanes
        return steps * place.seconds

    def drain(self, lanes: list[_Lane]) -> None:
        """Lets the scheduler decide on the trials that have got to their stop."""
        done = [lane for lane in lanes if lane.step == lane.target]
        lanes[:] = [lane for lane in lanes if lane.step < lane.target]
        for lane in done:
            self._steps[lane.trial_id] = lane.step
            self._submit(self._brackets.report(lane.trial_id, float(lane.trial_id)))

    def _submit(self, assignments: Sequence[Assignment]) -> None:
        for given in assignments:
            i = given.trial_id
            target = given.resource * self._units[i]
            lane = _Lane((-given.remaining, i), i, self._steps.get(i, 0), target)
            heapq.heappush(self._ready[self._place_of(i, target)], lane)
