"""Hyperband over 143 tiny networks on 8x8 digits, packed into one program.

Claim: networks too small to fill even a CPU core are trained fastest in packs. Every
hyper-parameter of this space may differ between the lanes of a pack, so one program
serves all 143 trials, and a lane that a stopped trial leaves goes to the next one. The
sweep trains 1581 epochs in total, none of them twice.

    python -m experiments.digits_hyperband
    python -m experiments.digits_hyperband --engine solo

Expect a validation accuracy of about 0.99, after ten seconds on two CPU cores.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import optax
from flax import linen as nn

import jaxpack as jp
from experiments import common

ACTIVATIONS = {"relu": nn.relu, "tanh": nn.tanh, "gelu": nn.gelu}

SPACE = jp.Space(
    learning_rate=jp.log_uniform(3e-3, 3e-1),
    momentum=jp.uniform(0.0, 0.95),
    weight_decay=jp.log_uniform(1e-6, 1e-2),
    dropout=jp.uniform(0.0, 0.5),
    activation=jp.choice(*ACTIVATIONS),
)


@dataclasses.dataclass
class Flags(common.Flags):
    """The flags of this experiment."""

    max_resource: common.Int = 81
    """Epochs that a trial gets which is never stopped, Hyperband's R."""


def make_task() -> jp.Task:
    """The task."""
    return jp.Task(
        model=make_model, optimizer=make_optimizer, dataset=jp.data.load("digits")
    )


def make_model(hp: jp.HParams) -> nn.Module:
    """64-32-10."""
    activation = jp.switch(hp.activation, ACTIVATIONS)
    return jp.models.MLP(32, depth=1, dropout=hp.dropout, activation=activation)


def make_optimizer(hp: jp.HParams) -> optax.GradientTransformation:
    """SGD with momentum, warmed up and annealed."""
    learning_rate = jp.schedules.warmup_cosine(
        0.0, hp.learning_rate, 0.02 * hp.total_steps, hp.total_steps
    )
    return optax.chain(
        optax.add_decayed_weights(hp.weight_decay),
        optax.sgd(learning_rate, momentum=hp.momentum),
    )


def main(args: Sequence[str] | None = None) -> None:
    """Runs the sweep that the command line asks for."""
    flags = common.parse(Flags, "digits_hyperband", __doc__, args)
    common.run("digits_hyperband", make_task(), SPACE, flags)


if __name__ == "__main__":
    main()
