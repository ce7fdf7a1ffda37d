"""Models for classification, made so that packs of them are fast and exact."""

from jaxpack.models.densenet import DenseNet
from jaxpack.models.lenet import LeNet, max_pool2x2
from jaxpack.models.mlp import MLP
from jaxpack.models.mobilenet import MobileNetV2
from jaxpack.models.resnet import ResNet
from jaxpack.models.transformer import Transformer

__all__ = [
    "MLP",
    "DenseNet",
    "LeNet",
    "MobileNetV2",
    "ResNet",
    "Transformer",
    "max_pool2x2",
]
