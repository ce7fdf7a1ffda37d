"""Several labels an example: which of three properties the digit on a picture has.

    python -m experiments.examples.multi_label

Expect that for about 0.95 of the digits all three are right, after 10 seconds on two
CPU cores. One in eight would be by chance.
"""

from __future__ import annotations

import numpy as np
import optax

import jaxpack as jp

SPACE = jp.Space(
    learning_rate=jp.log_uniform(1e-3, 3e-1),
    dropout=jp.uniform(0.0, 0.5),
)


def properties(digits: np.ndarray) -> np.ndarray:
    """Whether digits are even, above 4, and drawn with a loop: `[n, 3]` float32."""
    loop = np.isin(digits, [0, 6, 8, 9])
    return np.stack([digits % 2 == 0, digits > 4, loop], axis=1).astype(np.float32)


def binary_cross_entropy(outputs, labels):
    """`[B]`, the mean over an example's labels."""
    return optax.sigmoid_binary_cross_entropy(outputs, labels).mean(-1)


def exact_match_accuracy(outputs, labels):
    """`[B]`, whether every label is right."""
    return ((outputs > 0) == (labels > 0)).all(-1).astype(float)


def label_accuracy(outputs, labels):
    """`[B]`, the share of an example's labels that are right."""
    return ((outputs > 0) == (labels > 0)).mean(-1)


def make_task() -> jp.Task:
    """The task."""
    digits = jp.data.load("digits")
    assert digits.test is not None
    splits = [
        (x, properties(y)) for x, y in (digits.train, digits.validation, digits.test)
    ]
    return jp.Task(
        model=lambda hp: jp.models.MLP(32, num_classes=3, dropout=hp.dropout),
        optimizer=lambda hp: optax.sgd(hp.learning_rate, momentum=0.9),
        dataset=jp.data.Dataset.from_arrays(*splits),
        loss=binary_cross_entropy,
        metrics={
            "exact_match_accuracy": exact_match_accuracy,
            "label_accuracy": label_accuracy,
        },
    )


def main(max_resource: int = 9) -> jp.SweepResult:
    """Runs the sweep and prints the best trial."""
    result = jp.sweep(make_task(), SPACE, jp.Hyperband(max_resource))
    print(result.best)
    print(result.test_metrics)
    return result


if __name__ == "__main__":
    main()
