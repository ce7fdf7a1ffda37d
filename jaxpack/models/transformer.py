"""A small transformer encoder, or a causal one for language models.

Vaswani et al., "Attention Is All You Need", 2017, https://arxiv.org/abs/1706.03762,
with the norm before each layer (Xiong et al., "On Layer Normalization in the
Transformer Architecture", 2020, https://arxiv.org/abs/2002.04745), learned positions,
and patches of images as in Dosovitskiy et al., "An Image is Worth 16x16 Words", 2020,
https://arxiv.org/abs/2010.11929.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxpack.models.layers import Activation


class Transformer(nn.Module):
    """Self-attention over tokens, feature vectors or patches of an image.

    A language model is `Transformer(vocabulary=V, num_classes=V, causal=True,
    per_token=True)`.

    Attention has no biases: that of the keys would have no effect, and its gradient
    would be nothing but rounding noise, which Adam turns into steps.

    Attributes:
      width: Features of a token, a multiple of `heads`.
      depth: Number of layers, each of attention and two dense ones.
      heads: Number of attention heads.
      num_classes: Number of outputs.
      vocabulary: Number of token ids; needed where the input is ids.
      patch: Height and width of the patches that images are cut into.
      causal: Whether a token sees only itself and those before it.
      per_token: Whether there are outputs for each token, rather than for their mean.
      activation: Function applied to hidden units; may be a `jaxpack.switch`.
      dropout: Fraction dropped of the embeddings and of what each layer adds while
        training; may be a lane's.
    """

    width: int = 64
    depth: int = 2
    heads: int = 4
    num_classes: int = 10
    vocabulary: int | None = None
    patch: int = 4
    causal: bool = False
    per_token: bool = False
    activation: Activation = nn.gelu
    dropout: Any = 0.0

    @nn.compact
    def __call__(
        self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None
    ) -> jax.Array:
        """Returns the scores of the classes.

        Args:
          x: `[B, T]` integer token ids, `[B, T, features]` float vectors, or
            `[B, H, W, channels]` float images.
          train: Whether dropout drops.
          mask: Taken as all models do and not needed: examples do not meet here.

        Returns:
          `[B, C]` logits, or `[B, T, C]` if `per_token`.

        Raises:
          ValueError: If the input is none of these, or sizes do not divide.
        """
        if self.width % self.heads:
            raise ValueError(
                f"width is {self.width}; it must be a multiple of heads, {self.heads}"
            )
        x = self._embed(x)
        length = x.shape[1]
        positions = nn.initializers.normal(0.02)
        x = x + self.param("positions", positions, (length, self.width))[None]
        x = self._drop(x, train)
        visible = nn.make_causal_mask(jnp.ones((1, length))) if self.causal else None
        for _ in range(self.depth):
            attention = nn.MultiHeadDotProductAttention(self.heads, use_bias=False)
            y: Any = attention(nn.LayerNorm()(x), mask=visible)
            x = x + self._drop(y, train)
            y = self.activation(nn.Dense(4 * self.width)(nn.LayerNorm()(x)))
            x = x + self._drop(nn.Dense(self.width)(y), train)
        x = nn.LayerNorm()(x)
        return nn.Dense(self.num_classes)(x if self.per_token else x.mean(1))

    def _drop(self, x: jax.Array, train: bool) -> jax.Array:
        return nn.Dropout(self.dropout, deterministic=not train)(x)

    def _embed(self, x: jax.Array) -> jax.Array:
        """Maps an input to `[B, T, width]`."""
        if x.ndim == 2 and jnp.issubdtype(x.dtype, jnp.integer):
            if self.vocabulary is None:
                raise ValueError(
                    "vocabulary is None; token ids need it: their highest value plus 1"
                )
            return nn.Embed(self.vocabulary, self.width)(x)
        if x.ndim not in (3, 4) or not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(
                f"the input is {x.dtype}{list(x.shape)}; it must be [B, T] integers, "
                "or [B, T, features] or [B, H, W, channels] floats"
            )
        if x.ndim == 4:
            x = patches(x, self.patch)
        return nn.Dense(self.width)(x)


def patches(images: jax.Array, size: int) -> jax.Array:
    """Cuts images into squares.

    Args:
      images: `[B, H, W, channels]`.
      size: Height and width of a square, which divides those of the images.

    Returns:
      `[B, H / size * W / size, size * size * channels]`, row by row.

    Raises:
      ValueError: If it does not divide them.

    Examples:
      >>> patches(jnp.arange(16.0).reshape(1, 4, 4, 1), 2)[0, 1].tolist()
      [2.0, 3.0, 6.0, 7.0]
    """
    batch, height, width, channels = images.shape
    if height % size or width % size:
        raise ValueError(
            f"patch is {size}; it must divide the images' height and width, "
            f"{height} and {width}"
        )
    x = images.reshape(batch, height // size, size, width // size, size, channels)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(batch, -1, size * size * channels)
