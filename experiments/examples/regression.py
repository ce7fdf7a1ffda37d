"""Regression with an own loss: a network that says how sure it is.

The network predicts a mean and a standard deviation for every example and is trained
by the Gaussian likelihood of the target. The data are Friedman's function of five
inputs (among ten) with noise of standard deviation 1, which no prediction can beat.

    python -m experiments.examples.regression

Expect a mean squared error of about 1.5 after 10 seconds on two CPU cores; the
targets' variance is 24.
"""

from __future__ import annotations

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import optax

import jaxpack as jp

SPACE = jp.Space(
    learning_rate=jp.log_uniform(1e-3, 3e-2),
    floor=jp.log_uniform(1e-2, 1.0),
)


def make_data(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns x `[count, 10]` and y `[count]`, both float32."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(size=(count, 10))
    y = 10 * np.sin(np.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2
    y = y + 10 * x[:, 3] + 5 * x[:, 4] + rng.normal(size=count)
    return x.astype(np.float32), y.astype(np.float32)


class Net(nn.Module):
    """10-64-64-2."""

    @nn.compact
    def __call__(self, x):
        """Returns `[B, 2]`: the mean, and what the deviation is made from."""
        for _ in range(2):
            x = nn.relu(nn.Dense(64)(x))
        return nn.Dense(2)(x)


def negative_log_likelihood(outputs, labels, hp):
    """`[B]`; the deviation never goes below an hparam of its own."""
    deviation = hp.floor + nn.softplus(outputs[:, 1])
    error = (outputs[:, 0] - labels) / deviation
    return 0.5 * jnp.square(error) + jnp.log(deviation)


def mse(outputs, labels):
    """`[B]`, the squared error of the mean."""
    return jp.metrics.squared_error(outputs[:, 0], labels)


def make_task() -> jp.Task:
    """The task."""
    return jp.Task(
        model=lambda hp: Net(),
        optimizer=lambda hp: optax.adam(hp.learning_rate),
        dataset=jp.data.Dataset.from_arrays(
            make_data(800, 0), make_data(400, 1), make_data(400, 2), standardize=True
        ),
        loss=negative_log_likelihood,
        metrics={"mse": mse},
    )


def main(max_resource: int = 27) -> jp.SweepResult:
    """Runs the sweep and prints the best trial."""
    result = jp.sweep(make_task(), SPACE, jp.Hyperband(max_resource))
    print(result.best)
    print(result.test_metrics)
    return result


if __name__ == "__main__":
    main()
