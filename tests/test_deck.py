"""The deck is fixed by (seed, epoch), in any process, and differs by both."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest

from jaxpack.data import deck, window_epochs
from jaxpack.data.deck import permutation


def test_golden_rows():
    expected = [[2, 5, 9, 7, 3, 0, 6, 8, 4, 1], [1, 7, 6, 5, 0, 4, 3, 9, 8, 2]]
    np.testing.assert_array_equal(deck(7, 10, 2, first_epoch=3), expected)


@pytest.mark.parametrize("num_examples", [1, 2, 31, 32, 33, 1000])
def test_rows_are_permutations(num_examples):
    rows = deck(3, num_examples, 4)
    assert rows.shape == (4, num_examples) and rows.dtype == np.int32
    expected = np.tile(np.arange(num_examples), (4, 1))
    np.testing.assert_array_equal(np.sort(rows, axis=1), expected)


def test_differs_by_epoch_and_seed():
    rows = np.concatenate([deck(0, 100, 3), deck(1, 100, 3), deck(2**32 - 1, 100, 3)])
    assert len({row.tobytes() for row in rows}) == 9


def test_row_depends_on_its_epoch_alone():
    whole = deck(5, 64, 10)
    np.testing.assert_array_equal(whole[6:9], deck(5, 64, 3, first_epoch=6))
    np.testing.assert_array_equal(whole, deck(5, 64, 10))


def test_streams_above_the_epochs_differ_from_them():
    assert (permutation(0, 2**32, 100) != permutation(0, 0, 100)).any()


def test_every_order_is_equally_likely():
    counts = Counter(map(tuple, deck(11, 3, 6000).tolist()))
    assert len(counts) == 6
    # Binomial: 1000 +- 29, so this is five standard deviations.
    assert all(abs(count - 1000) < 145 for count in counts.values())


def test_same_in_another_process():
    code = "from jaxpack.data import deck; print(deck(9, 50, 3).tolist())"
    env = os.environ | {
        "PYTHONHASHSEED": "12345",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    out = subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert out.stdout.strip() == str(deck(9, 50, 3).tolist())


def test_numpy_integers_are_integers():
    args: list[Any] = [np.int64(7), np.int32(10), np.int8(2), np.uint8(3)]
    np.testing.assert_array_equal(deck(*args), deck(7, 10, 2, 3))


def test_no_epochs():
    assert deck(0, 5, 0).shape == (0, 5)


@pytest.mark.parametrize(
    ("args", "name"),
    [
        ((-1, 5, 1), "seed"),
        ((2**32, 5, 1), "seed"),
        ((0.5, 5, 1), "seed"),
        ((0, 0, 1), "num_examples"),
        ((0, 2**31, 1), "num_examples"),
        ((0, 5, -1), "num_epochs"),
        ((0, 5, 1, -1), "first_epoch"),
        ((0, 5, 1, 2**32), "first_epoch"),
    ],
)
def test_refuses_bad_arguments(args, name):
    with pytest.raises(ValueError, match=f"{name} must be an integer in"):
        deck(*args)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ((4000, 27), 27),
        ((1000, 100, 4000 * 10), 10),
        ((1000, 100, 4000 * 10 - 1), 9),
        ((1000, 100, 1), 1),
        ((1000, 0), 1),
    ],
)
def test_window_epochs(args, expected):
    assert window_epochs(*args) == expected


def test_window_epochs_default_is_256_mib():
    num_examples = 50_000
    epochs = window_epochs(num_examples, 10**6)
    row = deck(0, num_examples, 1).nbytes
    assert epochs * row <= 256 * 2**20 < (epochs + 1) * row


def test_window_epochs_refuses_bad_arguments():
    with pytest.raises(ValueError, match="num_examples must be an integer in"):
        window_epochs(0, 3)
