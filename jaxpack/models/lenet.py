"""A small convolutional network after LeNet.

LeCun, Bottou, Bengio, Haffner, "Gradient-Based Learning Applied to Document
Recognition", 1998, https://doi.org/10.1109/5.726791; with today's 3x3 kernels,
maximum pooling and rectifiers.
"""

from __future__ import annotations

from typing import Any

import jax
from flax import linen as nn

from jaxpack.conv import conv_general_dilated
from jaxpack.models.layers import Activation, batch_norm


class LeNet(nn.Module):
    """Convolutions and pools, one hidden dense layer, and classes.

    Each stage is a 3x3 convolution, BatchNorm if wanted, the activation, and a 2x2
    maximum pool. A layer before BatchNorm has no bias: it would have no effect, and
    its gradient would be nothing but rounding noise, which Adam turns into steps.

    Attributes:
      channels: Channels of each stage.
      width: Units of the hidden dense layer.
      num_classes: Number of outputs.
      dropout: Fraction of dense units dropped while training; may be a lane's.
      activation: Function applied to hidden units; may be a `jaxpack.switch`.
      batch_norm: Whether stages and the dense layer have BatchNorm.
    """

    channels: tuple[int, ...] = (16, 32)
    width: int = 64
    num_classes: int = 10
    dropout: Any = 0.0
    activation: Activation = nn.relu
    batch_norm: bool = False

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
        """
        for channels in self.channels:
            x = nn.Conv(
                channels,
                (3, 3),
                use_bias=not self.batch_norm,
                conv_general_dilated=conv_general_dilated,
            )(x)
            x = max_pool2x2(self._activate(x, train, mask))
        x = x.reshape(x.shape[0], -1)
        x = nn.Dense(self.width, use_bias=not self.batch_norm)(x)
        x = self._activate(x, train, mask)
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        return nn.Dense(self.num_classes)(x)

    def _activate(self, x: jax.Array, train: bool, mask: jax.Array | None) -> jax.Array:
        if self.batch_norm:
            x = batch_norm(x, train, mask, momentum=0.99)
        return self.activation(x)


def max_pool2x2(x: jax.Array) -> jax.Array:
    """Takes the maximum of each 2x2 square, as `nn.max_pool` with strides of 2.

    Its gradient is several times faster than `nn.max_pool`'s on a CPU. Equal maxima
    share the gradient, which `nn.max_pool` gives to the first.

    Args:
      x: `[B, H, W, channels]`; an odd last row or column is left out.

    Returns:
      `[B, H // 2, W // 2, channels]`.

    Examples:
      >>> import jax.numpy as jnp
      >>> max_pool2x2(jnp.arange(16.0).reshape(1, 4, 4, 1))[0, :, :, 0].tolist()
      [[5.0, 7.0], [13.0, 15.0]]
    """
    batch, height, width, channels = x.shape
    height, width = height // 2, width // 2
    x = x[:, : 2 * height, : 2 * width]
    return x.reshape(batch, height, 2, width, 2, channels).max(axis=(2, 4))
