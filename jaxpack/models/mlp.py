"""The multi-layer perceptron."""

from __future__ import annotations

from typing import Any

import jax
from flax import linen as nn

from jaxpack.models.layers import Activation, batch_norm


class MLP(nn.Module):
    """Fully connected layers of one width between input and classes.

    Each hidden layer is a dense layer, BatchNorm if wanted, the activation, and
    dropout. A dense layer before BatchNorm has no bias: it would have no effect, and
    its gradient would be nothing but rounding noise, which Adam turns into steps.

    Attributes:
      width: Units of a hidden layer.
      depth: Number of hidden layers.
      num_classes: Number of outputs.
      dropout: Fraction of hidden units dropped while training; may be a lane's.
      activation: Function applied to hidden units; may be a `jaxpack.switch`.
      batch_norm: Whether hidden layers have BatchNorm.
    """

    width: int = 128
    depth: int = 2
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
          x: `[B, ...]` float; all further axes are flattened.
          train: Whether dropout drops, and BatchNorm uses and keeps the statistics
            of the batch.
          mask: `[B]` bool, false on padding, which BatchNorm leaves out; or None.

        Returns:
          `[B, C]` logits.
        """
        x = x.reshape(x.shape[0], -1)
        for _ in range(self.depth):
            x = nn.Dense(self.width, use_bias=not self.batch_norm)(x)
            if self.batch_norm:
                x = batch_norm(x, train, mask, momentum=0.99)
            x = self.activation(x)
            x = nn.Dropout(self.dropout, deterministic=not train)(x)
        return nn.Dense(self.num_classes)(x)
