"""How many lanes packs have, and where trials that train for long have fewer.

A wide pack needs trials to fill it, and a sweep runs out of them: half of Hyperband's
steps are those of its few best trials. How many lanes pay depends on what a lane costs
beside its step, which is next to nothing on an idle accelerator and nearly all of it on
a CPU, and more once the states of all lanes do not stay in its cache. So the widths are
those whose forecast is the shortest.

Nothing here is measured while trials train: the width that a trial has, up to any
number of steps, is part of the plan, and so are its numbers to the last bit.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from jaxpack.forecast import Forecast, Place, Work, forecast

COMPILE_SECONDS = 1.5
"""What one more program may be expected to cost."""
GAIN = 0.9
"""A narrower pack, or one more program, has to take less than this share."""
MOST_LEVELS = 6
"""Numbers of steps that are tried as the beginning of a tail, at most."""
HOPELESS = 1.5
"""Widths whose forecast is so many times the best are not tried with a tail."""


class Pace(NamedTuple):
    """What a step of a pack takes, by rule.

    Attributes:
      lanes: The most lanes that are worth trying.
      pause: Seconds between two segments, the dispatch included.
      step: Seconds that it takes however few lanes there are.
      lane: Seconds that each lane adds, besides its arithmetic.
      flops: Floating-point operations a second.
      cache: Bytes of states that a worker has at hand from one step to the next.
      bandwidth: Bytes a second at which states beyond those are read and written.
    """

    lanes: int
    pause: float
    step: float
    lane: float
    flops: float
    cache: float = math.inf
    bandwidth: float = math.inf


CPU = Pace(16, pause=5e-4, step=6e-6, lane=2e-6, flops=5e10, cache=1e6, bandwidth=15e9)
"""Fitted to MLPs on two cores with 2 MiB of cache each; the pause is a guess."""
ACCELERATOR = Pace(256, pause=1e-3, step=2e-4, lane=1e-6, flops=5e12)
"""Reasoned, not measured: some 60 kernels of a few microseconds are a step."""


def pace_of(platform: str) -> Pace:
    """The pace of a platform, as JAX names it."""
    return CPU if platform == "cpu" else ACCELERATOR


class Tail(NamedTuple):
    """Where trials that train for long go on.

    Attributes:
      steps: Trials that are to have had as many in all, or more, train in it.
      engine: Its engine.
      lanes: Its width.
    """

    steps: int
    engine: str
    lanes: int


@dataclasses.dataclass(frozen=True)
class Load:
    """The trials of one program, as their widths depend on them.

    Attributes:
      trials: Their numbers.
      engine: "packed" or "solo".
      flops: Of one training step of one trial.
      state: Bytes of the state of one trial.
      slower: How many times slower than by rule each engine has been measured.
      most: Lanes that fit into memory; None if all do.
      mixed: Whether their epochs are not of the same number of steps.
    """

    trials: tuple[int, ...]
    engine: str
    flops: float
    state: int = 0
    slower: tuple[tuple[str, float], ...] = ()
    most: int | None = None
    mixed: bool = False

    def seconds(self, engine: str, lanes: int, pace: Pace) -> float:
        """What a step of `lanes` of them takes."""
        lane = pace.lane + self.flops / pace.flops
        if lanes * self.state > pace.cache:
            beyond = 1 - pace.cache / (lanes * self.state)
            lane += beyond * 2 * self.state / pace.bandwidth
        by_rule = pace.step + lanes * lane
        return by_rule * dict(self.slower).get(engine, 1.0)

    def measured(self, engine: str, lanes: int, seconds: float, pace: Pace) -> Load:
        """The same, once a step of `lanes` of them is known to take so long."""
        slower = dict(self.slower) | {engine: 1.0}
        by_rule = dataclasses.replace(self, slower=tuple(slower.items()))
        slower[engine] = seconds / by_rule.seconds(engine, lanes, pace)
        return dataclasses.replace(self, slower=tuple(slower.items()))

    def width(self, most: int, workers: int) -> int:
        """No more than the trials need once every worker has a pack."""
        if self.engine == "solo":
            return 1
        share = -(-len(self.trials) // workers)
        return min(most, self.most or most, 1 << (share - 1).bit_length())


class Layout(NamedTuple):
    """The width of each load, its tail if it has one, and what they come to."""

    lanes: tuple[int, ...]
    tails: tuple[Tail | None, ...]
    forecast: Forecast


def widest(loads: Sequence[Load], workers: int, most: int) -> Layout:
    """As many lanes as there are trials for, at most `most`: nothing more is known."""
    lanes = tuple(load.width(most, workers) for load in loads)
    return Layout(lanes, (None,) * len(loads), Forecast(0.0, 1.0))


def lay_out(
    loads: Sequence[Load],
    work: Work,
    workers: int,
    pace: Pace,
    most: int,
    *,
    alone: bool = True,
) -> Layout:
    """The widths, and the tails, with which the trials are trained the soonest.

    Args:
      loads: The trials of each program.
      work: What is to be trained.
      workers: Workers.
      pace: What steps take.
      most: Lanes of a pack at most.
      alone: Whether a tail may be of single trials, by the engine `solo`.

    Examples:
      >>> work = Work((((32, 1), (2, 16)),), (1000,) * 32)
      >>> load = Load(tuple(range(32)), "packed", 1e6)
      >>> found = lay_out([load], work, 1, CPU, 16)
      >>> found.lanes, found.tails
      ((2,), (None,))
      >>> found = lay_out([load], work, 1, ACCELERATOR, 256)
      >>> found.lanes, found.tails
      ((32,), (None,))
    """
    programs = [load for load in loads if load.engine == "packed"]
    plain = (None,) * len(loads)
    best = widest(loads, workers, most)
    run = functools.partial(_forecast, loads, work, workers, pace)
    best = best._replace(forecast=run(best.lanes, plain))
    tried = [best]
    if not programs:
        return best
    for lanes in _narrower(max(best.lanes)):
        widths = tuple(load.width(lanes, workers) for load in loads)
        tried.append(Layout(widths, plain, run(widths, plain)))
    for layout in tried:
        if layout.forecast.seconds < GAIN * best.forecast.seconds:
            best = layout
    extra = COMPILE_SECONDS * len(programs)
    if best.forecast.seconds < 2 * extra:
        return best
    limit = GAIN * best.forecast.seconds - extra
    hopeful = HOPELESS * best.forecast.seconds
    for layout in (each for each in tried if each.forecast.seconds < hopeful):
        for level in _levels(work):
            for lanes in (*_narrower(max(layout.lanes)), 1):
                engine = "solo" if lanes == 1 and alone else "packed"
                tails = tuple(
                    None
                    if width <= lanes or load.engine == "solo" or load.mixed
                    else Tail(level * work.units[load.trials[0]], engine, lanes)
                    for load, width in zip(loads, layout.lanes, strict=True)
                )
                found = run(layout.lanes, tails)
                if found.seconds < limit:
                    best, limit = Layout(layout.lanes, tails, found), found.seconds
    return best


def _narrower(lanes: int) -> list[int]:
    """Powers of two below a width, the widest first, without 1.

    Examples:
      >>> _narrower(16), _narrower(3), _narrower(1)
      ([8, 4, 2], [2], [])
    """
    return [1 << i for i in reversed(range(1, (lanes - 1).bit_length()))]


def _levels(work: Work) -> list[int]:
    """Resources at which a tail may begin: those of the rungs after the first."""
    levels = sorted({resource for bracket in work.brackets for _, resource in bracket})
    return levels[1 :: -(-len(levels) // MOST_LEVELS) or 1]


def _forecast(
    loads: Sequence[Load],
    work: Work,
    workers: int,
    pace: Pace,
    lanes: Sequence[int],
    tails: Sequence[Tail | None],
) -> Forecast:
    programs = list(zip(loads, lanes, tails, strict=True))
    wide: dict[int, Place] = {}
    narrow: dict[int, tuple[int, Place]] = {}
    for n, (load, width, tail) in enumerate(programs):
        seconds = load.seconds(load.engine, width, pace)
        wide |= dict.fromkeys(load.trials, Place((n, "wide"), width, seconds))
        if tail is not None:
            seconds = load.seconds(tail.engine, tail.lanes, pace)
            place = Place((n, "tail"), tail.lanes, seconds)
            narrow |= dict.fromkeys(load.trials, (tail.steps, place))
    failed = Place("failed", 1, 0.0)

    def place_of(trial: int, target: int) -> Place:
        if trial in narrow and target >= narrow[trial][0]:
            return narrow[trial][1]
        return wide.get(trial, failed)

    return forecast(work, place_of, workers, pace.pause)
