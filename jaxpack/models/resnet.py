"""Residual networks.

He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition", 2015,
https://arxiv.org/abs/1512.03385.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxpack.models.layers import Activation, batch_norm, check_stem, conv

# The paper's table 1: blocks of each stage, and whether they are bottlenecks.
_IMAGENET = {
    18: ((2, 2, 2, 2), False),
    34: ((3, 4, 6, 3), False),
    50: ((3, 4, 6, 3), True),
    101: ((3, 4, 23, 3), True),
    152: ((3, 8, 36, 3), True),
}


class ResNet(nn.Module):
    """Residual networks of the paper's two families; the depth says which.

    18, 34, 50, 101 and 152 have four stages (table 1), from 50 on of bottlenecks, and
    a projection where a shortcut changes its shape (option B). 6n+2, as 8, 20, 32,
    44, 56 and 110, have three stages of n blocks (section 4.2) and shortcuts without
    weights, which skip pixels and fill new channels with zeros (option A): this is
    what the paper uses for each, and what its numbers of weights count. In
    bottlenecks the 3x3 convolution has the stride, not the first 1x1 one, as has
    become usual since.

    Attributes:
      depth: Number of layers with weights.
      width: Channels of the first stage, which double from stage to stage; the
        paper's 16 (for 6n+2) or 64 if None.
      num_classes: Number of outputs.
      stem: "cifar", one 3x3 convolution, or "imagenet", a 7x7 one and a 3x3 maximum
        pool, both with strides of 2.
      activation: Function applied to hidden units; may be a `jaxpack.switch`.
      dropout: Fraction of pooled features dropped while training, none in the paper;
        may be a lane's.
    """

    depth: int = 8
    width: int | None = None
    num_classes: int = 10
    stem: str = "cifar"
    activation: Activation = nn.relu
    dropout: Any = 0.0

    @nn.compact
    def __call__(
        self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None
    ) -> jax.Array:
        """Returns the scores of the classes.

        Args:
          x: `[B, H, W, channels]` float images.
          train: Whether dropout drops, and BatchNorm uses and keeps the statistics
            of the batch.
          mask: `[B]` bool, false on padding, which BatchNorm leaves out; or None.

        Returns:
          `[B, C]` logits.

        Raises:
          ValueError: If the depth is none of the paper's, or the stem is unknown.
        """
        check_stem(self.stem)
        stages, width, block = self._plan()
        large = self.stem == "imagenet"
        x = conv(x, width, 7 if large else 3, 2 if large else 1)
        x = self.activation(batch_norm(x, train, mask))
        if large:
            x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
        for stage, blocks in enumerate(stages):
            for i in range(blocks):
                stride = 2 if stage > 0 and i == 0 else 1
                channels = width * 2**stage
                x = block(channels, stride, self.activation)(x, train, mask)
        x = nn.Dropout(self.dropout, deterministic=not train)(x.mean((1, 2)))
        return nn.Dense(self.num_classes)(x)

    def _plan(self) -> tuple[tuple[int, ...], int, Callable[..., nn.Module]]:
        """The number of blocks in each stage, the first one's width, the block."""
        if self.depth in _IMAGENET:
            stages, bottlenecks = _IMAGENET[self.depth]
            basic = functools.partial(BasicBlock, projects=True)
            return stages, self.width or 64, Bottleneck if bottlenecks else basic
        blocks, rest = divmod(self.depth - 2, 6)
        if blocks < 1 or rest:
            raise ValueError(
                f"depth is {self.depth}; it must be 6n+2 (8, 14, 20, 26, 32, ...) or "
                f"one of {', '.join(map(str, _IMAGENET))}"
            )
        return (blocks,) * 3, self.width or 16, BasicBlock


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut.

    Attributes:
      channels: Channels of both convolutions.
      stride: Of the first convolution.
      activation: Function applied to hidden units.
      projects: Whether a shortcut that changes its shape is a convolution.
    """

    channels: int
    stride: int
    activation: Activation
    projects: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, train: bool, mask: jax.Array | None) -> jax.Array:
        """Maps `[B, H, W, channels]` to the same with `H / stride`, `W / stride`."""
        y = batch_norm(conv(x, self.channels, 3, self.stride), train, mask)
        y = batch_norm(conv(self.activation(y), self.channels, 3), train, mask)
        shortcut = _project if self.projects else _pad
        return self.activation(y + shortcut(x, y, self.stride, train, mask))


class Bottleneck(nn.Module):
    """A 3x3 convolution between two of 1x1, beside a shortcut.

    Attributes:
      channels: Channels of the first two convolutions; the last has four times as
        many.
      stride: Of the 3x3 convolution.
      activation: Function applied to hidden units.
    """

    channels: int
    stride: int
    activation: Activation

    @nn.compact
    def __call__(self, x: jax.Array, train: bool, mask: jax.Array | None) -> jax.Array:
        """Maps `[B, H, W, channels]` to the same with `H / stride`, `W / stride`."""
        y = self.activation(batch_norm(conv(x, self.channels, 1), train, mask))
        y = batch_norm(conv(y, self.channels, 3, self.stride), train, mask)
        y = batch_norm(conv(self.activation(y), 4 * self.channels, 1), train, mask)
        return self.activation(y + _project(x, y, self.stride, train, mask))


def _project(
    x: jax.Array, like: jax.Array, stride: int, train: bool, mask: jax.Array | None
) -> jax.Array:
    """Option B: a 1x1 convolution and BatchNorm where the shape changes."""
    if x.shape == like.shape:
        return x
    return batch_norm(conv(x, like.shape[-1], 1, stride), train, mask)


def _pad(x: jax.Array, like: jax.Array, stride: int, *_: Any) -> jax.Array:
    """Option A: every so many pixels, and zeros for new channels."""
    x = x[:, ::stride, ::stride]
    return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, like.shape[-1] - x.shape[-1])))
