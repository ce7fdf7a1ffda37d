"""Image classification sets of TensorFlow Datasets (TFDS), without TensorFlow.

A set is prepared once as TFDS does it, in TFDS's own directory and as array_record
files. It is read through TFDS once, into arrays of uint8 in the user's cache directory,
which are mapped into memory from then on; that needs neither TFDS nor a network.
"""

from __future__ import annotations

import functools
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxpack.data import array_cache
from jaxpack.data.dataset import Dataset
from jaxpack.data.download import download_and_prepare
from jaxpack.data.embedded import Splits, stratified
from jaxpack.data.formats import decode_image
from jaxpack.data.guard import without_tensorflow_gpus
from jaxpack.data.prepared import (
    Prepared,
    content_hash,
    default_data_dir,
    find_prepared,
)
from jaxpack.data.shown import shown

VALIDATION = 0.1
"""The part of the train split that validates, where TFDS has no validation split."""

SPLITS = ("train", "validation", "test")
"""The splits of TFDS that are read, where they are there."""


def load_tfds(
    name: str,
    seed: int,
    *,
    validation: float | int | None = None,
    data_dir: str | os.PathLike[str] | None = None,
    image_size: int | tuple[int, int] | None = None,
) -> Dataset:
    """Loads a set of TFDS; `jaxpack.data.load` says how.

    Args:
      name: What `load` is given, without `tfds:`.
      seed: As of `load`.
      validation: As of `load`.
      data_dir: As of `load`.
      image_size: As of `load`.
    """
    _check_validation(validation)
    size = _check_image_size(image_size)
    root = pathlib.Path(data_dir).expanduser() if data_dir else default_data_dir()
    found = find_prepared(name, root)
    with without_tensorflow_gpus():
        if found is None:
            download_and_prepare(name, root)
            found = find_prepared(name, root)
            assert found is not None, f"tfds:{name} is prepared, but not in {root}"
        parts = [found.name.replace("/", "-"), found.version, content_hash(found)[:16]]
        parts += [f"{size[0]}x{size[1]}"] if size else []
        directory = array_cache.cache_directory() / "-".join(parts)
        if array_cache.read(directory) is None:
            _write_arrays(directory, found, size)
    return _dataset(f"tfds:{name}", directory, seed, validation)


# Sets of different content, version or size have different directories.
@functools.lru_cache(maxsize=1)
def _dataset(
    name: str, directory: pathlib.Path, seed: int, validation: float | int | None
) -> Dataset:
    cached = array_cache.read(directory)
    assert cached is not None, f"{directory} is not there any more"
    arrays, facts = cached
    splits = {
        split: (arrays[f"{split}_x"], arrays[f"{split}_y"])
        for split in SPLITS
        if f"{split}_x" in arrays
    }
    if "test" in splits and (splits["test"][1] == -1).all():
        del splits["test"]
    if "validation" not in splits:
        splits |= _split(*splits["train"], validation, seed)
    elif validation is not None:
        raise ValueError(
            f"{name} has a validation split of its own, of "
            f"{len(splits['validation'][1])} examples; leave out validation="
            f"{validation!r}"
        )
    pixels = {
        k: (np.divide(x, 255, dtype=np.float32), y) for k, (x, y) in splits.items()
    }
    return Dataset.from_arrays(
        pixels["train"],
        pixels["validation"],
        pixels.get("test"),
        standardize=True,
        name=name,
        num_classes=facts["num_classes"],
    )


def _split(
    x: np.ndarray, y: np.ndarray, validation: float | int | None, seed: int
) -> Splits:
    """Splits a train split into train and validation, by class."""
    share = VALIDATION if validation is None else validation
    held_out = share if isinstance(share, int) else max(1, round(share * len(y)))
    if held_out >= len(y):
        raise ValueError(
            f"validation={validation!r} leaves nothing to train on: there are "
            f"{len(y)} examples to split"
        )
    order = stratified(y, seed)
    # Sorted, files are read from their beginning to their end.
    parts = {"validation": order[:held_out], "train": order[held_out:]}
    return {split: (x[np.sort(p)], y[np.sort(p)]) for split, p in parts.items()}


