"""The tuning problem of the paper: its space, its four optimizers, its data.

Section 6 of Liu, Krishnan, Elmore and Franklin (arXiv 2002.02885) tunes a DenseNet on
CIFAR-10 with Hyperband over 11 batch sizes, a learning rate, 4 optimizers and 4
activations. Activation and optimizer are switches here, which differ between the lanes
of one program; the batch size makes a program each.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import optax
from flax import linen as nn

import jaxpack as jp

BATCH_SIZES = tuple(range(20, 71, 5))

ACTIVATIONS = {
    "sigmoid": nn.sigmoid,
    "leaky_relu": nn.leaky_relu,
    "tanh": nn.tanh,
    "relu": nn.relu,
}

OPTIMIZERS = ("adam", "sgd", "adagrad", "momentum")


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is tuned.

    Attributes:
      model: "densenet", of the depth 40 and growth 12, or "mlp", of two layers.
      dataset: Name of the data set.
      width: Units of a layer of the MLP.
      batch_sizes: Batch sizes to choose from.
    """

    model: str = "densenet"
    dataset: str = "tfds:cifar10"
    width: int = 256
    batch_sizes: tuple[int, ...] = BATCH_SIZES

    @property
    def task(self) -> jp.Task:
        """What every trial trains."""
        dataset = jp.data.load(self.dataset)
        return jp.Task(functools.partial(make_model, self), make_optimizer, dataset)

    @property
    def space(self) -> jp.Space:
        """The hparams to try."""
        return make_space(self.batch_sizes)


SMOKE = Problem("mlp", "digits", batch_sizes=(32, 64))
"""Small enough for a minute on two cores."""


def make_space(batch_sizes: Sequence[int] = BATCH_SIZES) -> jp.Space:
    """The paper's space, with these batch sizes."""
    return jp.Space(
        batch_size=jp.choice(*batch_sizes),
        learning_rate=jp.log_uniform(1e-6, 1e-1),
        optimizer=jp.choice(*OPTIMIZERS),
        activation=jp.choice(*ACTIVATIONS),
    )


def make_model(problem: Problem, hp: jp.HParams) -> nn.Module:
    """The model of a trial."""
    activation = jp.switch(hp.activation, ACTIVATIONS)
    if problem.model == "mlp":
        return jp.models.MLP(problem.width, activation=activation)
    return jp.models.DenseNet(40, activation=activation)


def make_optimizer(hp: jp.HParams) -> optax.GradientTransformation:
    """The optimizer of a trial."""
    rate = hp.learning_rate
    branches = {
        "adam": optax.adam(rate),
        "sgd": optax.sgd(rate),
        "adagrad": optax.adagrad(rate),
        "momentum": optax.sgd(rate, momentum=0.9),
    }
    return jp.optimizers.switch(hp.optimizer, branches)


def default_engine() -> str:
    """What suits the device: "solo" on a CPU, whose workers are its cores."""
    return "solo" if jax.default_backend() == "cpu" else "packed"
