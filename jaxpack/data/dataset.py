"""`Dataset`: the splits a task trains and is judged on, as arrays in host memory."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import warnings

import numpy as np
from jax import tree_util

from jaxpack.checks import flag
from jaxpack.data.checks import (
    check_alike,
    convert,
    count_classes,
    map_leaves,
    read_arrays,
    read_split,
)
from jaxpack.types import PyTree

# Standardisation works on this much at a time, so that its float64 copies stay small.
_CHUNK_BYTES = 2**22


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """Train, validation and test examples, ready for training.

    Make one with `Dataset.from_arrays` or `jaxpack.data.load`. Every split is a pair
    `(x, y)` of pytrees whose leaves are read-only arrays `[num_examples, ...]` of
    dtype float32, int32 or bool, standardised already where that was asked for.

    Attributes:
      name: What the dataset is called in tables.
      train: What trials are trained on.
      validation: What trials are scored on and chosen by.
      test: What only the winner is scored on; may be None.
      num_classes: `C`, or None where y is not a single integer array `[n]`.
      mean: What standardisation subtracted, like one x but with leaves `[channels]`;
        None without standardisation.
      std: What standardisation divided by, like `mean`.
    """

    name: str
    train: tuple[PyTree, PyTree]
    validation: tuple[PyTree, PyTree]
    test: tuple[PyTree, PyTree] | None = None
    num_classes: int | None = None
    mean: PyTree = None
    std: PyTree = None

    @classmethod
    def from_arrays(
        cls,
        train: tuple[PyTree, PyTree],
        validation: tuple[PyTree, PyTree] | None = None,
        test: tuple[PyTree, PyTree] | None = None,
        *,
        standardize: bool = False,
        name: str = "arrays",
        num_classes: int | None = None,
    ) -> Dataset:
        """Checks arrays and makes a dataset of copies of them.

        Floats become float32 and integers int32; an x of uint8 is taken for an image
        and becomes float32 with its values as they are, 0 to 255, with a warning (so
        give byte tokens as int32). Host memory peaks below three times the size of
        float32 arrays, theirs included.

        Args:
          train: `(x, y)`, arrays or pytrees of arrays (dicts, tuples, lists) that
            share one leading axis, that of the examples.
          validation: The same for the validation split, which has to be given.
          test: The same for the test split, or None.
          standardize: Whether to subtract the mean and divide by the standard
            deviation of the train split, in every float leaf of x: for each channel
            (last axis) of leaves `[n, ..., channels]`, for each feature of leaves
            `[n, features]`. What does not vary is only centred.
          name: What to call the dataset in tables.
          num_classes: `C`; None to count class labels, that is y of one integer
            array `[n]`.

        Raises:
          ValueError: If validation is missing, a split is empty, its leading axes
            differ, the splits do not look alike, values are not finite numbers, or
            labels are out of range or never seen in the train split.

        Examples:
          >>> x, y = np.arange(12.0).reshape(6, 2), np.array([0, 1, 0, 1, 0, 1])
          >>> Dataset.from_arrays((x[:4], y[:4]), (x[4:], y[4:]), standardize=True)
          Dataset('arrays', train=4, validation=2, test=None, num_classes=2)
        """
        standardize = flag("standardize", standardize)
        if not isinstance(name, str):
            raise ValueError(f"name is {name!r}; it must be a text")
        raw = {"train": train, "validation": validation, "test": test}
        if test is None:
            del raw["test"]
        raw = {split: read_split(split, pair) for split, pair in raw.items()}
        splits = {}
        for split, (x, y) in raw.items():
            check_alike(f"{split} x", x, raw["train"][0])
            check_alike(f"{split} y", y, raw["train"][1])
            splits[split] = (
                map_leaves(_convert_x, f"{split} x", x),
                map_leaves(_convert_y, f"{split} y", y),
            )
        num_classes = count_classes({k: y for k, (_, y) in splits.items()}, num_classes)
        mean = std = None
        if standardize:
            mean, std = _moments(splits["train"][0])
            for x, _ in splits.values():
                _standardize(x, mean, std)
        elif any(map(_is_raw_image, tree_util.tree_leaves(raw["train"][0]))):
            warnings.warn(
                "train x is uint8, and would be trained on as it is, 0 to 255; give "
                "standardize=True (or x as float32, if the model scales it itself)",
                stacklevel=2,
            )
        for leaf in tree_util.tree_leaves((splits, mean, std)):
            leaf.flags.writeable = False
        return cls(name=name, num_classes=num_classes, mean=mean, std=std, **splits)

    @property
    def num_train(self) -> int:
        """Examples in the train split."""
        return len(tree_util.tree_leaves(self.train)[0])

    @property
    def num_validation(self) -> int:
        """Examples in the validation split."""
        return len(tree_util.tree_leaves(self.validation)[0])

    def preprocess(self, x: PyTree) -> PyTree:
        """Treats new inputs as those of the train split were.

        Args:
          x: Arrays like the x given to `from_arrays`, of any number of examples.

        Returns:
          Copies with its dtype rule and standardisation applied.

        Raises:
          ValueError: If an example does not look like those of the train split, or a
            value is not a finite number.
        """
        x = map_leaves(_convert_x, "new x", read_arrays("new x", x))
        check_alike("new x", x, self.train[0])
        if self.mean is not None:
            _standardize(x, self.mean, self.std)
        return x

    def merged(self) -> Dataset:
        """The same data with the validation examples added to the train split.

        For training the winner of a sweep once more, on all there is. The inputs stay
        standardised as they were. The validation split stays, too, but what is read on
        it is then no estimate any more: the test split is left for that.

        Examples:
          >>> x, y = np.arange(12.0).reshape(6, 2), np.array([0, 1, 0, 1, 0, 1])
          >>> Dataset.from_arrays((x[:4], y[:4]), (x[4:], y[4:])).merged()
          Dataset('arrays_merged', train=6, validation=2, test=None, num_classes=2)
        """
        train = tree_util.tree_map(
            lambda *leaves: np.concatenate(leaves), self.train, self.validation
        )
        for leaf in tree_util.tree_leaves(train):
            leaf.flags.writeable = False
        return dataclasses.replace(self, name=f"{self.name}_merged", train=train)

    @functools.cached_property
    def content_hash(self) -> str:
        """SHA-256 of every array with its place, dtype and shape, in hex."""
        digest = hashlib.sha256()
        splits = {"train": self.train, "validation": self.validation, "test": self.test}
        for path, leaf in tree_util.tree_flatten_with_path(splits)[0]:
            place = tree_util.keystr(path)
            digest.update(f"{place} {leaf.dtype.str} {leaf.shape} ".encode())
            digest.update(np.ascontiguousarray(leaf).data.cast("B"))
        return digest.hexdigest()

    def __repr__(self) -> str:
        test = self.test and len(tree_util.tree_leaves(self.test)[0])
        return (
            f"Dataset({self.name!r}, train={self.num_train}, "
            f"validation={self.num_validation}, test={test}, "
            f"num_classes={self.num_classes})"
        )


_convert_x = functools.partial(convert, is_input=True)
_convert_y = functools.partial(convert, is_input=False)


def _is_raw_image(leaf: np.ndarray) -> bool:
    return leaf.dtype == np.uint8 and leaf.max() > 1


def _moments(x: PyTree) -> tuple[PyTree, PyTree]:
    """Returns mean and standard deviation of every channel, as float32."""
    leaves, structure = tree_util.tree_flatten(x)
    means, stds = zip(*map(_leaf_moments, leaves), strict=True)
    return structure.unflatten(means), structure.unflatten(stds)


def _leaf_moments(leaf: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if leaf.dtype.kind != "f":
        return np.array(0, np.float32), np.array(1, np.float32)
    axes = tuple(range(max(1, leaf.ndim - 1)))
    count = np.prod([leaf.shape[axis] for axis in axes])
    mean = sum(c.sum(axes, dtype=np.float64) for c in _chunks(leaf)) / count
    variance = sum(np.square(c - mean).sum(axes) for c in _chunks(leaf)) / count
    std = np.sqrt(variance)
    # Below this, what varies is the rounding of a constant.
    std = np.where(std > np.finfo(np.float32).eps * np.abs(mean), std, 1.0)
    return np.asarray(mean, np.float32), np.asarray(std, np.float32)


def _chunks(leaf: np.ndarray) -> list[np.ndarray]:
    rows = max(1, _CHUNK_BYTES * len(leaf) // leaf.nbytes)
    return [leaf[start : start + rows] for start in range(0, len(leaf), rows)]


def _standardize(x: PyTree, mean: PyTree, std: PyTree) -> None:
    """Standardises the float leaves of `x` in place."""
    leaves = map(tree_util.tree_leaves, (x, mean, std))
    for leaf, center, scale in zip(*leaves, strict=True):
        if leaf.dtype.kind == "f":
            leaf -= center
            leaf /= scale
