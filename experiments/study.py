"""The configurations of the paper's study, and how packs of them are timed.

Liu, Krishnan, Elmore, Franklin, "Understanding and Optimizing Packed Neural Network
Training for Hyper-Parameter Tuning", https://arxiv.org/abs/2002.02885: four families of
models, three batch sizes and four optimizers. A pack's *improvement* is the share of
the time that it saves, `(T_a + T_b - T_pack) / (T_a + T_b)`, where T is the time of a
training step.

`T_a` and `T_b` are those of jaxpack's `solo` engine: one dispatch for many steps, the
data on the device. A script that dispatches every step is slower, and packing would
look better beside it.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import jaxpack as jp
from jaxpack import executables, step
from jaxpack.bundle import Bundle
from jaxpack.engines import PackSpec
from jaxpack.pack import Feed, Ready
from jaxpack.planner import kinds_of_trials, plan
from jaxpack.types import HParams, Trial

FAMILIES = ("mlp", "mobilenet", "resnet", "densenet")
BATCH_SIZES = (32, 64, 128)
OPTIMIZERS = ("adam", "sgd", "adagrad", "momentum")
LEARNING_RATE = 1e-4

_FULL = {
    "mlp": jp.models.MLP(width=1024, depth=3),
    "mobilenet": jp.models.MobileNetV2(),
    "resnet": jp.models.ResNet(depth=18),
    "densenet": jp.models.DenseNet(depth=121),
}
_TINY = {
    "mlp": jp.models.MLP(width=64, depth=2),
    "mobilenet": jp.models.MobileNetV2(
        width=0.5, stages=((1, 16, 1, 1), (6, 24, 1, 2)), features=64
    ),
    "resnet": jp.models.ResNet(depth=8, width=8),
    "densenet": jp.models.DenseNet(depth=10, growth=8),
}
_MAKE = {
    "adam": optax.adam,
    "sgd": optax.sgd,
    "adagrad": optax.adagrad,
    "momentum": functools.partial(optax.sgd, momentum=0.9),
}


class Config(NamedTuple):
    """A configuration of the study: one trial of it is one model to train.

    Attributes:
      family: One of `FAMILIES`.
      batch_size: `B`.
      optimizer: One of `OPTIMIZERS`.
    """

    family: str
    batch_size: int
    optimizer: str

    def __str__(self) -> str:
        return f"{self.family} {self.batch_size} {self.optimizer}"


class Lab(NamedTuple):
    """What all that is timed in one run has in common.

    Attributes:
      dataset: The data.
      feed: The same on the device.
      tiny: Whether the models are the small ones.
    """

    dataset: jp.data.Dataset
    feed: Feed
    tiny: bool


def configs(
    families: Sequence[str], batch_sizes: Sequence[int], optimizers: Sequence[str]
) -> list[Config]:
    """Every configuration of these.

    Raises:
      ValueError: If there is no such family or optimizer, or a size is not positive.

    Examples:
      >>> [str(config) for config in configs(["mlp"], [32, 64], ["sgd"])]
      ['mlp 32 sgd', 'mlp 64 sgd']
    """
    for name, given, known in (
        ("families", families, FAMILIES),
        ("optimizers", optimizers, OPTIMIZERS),
    ):
        for value in given:
            if value not in known:
                expected = ", ".join(known)
                raise ValueError(f"{name} has {value!r}; it may have {expected}")
    for size in batch_sizes:
        if size < 1:
            raise ValueError(f"batch-sizes has {size}; sizes are at least 1")
    return [
        Config(family, size, optimizer)
        for family in families
        for size in batch_sizes
        for optimizer in optimizers
    ]


def laboratory(batch_sizes: Sequence[int], image_size: int, tiny: bool) -> Lab:
    """Makes synthetic images and puts them on the device.

    Speed does not depend on what the images show. There are as many as every batch
    size divides, at least 16 batches of the largest.

    Args:
      batch_sizes: The batch sizes that there will be.
      image_size: Height and width of the images, which have 3 channels.
      tiny: Whether the models are to be small ones.
    """
    rng = np.random.default_rng(0)
    count = int(np.lcm.reduce(batch_sizes))
    count *= -(-16 * max(batch_sizes) // count)

    def split(count: int) -> tuple[np.ndarray, np.ndarray]:
        x = rng.standard_normal((count, image_size, image_size, 3), np.float32)
        return x, np.arange(count, dtype=np.int32) % 10

    dataset = jp.data.Dataset.from_arrays(split(count), split(max(batch_sizes)))
    return Lab(dataset, Feed(dataset, 0, 64, jax.local_devices()[0]), tiny)


def pack_spec(config: Config, lab: Lab) -> PackSpec:
    """The program of a configuration, with one trial in it."""
    models = _TINY if lab.tiny else _FULL

    def model(_: HParams) -> nn.Module:
        return models[config.family]

    def optimizer(hp: HParams) -> optax.GradientTransformation:
        return _MAKE[config.optimizer](hp.learning_rate)

    task = jp.Task(model, optimizer, lab.dataset, batch_size=config.batch_size)
    trials = [Trial(0, HParams({"learning_rate": LEARNING_RATE}))]
    kinds, horizon = kinds_of_trials(trials), [2**20]
    return plan(task, trials, kinds, horizon, engine="solo", workers=1).packs[0].spec


def widened(spec: PackSpec, lanes: int) -> PackSpec:
    """The same program with `lanes` trials packed into it, or one alone."""
    engine = "solo" if lanes == 1 else "packed"
    return dataclasses.replace(spec, engine=engine, num_lanes=lanes)


def filled(members: Sequence[PackSpec], lab: Lab) -> Bundle:
    """Compiles a program and fills its lanes with trials that train without end."""
    bundle = Bundle(tuple(members), lab.feed, 0, executables.CompileLog())
    for spec, free in bundle.free.items():
        hparams = spec.program.lane_hparams
        lane = step.lane_values(
            hparams, {"learning_rate": LEARNING_RATE, "total_steps": 2**20}
        )
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
    epoch = min(pack.spec.program.steps_per_epoch for pack in bundle.packs)
    most = bundle.feed.window * epoch
    steps = 1
    seconds_of(bundle, steps)
    for _ in range(2):  # A short run is slower a step than a long one.
        steps = max(steps, min(most, int(seconds / seconds_of(bundle, steps))))
    return functools.partial(seconds_of, bundle, steps)


def improvement(alone: Sequence[float], together: float) -> float:
    """The paper's metric: the share of the time that a pack saves.

    Args:
      alone: The time of a step of each model alone.
      together: That of a step of all of them in one program.

    Examples:
      >>> improvement([3.0, 1.0], 3.0), improvement([1.0, 1.0], 2.5)
      (0.25, -0.25)
    """
    return (sum(alone) - together) / sum(alone)


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Median, extremes and the share above 0 of some improvements.

    Examples:
      >>> summary([0.25, -0.125, 0.5])
      {'median': 0.25, 'worst': -0.125, 'best': 0.5, 'won': 0.6667}
    """
    won = sum(value > 0 for value in values) / len(values)
    return {
        "median": round(statistics.median(values), 4),
        "worst": round(min(values), 4),
        "best": round(max(values), 4),
        "won": round(won, 4),
    }
