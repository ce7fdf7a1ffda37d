"""File formats in which sets of images are published, by NumPy and Pillow."""

from __future__ import annotations

import gzip
import io
import math
import pathlib
import tarfile

import numpy as np


def read_idx(path: pathlib.Path) -> np.ndarray:
    """Reads an array from a gzip'ed file in MNIST's IDX format.

    Args:
      path: Of a file of unsigned bytes: two zero bytes, 8, the number of axes, their
        lengths as big-endian int32, then the values.

    Returns:
      The array, uint8.

    Raises:
      ValueError: If that is not what the file holds.
    """
    data = gzip.decompress(path.read_bytes())
    if len(data) < 4 or data[:3] != b"\0\0\x08":
        raise ValueError(f"{path} is no IDX file of bytes: it starts {data[:4]!r}")
    start = 4 + 4 * data[3]
    shape = tuple(np.frombuffer(data[4:start], ">i4").tolist())
    if len(data) - start != math.prod(shape):
        raise ValueError(
            f"{path} should hold {math.prod(shape)} values, for the shape {shape}, but "
            f"has {len(data) - start}"
        )
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def read_tar(path: pathlib.Path) -> dict[str, bytes]:
    """Reads the files of a gzip'ed archive, by their names without directories."""
    with tarfile.open(path, "r:gz") as archive:
        return {
            member.name.rpartition("/")[2]: file.read()
            for member in archive
            if (file := archive.extractfile(member)) is not None
        }


def read_cifar(data: bytes, num_labels: int) -> tuple[np.ndarray, np.ndarray]:
    """Reads a file of CIFAR's binary format.

    Args:
      data: Records of a byte for each label, then 32 x 32 bytes each of red, green and
        blue.
      num_labels: Labels a record.

    Returns:
      Labels `[n, num_labels]` and images `[n, 32, 32, 3]`, both uint8.

    Raises:
      ValueError: If the data are no whole number of records.

    Examples:
      >>> labels, images = read_cifar(bytes([7] + [255] * 1024 + [0] * 2048), 1)
      >>> labels.tolist(), images[0, 0, 0].tolist()
      ([[7]], [255, 0, 0])
    """
    size = num_labels + 32 * 32 * 3
    if len(data) % size:
        raise ValueError(
            f"{len(data)} bytes are no whole number of {size}-byte records"
        )
    records = np.frombuffer(data, np.uint8).reshape(-1, size)
    images = records[:, num_labels:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return records[:, :num_labels], images


def encode_png(image: np.ndarray) -> bytes:
    """Encodes an image, uint8 `[height, width]` or `[height, width, 3]`, as PNG."""
    file = io.BytesIO()
    # Small images hardly gain from more compression, which takes most of the time.
    from PIL import Image  # Only here, so that the rest does without it.

    Image.fromarray(image).save(file, "png", compress_level=1)
    return file.getvalue()


def decode_image(
    data: bytes, shape: tuple[int, int, int], size: tuple[int, int] | None
) -> np.ndarray:
    """Decodes an image.

    Args:
      data: A PNG, JPEG or other file that Pillow reads.
      shape: `(height, width, channels)` to get, 1 to 4 channels.
      size: `(height, width)` to resize it to, bilinearly; None not to.

    Returns:
      The image `[height, width, channels]`, uint8.

    Raises:
      ValueError: If it has another shape and is not resized.
    """
    from PIL import Image

    with Image.open(io.BytesIO(data)) as file:
        image = file.convert({1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}[shape[2]])
    if size is not None:
        image = image.resize(size[::-1], Image.Resampling.BILINEAR)
    if image.size != (shape[1], shape[0]):
        raise ValueError(
            f"an image has {image.height} x {image.width} pixels, where "
            f"{shape[0]} x {shape[1]} were expected; give image_size=(height, width)"
        )
    return np.asarray(image, np.uint8).reshape(shape)