def _write_arrays(
    directory: pathlib.Path, found: Prepared, size: tuple[int, int] | None
) -> None:
    """Reads a prepared set, and writes its images and labels as arrays."""
    import tensorflow_datasets as tfds  # It takes a second, and seldom is it needed.

    builder = tfds.builder_from_directory(found.path)
    name = f"tfds:{found.name}"
    image, label = _image_and_label(name, builder.info)
    shape = _image_shape(name, builder.info.features[image], size)
    counts = {
        split: builder.info.splits[split].num_examples
        for split in SPLITS
        if split in builder.info.splits
    }
    if "train" not in counts:
        raise ValueError(
            f"{name} has no train split, only {', '.join(builder.info.splits)}"
        )
    shapes: dict[str, tuple[tuple[int, ...], Any]] = {}
    for split, count in counts.items():
        shapes[f"{split}_x"] = (count, *shape), np.uint8
        shapes[f"{split}_y"] = (count,), np.int32

    def examples() -> Iterator[tuple[str, int, dict[str, Any]]]:
        skipped: Any = {image: tfds.decode.SkipDecoding()}
        for split in counts:
            source: Any = builder.as_data_source(split=split, decoders=skipped)
            for index, example in enumerate(source):
                yield split, index, example

    def fill(arrays: dict[str, np.ndarray]) -> None:
        total = sum(counts.values())
        for split, index, example in shown(examples(), total, f"reading {name}"):
            arrays[f"{split}_x"][index] = decode_image(example[image], shape, size)
            arrays[f"{split}_y"][index] = example[label]

    num_classes = builder.info.features[label].num_classes
    array_cache.write(directory, shapes, {"num_classes": num_classes}, fill)


def _image_and_label(name: str, info: Any) -> tuple[str, str]:
    """Finds the features that hold image and class."""
    import tensorflow_datasets as tfds

    features = dict(info.features.items()) if hasattr(info.features, "items") else {}
    found = []
    for position, kind in enumerate((tfds.features.Image, tfds.features.ClassLabel)):
        keys = [key for key, feature in features.items() if type(feature) is kind]
        if info.supervised_keys and info.supervised_keys[position] in keys:
            keys = [info.supervised_keys[position]]
        if len(keys) != 1:
            raise ValueError(
                f"{name} is no set of image classification: it should have one image "
                f"and one label, or say which is which, but its features are "
                f"{info.features}"
            )
        found += keys
    return found[0], found[1]


def _image_shape(
    name: str, feature: Any, size: tuple[int, int] | None
) -> tuple[int, int, int]:
    height, width, channels = feature.shape
    if feature.np_dtype != np.uint8:
        raise ValueError(f"{name} has images of {feature.np_dtype}; only uint8 is read")
    if size is not None:
        height, width = size
    if height is None or width is None:
        raise ValueError(
            f"the images of {name} differ in size; give image_size=(height, width)"
        )
    return height, width, channels or 3


def _check_validation(validation: Any) -> None:
    if validation is None:
        return
    whole = isinstance(validation, int) and not isinstance(validation, bool)
    if (whole and validation >= 1) or (
        isinstance(validation, float) and 0 < validation < 1
    ):
        return
    raise ValueError(
        "validation must be a fraction of the train split between 0 and 1, or a number "
        f"of its examples, got {validation!r}"
    )


def _check_image_size(image_size: Any) -> tuple[int, int] | None:
    if image_size is None:
        return None
    size = (image_size, image_size) if isinstance(image_size, int) else image_size
    if (
        not isinstance(size, tuple | list)
        or len(size) != 2
        or not all(type(side) is int and side >= 1 for side in size)
    ):
        raise ValueError(
            f"image_size must be (height, width) or one number, in pixels, got "
            f"{image_size!r}"
        )
    return size[0], size[1]
