"""Checks at the door of `Dataset.from_arrays`, and its dtype rule.

Each takes a `where` such as `"train x"` and says in its error what is wrong there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jax import tree_util

from jaxpack.types import PyTree


def read_split(split: str, pair: Any) -> tuple[PyTree, PyTree]:
    """Returns a split's `(x, y)` as NumPy arrays of one length, not yet converted.

    Raises:
      ValueError: If `pair` is no pair of (pytrees of) arrays of numbers with one
        leading axis.
    """
    if pair is None:
        raise ValueError(
            f"{split} is missing; trials are chosen by their scores on validation, so "
            "hold a part of the examples back: train=(x[n:], y[n:]), "
            "validation=(x[:n], y[:n]), in random order"
        )
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise ValueError(
            f"{split} must be a pair (x, y) of arrays, got {type(pair).__name__}"
        )
    x, y = (read_arrays(f"{split} {role}", pair[i]) for i, role in enumerate("xy"))
    lengths = _lengths(f"{split} x", x) | _lengths(f"{split} y", y)
    first = next(iter(lengths))
    for where, size in lengths.items():
        if size != lengths[first]:
            raise ValueError(
                f"{first} has {lengths[first]} examples but {where} has {size}; the "
                "leading axis of every array of a split counts its examples"
            )
    return x, y


def read_arrays(where: str, tree: PyTree) -> PyTree:
    """Returns a pytree's leaves as NumPy arrays, not yet converted.

    Raises:
      ValueError: If there are none, or one is empty, not of numbers or without axes.
    """
    if not tree_util.tree_leaves(tree):
        raise ValueError(f"{where} holds no array: {tree!r}")
    return map_leaves(_as_array, where, tree)


def check_alike(where: str, tree: PyTree, train: PyTree) -> None:
    """Checks that examples of another split look like those of the train split.

    Raises:
      ValueError: If tree structures, shapes of one example or kinds of dtype differ.
    """
    structure, expected = map(tree_util.tree_structure, (tree, train))
    if structure != expected:
        raise ValueError(
            f"{where} has the structure {structure}, but train has {expected}"
        )
    pairs = zip(_named(where, tree), tree_util.tree_leaves(train), strict=True)
    for (name, leaf), model in pairs:
        if leaf.shape[1:] != model.shape[1:]:
            raise ValueError(
                f"an example of {name} has the shape {leaf.shape[1:]}, but one of "
                f"train has {model.shape[1:]}"
            )
        if leaf.dtype.kind != model.dtype.kind:
            raise ValueError(
                f"{name} has the dtype {leaf.dtype}, but train has {model.dtype}; "
                "convert both alike"
            )


def convert(where: str, leaf: np.ndarray, *, is_input: bool) -> np.ndarray:
    """Returns a copy with the dtype it is trained with.

    Floats become float32, integers int32, bool stays. An input of uint8 is taken for
    an image and becomes float32, with the same values.

    Raises:
      ValueError: If a value does not fit the new dtype or is not finite.
    """
    if leaf.dtype.kind == "b":
        return np.array(leaf, order="C")
    is_image = is_input and leaf.dtype == np.uint8
    if leaf.dtype.kind in "iu" and not is_image:
        bounds = np.iinfo(np.int32)
        _refuse(where, leaf, (leaf < bounds.min) | (leaf > bounds.max), "within int32")
        return np.array(leaf, np.int32, order="C")
    with np.errstate(over="ignore"):
        converted = np.array(leaf, np.float32, order="C")
    _refuse(where, leaf, ~np.isfinite(converted), "finite as float32")
    return converted


def count_classes(labels: Mapping[str, PyTree], num_classes: Any) -> int | None:
    """Checks class labels, and counts the classes unless `num_classes` is given.

    Args:
      labels: The y of every split by its name, `"train"` among them. Anything but a
        single integer array `[n]` is no class label and goes unchecked.
      num_classes: `C`, or None for the largest label plus 1.

    Raises:
      ValueError: If a label is negative or not below `num_classes`, or never occurs
        in the train split.
    """
    if num_classes is not None and not (
        isinstance(num_classes, int | np.integer) and num_classes > 0
    ):
        raise ValueError(f"num_classes must be a positive int, got {num_classes!r}")
    given = None if num_classes is None else int(num_classes)
    train = labels["train"]
    if not isinstance(train, np.ndarray) or train.ndim > 1 or train.dtype.kind != "i":
        return given
    limit = given or max(0, *(int(y.max()) for y in labels.values())) + 1
    for split, y in labels.items():
        outside = (y < 0) | (y >= limit)
        _refuse(f"{split} y", y, outside, f"class labels from 0 to {limit - 1}")
        if unseen := np.setdiff1d(y, train).tolist():
            raise ValueError(
                f"{split} y has class labels that are not in train y: {_some(unseen)}; "
                "split the examples otherwise (or give a regression target as floats)"
            )
    return limit


def map_leaves(function: Callable[[str, Any], Any], where: str, tree: PyTree) -> PyTree:
    """Applies `function(where, leaf)` to every leaf, `where` ending in its path."""
    return tree_util.tree_map_with_path(
        lambda path, leaf: function(where + tree_util.keystr(path), leaf), tree
    )


def _named(where: str, tree: PyTree) -> list[tuple[str, np.ndarray]]:
    leaves = tree_util.tree_flatten_with_path(tree)[0]
    return [(where + tree_util.keystr(path), leaf) for path, leaf in leaves]


def _lengths(where: str, tree: PyTree) -> dict[str, int]:
    return {name: len(leaf) for name, leaf in _named(where, tree)}


def _as_array(where: str, leaf: Any) -> np.ndarray:
    array = np.asarray(leaf)
    kind = array.dtype.kind
    # bfloat16 and its like have a kind of their own, and cast to float32 safely.
    if kind not in "biuf" and not np.can_cast(array.dtype, np.float32):
        raise ValueError(
            f"{where} has the dtype {array.dtype}; give rectangular arrays of "
            "numbers (number classes from 0, encode strings)"
        )
    if array.ndim == 0:
        raise ValueError(
            f"{where} is {leaf!r}, without an axis of examples; lists are read as "
            "pytrees, so turn a list of numbers into a NumPy array"
        )
    if array.size == 0:
        raise ValueError(f"{where} is empty: its shape is {array.shape}")
    return array


def _refuse(where: str, leaf: np.ndarray, bad: np.ndarray, expected: str) -> None:
    if bad.any():
        index = tuple(int(i) for i in np.unravel_index(bad.argmax(), bad.shape))
        raise ValueError(
            f"{where} has values that are not {expected}: {np.count_nonzero(bad)} of "
            f"{bad.size}, the first {leaf[index]} at index {index}"
        )


def _some(values: list[Any]) -> str:
    shown = ", ".join(map(str, values[:10]))
    return f"{shown}, ... ({len(values)} in all)" if len(values) > 10 else shown
