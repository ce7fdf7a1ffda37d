"""DenseNet.

Huang, Liu, van der Maaten, Weinberger, "Densely Connected Convolutional Networks",
2016, https://arxiv.org/abs/1608.06993.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxpack.models.layers import Activation, batch_norm, check_stem, conv

# The paper's table 1: layers of each dense block.
_IMAGENET = {
    121: (6, 12, 24, 16),
    169: (6, 12, 32, 32),
    201: (6, 12, 48, 32),
    264: (6, 12, 64, 48),
}


class DenseNet(nn.Module):
    """Blocks in which each layer sees the channels of all layers before it.

    121, 169, 201 and 264 have four blocks (table 1) and are always of the kind BC.
    Any other depth has three equal blocks (section 3): 3n+4 layers, or 6n+4 of the
    kind BC.

    Attributes:
      depth: Number of layers with weights.
      growth: Channels that a layer adds; the paper's 12, or 32 for four blocks, if
        None.
      bottleneck: Whether it is a DenseNet-BC, that is, has 1x1 convolutions to
        `4 * growth` channels before those of 3x3 and halves the channels between
        blocks.
      num_classes: Number of outputs.
      stem: "cifar", one 3x3 convolution, or "imagenet", a 7x7 one and a 3x3 maximum
        pool, both with strides of 2.
      activation: Function applied to hidden units; may be a `jaxpack.switch`.
      dropout: Fraction dropped after each convolution but the first while training,
        0.2 in the paper where images are not augmented; may be a lane's.
    """

    depth: int = 40
    growth: int | None = None
    bottleneck: bool = False
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
          ValueError: If there is no such depth, or the stem is unknown.
        """
        check_stem(self.stem)
        blocks, growth, bottleneck = self._plan()

        def add(x: jax.Array, channels: int, kernel: int) -> jax.Array:
            x = self.activation(batch_norm(x, train, mask))
            x = conv(x, channels, kernel)
            return nn.Dropout(self.dropout, deterministic=not train)(x)

        large = self.stem == "imagenet"
        x = conv(x, 2 * growth if bottleneck else 16, 7 if large else 3, 1 + large)
        if large:
            x = self.activation(batch_norm(x, train, mask))
            x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
        for block, layers in enumerate(blocks):
            if block > 0:
                channels = x.shape[-1] // 2 if bottleneck else x.shape[-1]
                x = nn.avg_pool(add(x, channels, 1), (2, 2), (2, 2))
            for _ in range(layers):
                y = add(x, 4 * growth, 1) if bottleneck else x
                x = jnp.concatenate([x, add(y, growth, 3)], axis=-1)
        x = self.activation(batch_norm(x, train, mask))
        return nn.Dense(self.num_classes)(x.mean((1, 2)))

    def _plan(self) -> tuple[tuple[int, ...], int, bool]:
        """The layers of each block, the growth, and whether it is of the kind BC."""
        if self.depth in _IMAGENET:
            return _IMAGENET[self.depth], self.growth or 32, True
        per_block = 6 if self.bottleneck else 3
        layers, rest = divmod(self.depth - 4, per_block)
        if layers < 1 or rest:
            raise ValueError(
                f"depth is {self.depth}; it must be {per_block}n+4"
                f"{' with bottlenecks' if self.bottleneck else ''} or one of "
                f"{', '.join(map(str, _IMAGENET))}"
            )
        return (layers,) * 3, self.growth or 12, self.bottleneck
