"""The models that the benchmarks train: stock flax, as users write it.

Nothing in them knows of lanes or packs. `CASES` holds them with their optimizers,
shapes and batch sizes; the data are synthetic, since speed does not depend on them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import jaxpack as jp

STEPS_PER_EPOCH = 32
VOCABULARY = 64


class Problem(NamedTuple):
    """What is trained, without a word on how.

    Attributes:
      model: `model(hp) -> nn.Module`, called as `module(x, train=...)`.
      optimizer: `optimizer(hp) -> optax.GradientTransformation`.
      dataset: The data; the batch size divides the number of training examples.
      batch_size: `B`.
    """

    model: Callable[[Any], nn.Module]
    optimizer: Callable[[Any], optax.GradientTransformation]
    dataset: jp.data.Dataset
    batch_size: int = 32

    @property
    def steps_per_epoch(self) -> int:
        """Steps in an epoch."""
        return self.dataset.num_train // self.batch_size

    def task(self) -> jp.Task:
        """The same as a task of jaxpack."""
        return jp.Task(
            self.model, self.optimizer, self.dataset, batch_size=self.batch_size
        )


class MLP(nn.Module):
    """Dense layers with relu, and dropout before the last."""

    hidden: tuple[int, ...]
    dropout: Any = 0.0
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """Maps inputs `[B, ...]` to logits `[B, 10]`."""
        x = x.reshape(len(x), -1)
        for width in self.hidden:
            x = nn.relu(nn.Dense(width, dtype=self.dtype)(x))
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        return nn.Dense(10, dtype=self.dtype)(x)


class CNN(nn.Module):
    """Convolutions of 3 x 3, each with relu and pooling, and a dense layer."""

    channels: tuple[int, ...]
    dense: int
    dropout: Any = 0.0
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """Maps images `[B, H, W, channels]` to logits `[B, 10]`."""
        for channels in self.channels:
            x = nn.relu(nn.Conv(channels, (3, 3), dtype=self.dtype)(x))
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = x.reshape(len(x), -1)
        x = nn.relu(nn.Dense(self.dense, dtype=self.dtype)(x))
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        return nn.Dense(10, dtype=self.dtype)(x)


class Transformer(nn.Module):
    """An encoder with the norms first; the mean over the sequence is classified."""

    width: int = 64
    depth: int = 2
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """Maps tokens `[B, length]` to logits `[B, 10]`."""
        place = self.param(
            "place", nn.initializers.normal(0.02), (x.shape[1], self.width)
        )
        x = nn.Embed(VOCABULARY, self.width, dtype=self.dtype)(x)
        x = x + jnp.asarray(place, x.dtype)[None]
        for _ in range(self.depth):
            y = nn.LayerNorm(dtype=self.dtype)(x)
            attention = nn.MultiHeadDotProductAttention(4, dtype=self.dtype)
            y: Any = attention(y)
            x = x + y
            y = nn.LayerNorm(dtype=self.dtype)(x)
            y = nn.gelu(nn.Dense(4 * self.width, dtype=self.dtype)(y))
            x = x + nn.Dense(self.width, dtype=self.dtype)(y)
        return nn.Dense(10, dtype=self.dtype)(x.mean(1))


class ResNet8(nn.Module):
    """Three residual blocks with BatchNorm (He et al., arXiv 1512.03385)."""

    width: int = 16

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """Maps images `[B, H, W, channels]` to logits `[B, 10]`."""
        conv = functools.partial(nn.Conv, use_bias=False)
        norm = functools.partial(nn.BatchNorm, not train, momentum=0.9)
        x = nn.relu(norm()(conv(self.width, (3, 3))(x)))
        for block in range(3):
            channels, stride = self.width * 2**block, min(block + 1, 2)
            y = nn.relu(norm()(conv(channels, (3, 3), (stride, stride))(x)))
            y = norm()(conv(channels, (3, 3))(y))
            if stride > 1:
                x = conv(channels, (1, 1), (stride, stride))(x)
            x = nn.relu(x + y)
        return nn.Dense(10)(x.mean((1, 2)))


class MobileNet(nn.Module):
    """Depthwise and pointwise convolutions (Howard et al., arXiv 1704.04861)."""

    width: int = 16

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """Maps images `[B, H, W, channels]` to logits `[B, 10]`."""
        conv = functools.partial(nn.Conv, use_bias=False)
        norm = functools.partial(nn.BatchNorm, not train, momentum=0.9)
        x = nn.relu(norm()(conv(self.width, (3, 3))(x)))
        for channels, stride in ((2, 1), (4, 2), (4, 1), (8, 2), (8, 1)):
            groups = x.shape[-1]
            depthwise = conv(
                groups, (3, 3), (stride, stride), feature_group_count=groups
            )
            x = nn.relu(norm()(depthwise(x)))
            x = nn.relu(norm()(conv(channels * self.width, (1, 1))(x)))
        return nn.Dense(10)(x.mean((1, 2)))


class DenseNet(nn.Module):
    """Dense blocks of three layers (Huang et al., arXiv 1608.06993)."""

    growth: int = 12

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """Maps images `[B, H, W, channels]` to logits `[B, 10]`."""
        conv = functools.partial(nn.Conv, use_bias=False)
        norm = functools.partial(nn.BatchNorm, not train, momentum=0.9)
        x = conv(2 * self.growth, (3, 3))(x)
        for block in range(3):
            for _ in range(3):
                y = conv(self.growth, (3, 3))(nn.relu(norm()(x)))
                x = jnp.concatenate([x, y], axis=-1)
            if block < 2:
                x = conv(x.shape[-1] // 2, (1, 1))(nn.relu(norm()(x)))
                x = nn.avg_pool(x, (2, 2), (2, 2))
        return nn.Dense(10)(nn.relu(norm()(x)).mean((1, 2)))


def adamw(hp: Any) -> optax.GradientTransformation:
    """AdamW."""
    return optax.adamw(hp.learning_rate, weight_decay=hp.weight_decay)


def momentum(hp: Any) -> optax.GradientTransformation:
    """SGD with a fixed momentum."""
    return optax.chain(
        optax.add_decayed_weights(hp.weight_decay),
        optax.sgd(hp.learning_rate, momentum=0.9),
    )


class Case(NamedTuple):
    """A model of the step-time benchmark.

    Attributes:
      module: The model.
      shape: Of one example.
      optimizer: As in `Problem`.
      batch_size: `B`.
    """

    module: nn.Module
    shape: tuple[int, ...]
    optimizer: Callable[[Any], optax.GradientTransformation] = adamw
    batch_size: int = 32

    def problem(self) -> Problem:
        """The case with synthetic data of `STEPS_PER_EPOCH` batches."""
        rng = np.random.default_rng(0)
        count = STEPS_PER_EPOCH * self.batch_size

        def split(count: int) -> tuple[np.ndarray, np.ndarray]:
            if len(self.shape) == 1 and isinstance(self.module, Transformer):
                x = rng.integers(0, VOCABULARY, (count, *self.shape), np.int32)
            else:
                x = rng.normal(size=(count, *self.shape)).astype(np.float32)
            return x, (np.arange(count) % 10).astype(np.int32)

        dataset = jp.data.Dataset.from_arrays(split(count), split(self.batch_size))
        return Problem(lambda _: self.module, self.optimizer, dataset, self.batch_size)


DEFAULT = {
    "mlp_tiny": Case(MLP((32,)), (64,)),
    "mlp_small": Case(MLP((128, 64)), (64,)),
    "mlp": Case(MLP((256, 256)), (784,)),
    "cnn": Case(CNN((16, 32), 64), (28, 28, 1), momentum),
    "transformer": Case(Transformer(), (64,), batch_size=16),
}
LARGER = {
    "cnn32": Case(CNN((32, 64), 128), (28, 28, 1), momentum),
    "resnet8": Case(ResNet8(), (32, 32, 3), momentum, 16),
    "mobilenet": Case(MobileNet(), (32, 32, 3), momentum, 16),
    "densenet": Case(DenseNet(), (32, 32, 3), momentum, 16),
}
BFLOAT16 = {
    "mlp_bfloat16": Case(MLP((256, 256), dtype=jnp.bfloat16), (784,)),
    "cnn_bfloat16": Case(CNN((16, 32), 64, dtype=jnp.bfloat16), (28, 28, 1), momentum),
    "transformer_bfloat16": Case(Transformer(dtype=jnp.bfloat16), (64,), batch_size=16),
}
CASES = DEFAULT | LARGER | BFLOAT16
