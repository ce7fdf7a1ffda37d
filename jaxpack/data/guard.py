"""Keeps TensorFlow, where it is installed, from taking the memory of the GPUs."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Generator
from typing import Any


@contextlib.contextmanager
def without_tensorflow_gpus() -> Generator[None]:
    """Hides the GPUs from TensorFlow, if it is imported before this ends.

    TFDS imports TensorFlow when it needs it, and TensorFlow takes nearly all memory of
    every GPU when it is first used. It is not imported here, which takes seconds. One
    that has used its GPUs before keeps them.
    """
    if "tensorflow" in sys.modules:
        _hide_gpus(sys.modules["tensorflow"])
        yield
        return
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds TensorFlow as Python would, with a loader that hides the GPUs."""

    def __init__(self):
        self._searching = False

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != "tensorflow" or self._searching:
            return None
        self._searching = True  # The search below comes here again.
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any):
        self._loader = loader

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        # From here on the module looks as if it had been found without us.
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _hide_gpus(module)


def _hide_gpus(tensorflow: Any) -> None:
    with contextlib.suppress(RuntimeError):  # They are in use already.
        tensorflow.config.set_visible_devices([], "GPU")
