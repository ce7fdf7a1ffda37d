"""Small tasks that several test modules train."""

from __future__ import annotations

import flax.linen as nn
import optax

import jaxpack as jp


class MLP(nn.Module):
    """8-16-4 by default, with stock dropout."""

    width: int = 16
    rate: float = 0.0

    @nn.compact
    def __call__(self, x, *, train: bool = False):
        x = nn.relu(nn.Dense(self.width)(x))
        x = nn.Dropout(self.rate, deterministic=not train)(x)
        return nn.Dense(4)(x)


class CNN(nn.Module):
    """Two stock convolutions, optionally with stock BatchNorm."""

    batch_norm: bool = False
    rate: float = 0.0

    @nn.compact
    def __call__(self, x, *, train: bool = False):
        for channels in (4, 8):
            x = nn.Conv(channels, (3, 3), use_bias=not self.batch_norm)(x)
            if self.batch_norm:
                x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
            x = nn.max_pool(nn.relu(x), (2, 2), (2, 2))
        x = x.reshape(len(x), -1)
        x = nn.Dropout(self.rate, deterministic=not train)(x)
        return nn.Dense(4)(x)


def model(hp):
    """The model of `mlp_task`."""
    return MLP(width=hp.get("width", 16), rate=hp.rate)


def optimizer(hp):
    """The optimizer of `mlp_task`."""
    return optax.sgd(hp.learning_rate, momentum=0.9)


def mlp_task(dataset, **options):
    """A task with the hparams learning_rate, rate and, if given, width."""
    return jp.Task(model, optimizer, dataset, **({"batch_size": 16} | options))


def space(**more):
    """A space for `mlp_task`."""
    return jp.Space(
        learning_rate=jp.log_uniform(1e-3, 1e-1), rate=jp.uniform(0.0, 0.5), **more
    )
