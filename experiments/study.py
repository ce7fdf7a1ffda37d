"""The configurations of the paper's study, and what its experiments have in common.

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
import json
import pathlib
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
import optax
from flax import linen as nn

import jaxpack as jp
from jaxpack import step
from jaxpack.engines import PackSpec
from jaxpack.groups import kinds_of_trials
from jaxpack.pack import Feed
from jaxpack.planner import plan
from jaxpack.step import Program
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


@dataclasses.dataclass
class Flags:
    """The flags that the experiments of the study have in common."""

    families: tuple[str, ...] = ()
    """Of models; all four by default."""
    batch_sizes: tuple[int, ...] = ()
    """32, 64 and 128 by default."""
    image_size: int = 32
    """Height and width of the images."""
    smoke: bool = False
    """Small models and images, and few of them, for a minute on two CPU cores."""
    repeats: int = 5
    """Rounds, of which the median is taken."""
    seconds: float = 0.3
    """How long one measurement should last."""
    directory: pathlib.Path | None = None
    """Where to write results. By default a folder of the device's in results/."""

    def __post_init__(self) -> None:
        if self.smoke:
            self.image_size, self.seconds = 16, 0.1
        if self.image_size < 16:
            raise ValueError(f"image-size is {self.image_size}; it must be at least 16")
        if self.repeats < 1:
            raise ValueError(f"repeats is {self.repeats}; it must be at least 1")

    def configs(self, optimizers: Sequence[str]) -> list[Config]:
        """The configurations asked for, with these optimizers.

        Raises:
          ValueError: If there is no such configuration.
        """
        families = self.families or (FAMILIES[::2] if self.smoke else FAMILIES)
        sizes = self.batch_sizes or (BATCH_SIZES[:1] if self.smoke else BATCH_SIZES)
        return configs(families, sizes, optimizers)


FlagsType = TypeVar("FlagsType", bound=Flags)


def command(
    name: str,
    flags: type[FlagsType],
    run: Callable[[FlagsType], dict[str, Any]],
    description: str | None,
    args: Sequence[str] | None,
) -> None:
    """Runs an experiment as a command line asks; its figures are the last line.

    Args:
      name: The experiment.
      flags: Its flags.
      run: Carries it out.
      description: What the help says.
      args: The command line; that of the process if None.
    """
    import tyro

    program = f"python -m experiments.{name}"
    try:
        chosen = tyro.cli(flags, prog=program, args=args, description=description)
        headline = run(chosen)
    except ValueError as error:
        sys.exit(f"{program}: {error}")
    print(json.dumps(headline), flush=True)


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


def laboratory(chosen: Sequence[Config], flags: Flags) -> Lab:
    """Makes synthetic images and puts them on the device.

    Speed does not depend on what the images show. There are as many as every batch
    size divides, at least 16 batches of the largest.

    Args:
      chosen: The configurations that are to be measured.
      flags: The size of the images and of the models.
    """
    sizes = [config.batch_size for config in chosen]
    rng, side = np.random.default_rng(0), flags.image_size
    count = int(np.lcm.reduce(sizes))
    count *= -(-16 * max(sizes) // count)

    def split(count: int) -> tuple[np.ndarray, np.ndarray]:
        x = rng.standard_normal((count, side, side, 3), np.float32)
        return x, np.arange(count, dtype=np.int32) % 10

    dataset = jp.data.Dataset.from_arrays(split(count), split(max(sizes)))
    return Lab(dataset, Feed(dataset, 0, 64, jax.local_devices()[0]), flags.smoke)


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


def lane_of(program: Program) -> dict[str, np.generic]:
    """The per-lane hparams of every trial of a program, each `[]`."""
    values = {"learning_rate": LEARNING_RATE, "total_steps": 2**20}
    return step.lane_values(program.lane_hparams, values)


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
