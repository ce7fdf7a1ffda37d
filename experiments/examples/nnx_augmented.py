"""A model of `flax.nnx` on pictures that an own augmentation shifts and dims.

How far pictures are shifted and how much they are dimmed are hparams like any other:
each lane of a pack augments its batch in its own way.

    python -m experiments.examples.nnx_augmented

Expect a validation accuracy of about 0.98 after 30 seconds on two CPU cores.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxpack as jp

SPACE = jp.Space(
    learning_rate=jp.log_uniform(1e-2, 3e-1),
    dropout=jp.uniform(0.0, 0.5),
    shift=jp.uniform(0.0, 1.0),
    dim=jp.uniform(0.0, 0.5),
)


class CNN(nnx.Module):
    """Two convolutions on 8x8 pictures."""

    def __init__(self, dropout: float, rngs: nnx.Rngs):
        self.first = nnx.Conv(1, 8, (3, 3), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.second = nnx.Conv(8, 16, (3, 3), strides=2, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.out = nnx.Linear(256, 10, rngs=rngs)

    def __call__(self, x):
        """Returns the scores of the classes, `[B, 10]`."""
        x = nnx.relu(self.norm(self.first(x)))
        x = nnx.relu(self.second(x)).reshape(len(x), -1)
        return self.out(self.dropout(x))


def augment(key, x, hp):
    """Shifts some pictures by a pixel and dims all of them, each by its own draw."""
    which, where, how = jax.random.split(key, 3)
    shifted = jnp.stack([jnp.roll(x, by, axis) for by in (1, -1) for axis in (1, 2)])
    chosen = shifted[jax.random.randint(where, (len(x),), 0, 4), jnp.arange(len(x))]
    moves = jax.random.uniform(which, (len(x), 1, 1, 1)) < hp.shift
    factor = 1 - hp.dim * jax.random.uniform(how, (len(x), 1, 1, 1))
    return jnp.where(moves, chosen, x) * factor


def make_task() -> jp.Task:
    """The task."""
    return jp.Task.from_nnx(
        model=lambda hp, rngs: CNN(hp.dropout, rngs),
        optimizer=lambda hp: optax.sgd(hp.learning_rate, momentum=0.9),
        dataset=jp.data.load("digits"),
        augment=augment,
    )


def main(max_resource: int = 9) -> jp.SweepResult:
    """Runs the sweep and prints the best trial."""
    result = jp.sweep(make_task(), SPACE, jp.Hyperband(max_resource))
    print(result.best)
    print(result.test_metrics)
    return result


if __name__ == "__main__":
    main()
