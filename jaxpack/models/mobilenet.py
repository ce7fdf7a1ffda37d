"""MobileNetV2.

Sandler, Howard, Zhu, Zhmoginov, Chen, "MobileNetV2: Inverted Residuals and Linear
Bottlenecks", 2018, https://arxiv.org/abs/1801.04381.
"""

from __future__ import annotations

from typing import Any

import jax
from flax import linen as nn

from jaxpack.models.layers import Activation, batch_norm, check_stem, conv

# The paper's table 2: expansion t, channels c, repetitions n, stride s.
STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


class MobileNetV2(nn.Module):
    """Inverted residuals with linear bottlenecks.

    Attributes:
      width: The paper's width multiplier: channels are multiplied by it and rounded
        to a multiple of 8. The last convolution is not made narrower.
      num_classes: Number of outputs.
      stem: "imagenet", the paper's strides, or "cifar", in which the first
        convolution and the second stage have a stride of 1, so that 32x32 images
        end as 4x4.
      activation: Function applied to hidden units; may be a `jaxpack.switch`.
      dropout: Fraction of pooled features dropped while training, 0.2 in common use;
        may be a lane's.
      stages: Expansion, channels, repetitions and stride of each stage.
      features: Channels of the last convolution.
    """

    width: float = 1.0
    num_classes: int = 10
    stem: str = "cifar"
    activation: Activation = nn.relu6
    dropout: Any = 0.0
    stages: tuple[tuple[int, int, int, int], ...] = STAGES
    features: int = 1280

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
          ValueError: If the stem is unknown.
        """
        check_stem(self.stem)
        small = self.stem == "cifar"
        x = conv(x, rounded_channels(32 * self.width), 3, 1 if small else 2)
        x = self.activation(batch_norm(x, train, mask))
        for stage, (expansion, channels, repeats, stride) in enumerate(self.stages):
            channels = rounded_channels(channels * self.width)
            for i in range(repeats):
                once = 1 if i > 0 or (small and stage == 1) else stride
                block = InvertedResidual(channels, once, expansion, self.activation)
                x = block(x, train, mask)
        x = conv(x, rounded_channels(self.features * max(1.0, self.width)), 1)
        x = self.activation(batch_norm(x, train, mask)).mean((1, 2))
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        return nn.Dense(self.num_classes)(x)


class InvertedResidual(nn.Module):
    """A wide depthwise convolution between narrow ends (the paper's table 1).

    The last BatchNorm has no bias: only 1x1 convolutions with BatchNorm follow, which
    take out any constant, so that it would have no effect and its gradient would be
    nothing but rounding noise.

    Attributes:
      channels: Channels of the result.
      stride: Of the depthwise convolution.
      expansion: How many times wider than the input it is.
      activation: Function applied to hidden units.
    """

    channels: int
    stride: int
    expansion: int
    activation: Activation

    @nn.compact
    def __call__(self, x: jax.Array, train: bool, mask: jax.Array | None) -> jax.Array:
        """Maps `[B, H, W, channels]` to the same with `H / stride`, `W / stride`."""
        y, wide = x, x.shape[-1] * self.expansion
        if self.expansion > 1:
            y = self.activation(batch_norm(conv(y, wide, 1), train, mask))
        y = batch_norm(conv(y, wide, 3, self.stride, groups=wide), train, mask)
        y = conv(self.activation(y), self.channels, 1)
        y = batch_norm(y, train, mask, use_bias=False)
        return x + y if x.shape == y.shape else y


def rounded_channels(channels: float) -> int:
    """Returns the multiple of 8 nearest to `channels` and not 10 % below it.

    Examples:
      >>> [rounded_channels(c) for c in (3, 17, 24.0, 44.8)]
      [8, 16, 24, 48]
    """
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * channels else rounded
