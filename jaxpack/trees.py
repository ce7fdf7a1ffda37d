"""Lanes of pytrees: stacking, unstacking, and reading or writing one lane."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpack.types import PyTree


def stack(trees: Sequence[PyTree]) -> PyTree:
    """Stacks `N` like pytrees into one with a leading lane axis.

    Args:
      trees: Pytrees of one structure, whose matching leaves have one shape and
        dtype. At least one.

    Returns:
      A pytree of that structure with leaves of shape `[N, ...]`.

    Raises:
      ValueError: If `trees` is empty or the structures differ.

    Examples:
      >>> stack([{"w": jnp.zeros(3)}, {"w": jnp.ones(3)}])["w"].shape
      (2, 3)
    """
    if not trees:
        raise ValueError("cannot stack no trees: the lane axis would be empty")
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def unstack(tree: PyTree) -> list[PyTree]:
    """Splits a pytree with leaves `[N, ...]` into its `N` lanes.

    Examples:
      >>> [lane["w"].tolist() for lane in unstack({"w": np.eye(2)})]
      [[1.0, 0.0], [0.0, 1.0]]
    """
    num_lanes = jax.tree.leaves(tree)[0].shape[0]
    return [jax.tree.map(operator.itemgetter(i), tree) for i in range(num_lanes)]


def take(tree: PyTree, lane: jax.typing.ArrayLike) -> PyTree:
    """Reads one lane of a pytree with leaves `[N, ...]`.

    Examples:
      >>> take({"w": jnp.eye(2)}, 1)["w"].tolist()
      [0.0, 1.0]
    """
    return jax.tree.map(
        lambda leaf: jax.lax.dynamic_index_in_dim(leaf, lane, keepdims=False), tree
    )


def put(tree: PyTree, lane_tree: PyTree, lane: jax.typing.ArrayLike) -> PyTree:
    """Writes one lane of a pytree with leaves `[N, ...]`.

    Examples:
      >>> put({"w": jnp.zeros((2, 2))}, {"w": jnp.ones(2)}, 1)["w"].tolist()
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
