"""Lanes of pytrees: reading and writing one of many, and their shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxpack.types import PyTree


def take(tree: PyTree, lane: jax.typing.ArrayLike) -> PyTree:
    """Reads one lane of a pytree with leaves `[N, ...]`.

    Examples:
      >>> take({"w": np.eye(2)}, 1)["w"].tolist()
      [0.0, 1.0]
    """
    return jax.tree.map(
        lambda leaf: jax.lax.dynamic_index_in_dim(leaf, lane, keepdims=False), tree
    )


def put(tree: PyTree, lane_tree: PyTree, lane: jax.typing.ArrayLike) -> PyTree:
    """Writes one lane of a pytree with leaves `[N, ...]`.

    Examples:
      >>> put({"w": np.zeros((2, 2))}, {"w": np.ones(2)}, 1)["w"].tolist()
      [[0.0, 0.0], [1.0, 1.0]]
    """
    return jax.tree.map(
        lambda leaf, new: jax.lax.dynamic_update_index_in_dim(leaf, new, lane, 0),
        tree,
        lane_tree,
    )


def avals(tree: PyTree, num_lanes: int | None = None) -> PyTree:
    """The shapes and dtypes of a pytree, optionally with a lane axis put before.

    Examples:
      >>> avals({"w": np.zeros(3, np.float32)}, num_lanes=2)["w"].shape
      (2, 3)
    """
    lead = () if num_lanes is None else (num_lanes,)

    def aval(leaf: Any) -> jax.ShapeDtypeStruct:
        weak = bool(getattr(leaf, "weak_type", False))
        shape = lead + tuple(np.shape(leaf))
        dtype = leaf.dtype if hasattr(leaf, "dtype") else np.result_type(leaf)
        return jax.ShapeDtypeStruct(shape, dtype, weak_type=weak)

    return jax.tree.map(aval, tree)


def zeros(tree: PyTree) -> PyTree:
    """Numpy zeros of the shapes and dtypes of `tree`'s leaves."""
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), tree)


def to_host(tree: PyTree) -> PyTree:
    """Copies a pytree of arrays into numpy arrays that share no device memory."""
    return jax.tree.map(np.array, jax.device_get(tree))


def named(tree: PyTree) -> dict[str, Any]:
    """The leaves in nested dicts by name, whatever containers they are in.

    Empty containers are left out.

    Examples:
      >>> named(({"w": 1}, [2, 3]))
      {'0': {'w': 1}, '1': {'0': 2, '1': 3}}
    """
    root: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        *parents, name = names(path)
        node = root
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return root


def unnamed(nested: Mapping[str, Any], like: PyTree) -> PyTree:
    """The inverse of `named`: the leaves in the containers that `like` has.

    Raises:
      ValueError: If the names are not those of `like`.

    Examples:
      >>> unnamed({"0": {"w": 1}, "1": {"0": 2, "1": 3}}, ({"w": 0}, [0, 0]))
      ({'w': 1}, [2, 3])
    """
    leaves = {names(path): leaf for path, leaf in jax.tree.leaves_with_path(nested)}
    paths, structure = jax.tree.flatten_with_path(like)
    expected = [names(path) for path, _ in paths]
    for name in {*leaves} ^ {*expected}:
        has = "has" if name in leaves else "lacks"
        raise ValueError(f"{has} {'.'.join(name)}")
    return jax.tree.unflatten(structure, [leaves[name] for name in expected])


def names(path: Any) -> tuple[str, ...]:
    """The parts of a leaf's path as plain text."""
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def size_bytes(tree: PyTree) -> int:
    """Bytes that the leaves of `tree` occupy.

    Examples:
      >>> size_bytes({"w": np.zeros((2, 3), np.float32)})
      24
    """
    return sum(
        int(np.prod(leaf.shape)) * np.dtype(leaf.dtype).itemsize
        for leaf in jax.tree.leaves(tree)
    )
