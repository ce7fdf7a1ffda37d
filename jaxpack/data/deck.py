"""The deck: the order of the examples in every epoch, fixed by (seed, epoch) alone.

All trials of a sweep share the deck (common random numbers), so two trials differ by
their hparams and not by the luck of their draw. The bits are the raw stream of Philox
4x64 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), which
NumPy keeps stable, unlike the methods of `numpy.random.Generator`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

_LIMIT = 2**32


def deck(
    seed: int, num_examples: int, num_epochs: int, first_epoch: int = 0
) -> np.ndarray:
    """Returns the permutations of the examples, one row an epoch.

    Args:
      seed: In `[0, 2**32)`.
      num_examples: Examples in the training split, at least 1.
      num_epochs: `E`, rows to make.
      first_epoch: The epoch of row 0.

    Returns:
      `[E, num_examples]` int32. Row `e` depends on `seed`, `num_examples` and
      `first_epoch + e` only.

    Raises:
      ValueError: If an argument is out of range.

    Examples:
      >>> deck(0, 5, 2)
      array([[0, 2, 1, 4, 3],
             [3, 2, 4, 1, 0]], dtype=int32)
      >>> bool((deck(0, 5, 2)[1:] == deck(0, 5, 1, first_epoch=1)).all())
      True
    """
    num_epochs = _integer("num_epochs", num_epochs, 0, _LIMIT)
    first_epoch = _integer("first_epoch", first_epoch, 0, _LIMIT - num_epochs)
    num_examples = _integer("num_examples", num_examples, 1, 2**31)
    rows = np.empty((num_epochs, num_examples), np.int32)
    for row in range(num_epochs):
        rows[row] = permutation(seed, first_epoch + row, num_examples)
    return rows


def window_epochs(
    num_examples: int, num_epochs: int, limit_bytes: int = 256 * 2**20
) -> int:
    """Returns how many epochs of the deck to hold at once, at least 1.

    Args:
      num_examples: Examples in the training split, at least 1.
      num_epochs: Epochs there are in all.
      limit_bytes: What the rows held may take together, at 4 bytes an example.

    Raises:
      ValueError: If an argument is out of range.

    Examples:
      >>> window_epochs(4000, 27), window_epochs(50_000, 10_000)
      (27, 1342)
    """
    num_examples = _integer("num_examples", num_examples, 1, 2**31)
    num_epochs = _integer("num_epochs", num_epochs, 0, _LIMIT)
    limit_bytes = _integer("limit_bytes", limit_bytes, 0, 2**63)
    return max(1, min(num_epochs, limit_bytes // (4 * num_examples)))


def permutation(seed: int, stream: int, size: int) -> np.ndarray:
    """Returns a permutation of `size` items as int64, fixed by (seed, stream).

    Streams below `2**32` are the epochs of the deck; other uses take those above.

    Raises:
      ValueError: If `seed` is not an integer in `[0, 2**32)`.

    Examples:
      >>> permutation(0, 0, 5)
      array([0, 2, 1, 4, 3])
    """
    seed = _integer("seed", seed, 0, _LIMIT)
    generator = np.random.Philox(key=np.array([seed, stream], np.uint64))
    # The place in the low bits makes every sort key distinct, so that the order does
    # not depend on the sorting algorithm that NumPy picks for this processor.
    bits = np.uint64(size.bit_length())
    places = np.arange(size, dtype=np.uint64)
    keys = (generator.random_raw(size) >> bits << bits) | places
    keys.sort()
    return (keys & ((np.uint64(1) << bits) - np.uint64(1))).astype(np.int64)


def _integer(name: str, value: Any, low: int, high: int) -> int:
    if not isinstance(value, int | np.integer) or not low <= int(value) < high:
        raise ValueError(f"{name} must be an integer in [{low}, {high}), got {value!r}")
    return int(value)
