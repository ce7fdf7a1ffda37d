"""What the models share: convolutions that pack, and BatchNorm for padded batches."""

from __future__ import annotations

from collections.abc import Callable

import jax
from flax import linen as nn

from jaxpack.conv import conv_general_dilated

Activation = Callable[[jax.Array], jax.Array]


def conv(
    x: jax.Array, channels: int, kernel: int, stride: int = 1, groups: int = 1
) -> jax.Array:
    """Convolves with a square kernel, without a bias, in the module that calls it.

    The weights start as in He, Zhang, Ren, Sun, "Delving Deep into Rectifiers", 2015,
    https://arxiv.org/abs/1502.01852: normal, which also compiles in half the time of
    a truncated normal.

    Args:
      x: `[B, H, W, channels]`.
      channels: Channels of the result.
      kernel: Height and width of the kernel.
      stride: Distance of one window from the next.
      groups: Groups of channels.

    Returns:
      `[B, ceil(H / stride), ceil(W / stride), channels]`.
    """
    return nn.Conv(
        channels,
        (kernel, kernel),
        (stride, stride),
        feature_group_count=groups,
        use_bias=False,
        kernel_init=nn.initializers.variance_scaling(2.0, "fan_in", "normal"),
        conv_general_dilated=conv_general_dilated,
    )(x)


def batch_norm(
    x: jax.Array,
    train: bool,
    mask: jax.Array | None,
    *,
    momentum: float = 0.9,
    use_bias: bool = True,
) -> jax.Array:
    """Normalises each channel over the examples that are no padding.

    Args:
      x: `[B, ..., channels]`.
      train: Whether the batch's statistics are used and kept, or those kept so far.
      mask: `[B]` bool, false on padding, or None without padding.
      momentum: Share of the old statistics that is kept at each step.
      use_bias: Whether a constant is added to each channel afterwards.

    Returns:
      As `x`.
    """
    if mask is not None:
        mask = mask.reshape(-1, *(1,) * (x.ndim - 1))
    norm = nn.BatchNorm(not train, momentum=momentum, use_bias=use_bias)
    return norm(x, mask=mask)


def check_stem(stem: str) -> None:
    """Raises a ValueError unless `stem` is "cifar" or "imagenet"."""
    if stem not in ("cifar", "imagenet"):
        raise ValueError(
            f"stem is {stem!r}; it must be 'cifar', for images of about 32x32, or "
            "'imagenet', for images of about 224x224"
        )
