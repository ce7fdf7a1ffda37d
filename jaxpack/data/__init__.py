"""Datasets as arrays in host memory, and the order in which examples are seen."""

from __future__ import annotations

from jaxpack.data.dataset import Dataset
from jaxpack.data.deck import deck, window_epochs
from jaxpack.data.loading import load

__all__ = ["Dataset", "deck", "load", "window_epochs"]
