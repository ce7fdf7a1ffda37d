"""Hyperband over 49 networks on 5000 MNIST digits, many of them trained at once.

Claim: one sweep over learning rate, weight decay, dropout, activation, optimizer,
width and batch size needs a program for each optimizer with each width and batch size
(eight), not for each trial. It trains 357 epochs in total, none of them twice, and
finds a good network.

    python -m experiments.mnist_hyperband
    python -m experiments.mnist_hyperband --engine packed
    python -m experiments.mnist_hyperband --model cnn

Expect a validation accuracy of about 0.95 from the MLP, after about half a minute on
two CPU cores, and 0.98 from the CNN, after two or three.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import optax
from flax import linen as nn

import jaxpack as jp
from experiments import common

ACTIVATIONS = {"relu": nn.relu, "tanh": nn.tanh, "gelu": nn.gelu}

SPACE = jp.Space(
    learning_rate=jp.log_uniform(3e-4, 3e-2),
    weight_decay=jp.log_uniform(1e-6, 1e-2),
    dropout=jp.uniform(0.0, 0.5),
    activation=jp.choice(*ACTIVATIONS),
    optimizer=jp.choice("sgd", "adamw"),
    width=jp.choice(64, 128),
    batch_size=jp.choice(32, 64),
)


@dataclasses.dataclass
class Flags(common.Flags):
    """The flags of this experiment."""

    model: Literal["mlp", "cnn"] = "mlp"
    """A perceptron of two hidden layers, or a small convolutional network."""


def make_task(model: str) -> jp.Task:
    """The task with one of the models, "mlp" or "cnn"."""
    return jp.Task(
        model=make_mlp if model == "mlp" else make_cnn,
        optimizer=make_optimizer,
        dataset=jp.data.load("mnist5k"),
    )


def make_mlp(hp: jp.HParams) -> nn.Module:
    """784-width-width-10."""
    activation = jp.switch(hp.activation, ACTIVATIONS)
    return jp.models.MLP(hp.width, dropout=hp.dropout, activation=activation)


def make_cnn(hp: jp.HParams) -> nn.Module:
    """Two convolutions, and a dense layer of the width."""
    activation = jp.switch(hp.activation, ACTIVATIONS)
    return jp.models.LeNet(width=hp.width, dropout=hp.dropout, activation=activation)


def make_optimizer(hp: jp.HParams) -> optax.GradientTransformation:
    """SGD with momentum or AdamW, warmed up and annealed."""
    learning_rate = jp.schedules.warmup_cosine(
        0.0, hp.learning_rate, 0.02 * hp.total_steps, hp.total_steps
    )
    if hp.optimizer == "adamw":
        return optax.adamw(learning_rate, weight_decay=hp.weight_decay)
    return optax.chain(
        optax.add_decayed_weights(hp.weight_decay),
        optax.sgd(learning_rate, momentum=0.9),
    )


def main(args: Sequence[str] | None = None) -> None:
    """Runs the sweep that the command line asks for."""
    flags = common.parse(Flags, "mnist_hyperband", __doc__, args)
    name = f"mnist_hyperband-{flags.model}"
    common.run(name, make_task(flags.model), SPACE, flags)


if __name__ == "__main__":
    main()
