"""Forms of a pack's program that could be faster on a device, timed against each other.

For a model and a width, every form of its convolutions (see `jaxpack.conv.LOWERINGS`)
and some numbers of steps in one turn of the training loop are timed in turn, warm and
blocked. The library runs one step a turn, and on a GPU XLA's own convolutions; on an
accelerator, where a turn of a loop may cost as much as a small step, others may win.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from experiments import measure, models
from jaxpack import conv, executables
from jaxpack.bundle import Bundle
from jaxpack.engines import packed
from jaxpack.pack import Feed
from jaxpack.step import Program
from jaxpack.train import make_ready

CHUNKS = (1, 8)
"""Steps in one turn of the training loop."""
ENDLESS = 2**30
"""Steps that no trial gets to."""


def chunked(
    program: Program,
    chunk: int,
    states: Any,
    lanes: Any,
    data: Any,
    deck: jax.Array,
    num_steps: Any,
) -> Any:
    """Trains every lane for `num_steps` steps, `chunk` of them a turn of the loop."""
    step = functools.partial(
        packed.step, program, lanes=lanes, data=data, deck=deck, first_epoch=0
    )

    def one(_: Any, states: Any) -> Any:
        return step(states=states)

    def many(_: Any, states: Any) -> Any:
        for _ in range(chunk):
            states = step(states=states)
        return states

    states = jax.lax.fori_loop(0, num_steps // chunk, many, states)
    return jax.lax.fori_loop(0, num_steps % chunk, one, states)


def time_candidates(
    case: models.Case,
    lanes: int,
    *,
    chunks: Sequence[int] = CHUNKS,
    seconds: float = 0.2,
    repeats: int = 5,
) -> dict[str, float]:
    """Microseconds of a lane-step of each form.

    Args:
      case: The model.
      lanes: Width of the pack.
      chunks: Steps in one turn of the loop.
      seconds: How long one measurement should last.
      repeats: Measurements, of which the median is taken.

    Returns:
      By form, such as "patches, 8 a turn"; models without convolutions have but one
      form of them, "stock".
    """
    timers: dict[str, Callable[[], float]] = {}
    convolves = isinstance(case.module, models.CNN | models.ResNet8)
    for name in conv.LOWERINGS if convolves else ("stock",):
        if name == "stock":
            timers |= _timers(case, lanes, name, chunks, seconds)
            continue
        with conv.lowering(name):
            timers |= _timers(case, lanes, name, chunks, seconds)
    found = measure.interleave(timers, repeats)
    return {name: measure.significant(1e6 * time) for name, time in found.items()}


def _timers(
    case: models.Case, lanes: int, name: str, chunks: Sequence[int], seconds: float
) -> dict[str, Callable[[], float]]:
    return {
        f"{name}, {chunk} a turn": _timer(case, lanes, chunk, seconds)
        for chunk in chunks
    }


def _timer(
    case: models.Case, lanes: int, chunk: int, seconds: float
) -> Callable[[], float]:
    """Compiles a form, and returns what measures a lane-step of it in seconds."""
    task = case.problem().task()
    fleet = measure.fleet(task, "packed", lanes, 1, num_epochs=1)
    spec = fleet.plan.packs[0].spec
    feed = Feed(task.dataset, 0, 512, fleet.plan.workers[0])
    bundle = Bundle((spec,), feed, 0, executables.CompileLog())
    for trial in fleet.trials:
        endless = {"stops": (ENDLESS,), "total_steps": ENDLESS}
        bundle.put(make_ready(trial, fleet.plan, order=(trial.trial_id,), **endless))
    (pack,) = bundle.packs
    deck, _ = feed.deck(0)
    spe = spec.program.steps_per_epoch({})
    # Compiled here and now, while the form is the one asked for.
    form = jax.jit(functools.partial(chunked, spec.program, chunk), donate_argnums=0)
    run = form.lower(*pack.arguments, feed.train, deck, np.int32(0)).compile()

    def timed(steps: int) -> float:
        states, hparams = pack.arguments
        states = states._replace(step=0 * states.step)
        jax.block_until_ready(states)
        start = time.perf_counter()
        states = run(states, hparams, feed.train, deck, np.int32(steps))
        jax.block_until_ready(states)
        spent = time.perf_counter() - start
        pack.replace(states)
        taken = np.asarray(states.step)
        if (taken != steps).any():
            raise RuntimeError(f"lanes took {taken.tolist()} steps of {steps}")
        return spent / (steps * spec.num_lanes)

    timed(2 * chunk)
    steps = max(2 * chunk, min(feed.window * spe, int(seconds / lanes / timed(chunk))))
    return lambda: timed(steps)
