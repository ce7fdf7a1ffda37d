"""Ways to feed the models of a pack, and the programs that are fed.

| input | what it is |
|---|---|
| `alone` | one model, with its own input |
| `own` | a pack in which every model has an input of its own |
| `shared` | the same pack with one input for all |

Each with batches from the device, gathered from data that are there already, or from
the host, where each is gathered, turned from bytes to numbers and copied to the device.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments import study
from jaxpack import step
from jaxpack.step import Program

SOURCES = ("device", "host")
INPUTS = ("alone", "own", "shared")

Train = Callable[[int], tuple[float, Any]]
"""Trains for some steps; gives the seconds they took and the states after them."""


class Pack(NamedTuple):
    """Models of one configuration and their data, before any of them has a step.

    Attributes:
      program: What one model computes.
      states: Each model's state.
      lane: The per-lane hparams of every model, each `[]`.
      images: `[n, H, W, 3]` bytes on the host.
      labels: `[n]` int32.
      order: `[E, n]` int32, the order of the examples in each epoch.
    """

    program: Program
    states: list[Any]
    lane: dict[str, Any]
    images: np.ndarray
    labels: np.ndarray
    order: np.ndarray


def make_pack(config: study.Config, models: int, lab: study.Lab) -> Pack:
    """Initialises some models of a configuration."""
    program = study.pack_spec(config, lab).program
    x, y = lab.feed.train
    lane: dict[str, Any] = dict(study.lane_of(program))

    @jax.jit
    def init(trial: jax.Array) -> Any:
        hp = step.bind(program, lane)
        return step.init(program.functions, hp, np.uint32(0), trial, x[:1])

    return Pack(
        program,
        [init(np.uint32(i)) for i in range(models)],
        lane,
        np.random.default_rng(0).integers(0, 256, x.shape, np.uint8),
        np.asarray(y),
        np.asarray(lab.feed.deck(0)[0]),
    )


def prepared(images: np.ndarray) -> np.ndarray:
    """Bytes as numbers from -1 to 1, float32.

    Examples:
      >>> prepared(np.array([0, 255], np.uint8))
      array([-1.,  1.], dtype=float32)
    """
    return images * np.float32(2 / 255) - 1


def from_device(pack: Pack, inputs: str) -> Train:
    """What trains with data that are on the device, many steps a dispatch.

    Args:
      pack: The models.
      inputs: One of `INPUTS`.
    """
    program, size = pack.program, pack.program.batch_size
    data = prepared(pack.images), pack.labels
    fixed = jax.device_put((_lanes(pack, inputs), data, pack.order))

    @functools.partial(jax.jit, donate_argnums=0)
    def advance(states: Any, fixed: Any, num_steps: Any) -> Any:
        lanes, data, order = fixed

        def batch(taken: jax.Array) -> Any:
            epoch, index = jnp.divmod(taken, program.steps_per_epoch({}))
            rows = order[epoch, index * size + jnp.arange(size)]
            return jax.tree.map(lambda leaf: leaf[rows], data)

        def body(_: Any, states: Any) -> Any:
            if inputs == "own":
                x, y = jax.vmap(batch)(states.step)
            else:
                x, y = batch(states.step if inputs == "alone" else states.step[0])
            return _update(program, states, lanes, x, y, inputs)

        return jax.lax.fori_loop(0, num_steps, body, states)

    def train(steps: int) -> tuple[float, Any]:
        states = jax.block_until_ready(_states(pack, inputs))
        start = time.perf_counter()
        states = jax.block_until_ready(advance(states, fixed, np.int32(steps)))
        return time.perf_counter() - start, states

    return train


def from_host(pack: Pack, inputs: str) -> Train:
    """What trains with batches prepared on the host, one dispatch a step.

    Nothing waits for the device but at the end, so a batch is prepared while the one
    before is computed.

    Args:
      pack: The models.
      inputs: One of `INPUTS`.
    """
    program, size = pack.program, pack.program.batch_size
    pipelines = len(pack.states) if inputs == "own" else 1
    lanes = jax.device_put(_lanes(pack, inputs))

    @functools.partial(jax.jit, donate_argnums=0)
    def advance(states: Any, lanes: Any, batches: Any) -> Any:
        x, y = _stacked(batches) if inputs == "own" else batches[0]
        return _update(program, states, lanes, x, y, inputs)

    def batch(taken: int) -> tuple[jax.Array, jax.Array]:
        epoch, index = divmod(taken, program.steps_per_epoch({}))
        rows = pack.order[epoch, index * size : (index + 1) * size]
        return jax.device_put((prepared(pack.images[rows]), pack.labels[rows]))

    def train(steps: int) -> tuple[float, Any]:
        states = jax.block_until_ready(_states(pack, inputs))
        start = time.perf_counter()
        for taken in range(steps):
            batches = [batch(taken) for _ in range(pipelines)]
            states = advance(states, lanes, batches)
        jax.block_until_ready(states)
        return time.perf_counter() - start, states

    return train


def first(states: Any, inputs: str) -> Any:
    """The state of the first model."""
    alone = inputs == "alone"
    return states if alone else jax.tree.map(lambda leaf: leaf[0], states)


def _update(
    program: Program, states: Any, lanes: Any, x: Any, y: Any, inputs: str
) -> Any:
    """One step of all models, or of one alone."""

    def one(state: Any, lane: Any, x: Any, y: Any) -> Any:
        hp = step.bind(program, lane)
        return step.update(program.functions, hp, state, x, y, None)[0]

    if inputs == "alone":
        return one(states, lanes, x, y)
    axis = 0 if inputs == "own" else None
    return jax.vmap(one, (0, 0, axis, axis))(states, lanes, x, y)


def _states(pack: Pack, inputs: str) -> Any:
    # Copies, because they are donated.
    if inputs == "alone":
        return jax.tree.map(jnp.copy, pack.states[0])
    return _stacked(pack.states)


def _lanes(pack: Pack, inputs: str) -> Any:
    return pack.lane if inputs == "alone" else _stacked([pack.lane] * len(pack.states))


def _stacked(trees: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
