"""How packs of the study's configurations are timed."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from experiments import study
from jaxpack import executables
from jaxpack.bundle import Bundle
from jaxpack.engines import PackSpec
from jaxpack.pack import Ready


def widened(spec: PackSpec, lanes: int) -> PackSpec:
    """The same program with `lanes` trials packed into it, or one alone."""
    engine = "solo" if lanes == 1 else "packed"
    return dataclasses.replace(spec, engine=engine, num_lanes=lanes)


def filled(members: Sequence[PackSpec], lab: study.Lab) -> Bundle:
    """Compiles a program and fills its lanes with trials that train without end."""
    bundle = Bundle(tuple(members), lab.feed, 0, executables.CompileLog())
    for spec, free in bundle.free.items():
        lane = study.lane_of(spec.program)
        for i in range(free):
            bundle.put(Ready((i,), i, spec, lane, i, None, 0, (2**30,)))
    return bundle


def seconds_of(bundle: Bundle, steps: int) -> float:
    """Trains every trial of a bundle for some steps, and gives the time of one.

    Raises:
      RuntimeError: If a trial has not taken all of them.
    """
    for pack in bundle.packs:
        states = pack.arguments[0]
        pack.replace(states._replace(step=jnp.zeros_like(states.step)))
    jax.block_until_ready([pack.arguments for pack in bundle.packs])
    deck = bundle.feed.deck(0)
    start = time.perf_counter()
    bundle.run(steps, deck)
    seconds = time.perf_counter() - start
    for pack in bundle.packs:
        taken = np.asarray(pack.arguments[0].step)
        if (taken != steps).any():
            raise RuntimeError(
                f"trials took {taken.tolist()} steps of {steps}: the time of a step "
                "is not known where training ends early"
            )
    return seconds / steps


def timer(bundle: Bundle, seconds: float) -> Callable[[], float]:
    """What measures the time of a bundle's step, in seconds, warm.

    Args:
      bundle: The bundle.
      seconds: How long a measurement should last.
    """
    epoch = min(pack.spec.program.steps_per_epoch({}) for pack in bundle.packs)
    most = bundle.feed.window * epoch
    return paced(functools.partial(seconds_of, bundle), seconds, most)


def paced(
    run: Callable[[int], float], seconds: float, most: int
) -> Callable[[], float]:
    """`run` with as many steps as take about `seconds`, warm.

    Args:
      run: Trains for some steps and gives the time of one.
      seconds: How long a measurement should last.
      most: Steps of one at most.
    """
    steps = 1
    run(steps)
    for _ in range(2):  # A short run is slower a step than a long one.
        steps = max(steps, min(most, int(seconds / run(steps))))
    return functools.partial(run, steps)
