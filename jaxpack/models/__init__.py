"""Models for classification, made so that packs of them are fast and exact."""

from jaxpack.models.lenet import LeNet, max_pool2x2
from jaxpack.models.mlp import MLP

__all__ = ["MLP", "LeNet", "max_pool2x2"]
