"""Settings and small datasets that all tests share."""

from __future__ import annotations

import os
import signal

# What a shell runs in its background ignores Ctrl-C; the tests of it must not.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Several test processes share one GPU, where there is one.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# Programs compiled by an earlier run would not count as compiled in this one.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"

import jax
import numpy as np
import pytest

from jaxpack.data import Dataset

jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run the slow tests, too")


def pytest_collection_modifyitems(config, items):
    """Leaves out what others show in less time, unless nothing else is asked for."""
    slow = [item for item in items if item.get_closest_marker("slow")]
    if slow and not config.getoption("--slow") and len(slow) < len(items):
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]


def _blobs(num_examples: int, shape: tuple[int, ...], seed: int):
    """Returns noisy examples of four class centres that any model can tell apart."""
    centers = np.random.default_rng(0).normal(size=(4, *shape))
    y = np.arange(num_examples, dtype=np.int32) % 4
    noise = np.random.default_rng(seed).normal(size=(num_examples, *shape))
    return (centers[y] + 0.5 * noise).astype(np.float32), y


@pytest.fixture(scope="session")
def tiny_dataset() -> Dataset:
    """50 train and 23 validation examples, x `[n, 8]` float32, 4 classes."""
    return Dataset.from_arrays(
        train=_blobs(50, (8,), 1), validation=_blobs(23, (8,), 2), name="tiny"
    )


@pytest.fixture(scope="session")
def tiny_images() -> Dataset:
    """50 train and 23 validation examples, x `[n, 8, 8, 1]` float32, 4 classes."""
    return Dataset.from_arrays(
        train=_blobs(50, (8, 8, 1), 1),
        validation=_blobs(23, (8, 8, 1), 2),
        name="tiny_images",
    )


@pytest.fixture(scope="session")
def swept_directory(tmp_path_factory, tiny_dataset):
    """A sweep's directory and its result: 17 trials, of which some fail."""
    from tiny import mlp_task

    import jaxpack as jp

    space = jp.Space(
        learning_rate=jp.log_uniform(1e-3, 1e6),
        rate=jp.uniform(0.0, 0.5),
        width=jp.choice(8, 16),
    )
    directory = tmp_path_factory.mktemp("sweeps") / "tiny sweep"
    result = jp.sweep(
        mlp_task(tiny_dataset),
        space,
        jp.Hyperband(9),
        engine="packed",
        workers=2,
        max_lanes=4,
        directory=directory,
        enqueue=[{"learning_rate": 1e6, "rate": 0.5, "width": 8}],
        progress=False,
    )
    return directory, result
