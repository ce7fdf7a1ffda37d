"""Packs that one program advances: a single one by its engine, several fused."""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable

import jax
import numpy as np

from jaxpack import executables, pack, trees
from jaxpack.engines import PackSpec, advance, name_of
from jaxpack.pack import Feed, Pack, Reading, Ready
from jaxpack.types import LaneState, PyTree


class Bundle:
    """Packs on one device that take their steps together.

    Args:
      members: The packs to build. Equal ones share the trials of their program.
      feed: The data on the device.
      seed: The sweep's seed.
      log: Where compilations are recorded.
    """

    def __init__(
        self,
        members: tuple[PackSpec, ...],
        feed: Feed,
        seed: int,
        log: executables.CompileLog,
    ):
        self.members, self.feed, self.log = members, feed, log
        self.packs = [Pack(spec, feed, seed, log) for spec in members]
        self._seconds_per_step: float | None = None
        # Should memory not suffice for a step, this finds out without a trial.
        self.run(0, feed.deck(0))

    @property
    def live(self) -> bool:
        """Whether there is a trial in any lane."""
        return any(member.live for member in self.packs)

    @property
    def order(self) -> tuple[float, ...]:
        """That of its first trial."""
        return min(member.order for member in self.packs if member.live)

    @property
    def free(self) -> Counter[PackSpec]:
        """Lanes without a trial, by the pack that a trial has to fit into."""
        free: Counter[PackSpec] = Counter()
        for member in self.packs:
            free[member.spec] += member.num_free
        return free

    @property
    def memory_bytes(self) -> int:
        """What its program takes while it trains: states, data, deck and scratch."""
        return executables.memory_bytes(self._advance)

    def put(self, ready: Ready) -> None:
        """Puts a trial into a free lane."""
        fitting = (p for p in self.packs if p.spec == ready.pack and p.num_free)
        next(fitting).put(ready)

    def advance(self) -> None:
        """Trains to the next stop of any lane, or for a segment's longest time."""
        running = [
            (lane, lane.steps_per_epoch)
            for member in self.packs
            for lane in member.running
        ]
        if not running:
            return
        deck, first = self.feed.deck(min(lane.step // spe for lane, spe in running))
        end = first + deck.shape[0]
        ahead = [
            min(lane.stops[0], end * spe) - lane.step
            for lane, spe in running
            if lane.step < end * spe
        ]
        steps = min(*ahead, self._longest_segment())
        assert steps > 0, "a lane is past its next stop"
        _ = self._advance  # Compiled before the clock starts.
        start = time.perf_counter()
        self.run(steps, (deck, first))
        seconds = time.perf_counter() - start
        self._seconds_per_step = seconds / steps
        for member in self.packs:
            member.book(steps, end, seconds / len(ahead))

    def drain(self) -> list[Reading]:
        """Evaluates the lanes that have got to a stop, and frees those that are done.

        A trial whose training failed is done at once, without an evaluation.
        """
        return [reading for member in self.packs for reading in member.drain()]

    def rescue(self) -> list[Ready]:
        """The trials, ready to go on elsewhere; the bundle is of no more use."""
        return [ready for member in self.packs for ready in member.rescue()]

    def states(self) -> dict[int, LaneState]:
        """The state of every trial, copied to the host."""
        return {i: s for member in self.packs for i, s in member.states().items()}

    def run(self, steps: int, deck: tuple[jax.Array, int]) -> None:
        """Advances all lanes and waits for them."""
        states, hparams = zip(*(p.arguments for p in self.packs), strict=True)
        states = self._advance(
            states,
            hparams,
            self.feed.train,
            deck[0],
            np.int32(deck[1]),
            np.int32(steps),
        )
        for member, new in zip(self.packs, states, strict=True):
            member.replace(new)
        jax.block_until_ready([state.step for state in states])

    def _longest_segment(self) -> int:
        if self._seconds_per_step is None:
            return pack.FIRST_SEGMENT
        return max(1, int(pack.SEGMENT_SECONDS / self._seconds_per_step))

    @functools.cached_property
    def _advance(self) -> Callable[..., tuple[LaneState, ...]]:
        train = trees.avals(self.feed.train)
        window = (self.feed.window, self.feed.num_examples)
        deck = jax.ShapeDtypeStruct(window, np.int32)
        return program(self.members, train, deck, self.feed.device, self.log)


def program(
    members: tuple[PackSpec, ...],
    train: PyTree,
    deck: jax.ShapeDtypeStruct,
    device: jax.Device,
    log: executables.CompileLog,
) -> Callable[..., tuple[LaneState, ...]]:
    """The compiled `engines.advance` of some packs.

    Args:
      members: The packs.
      train: Shapes and dtypes of the training inputs and labels.
      deck: Those of the deck's window.
      device: Where it runs.
      log: Where a compilation is recorded.
    """
    integer = jax.ShapeDtypeStruct((), np.int32)
    states, hparams = zip(*map(pack.argument_avals, members), strict=True)
    return executables.get(
        f"advance_{name_of(members)}",
        functools.partial(advance, members),
        (states, hparams, train, deck, integer, integer),
        identity=members,
        device=device,
        log=log,
        donate=(0,),
    )
