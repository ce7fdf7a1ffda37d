"""TFDS builders of MNIST, Fashion-MNIST, CIFAR-10 and CIFAR-100 without TensorFlow.

TFDS's own need TensorFlow to unpack and to encode. These download the same files, check
them against the same checksums, and write sets of the same names, versions and
features, so what one has prepared the other reads. Importing this imports TFDS.
"""

from __future__ import annotations

import io
import pathlib
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import tensorflow_datasets as tfds
from tensorflow_datasets.core.download.checksums import UrlInfo
from tensorflow_datasets.core.units import Size

from jaxpack.data.formats import encode_png, read_cifar, read_idx, read_tar
from jaxpack.data.shown import download_shown, shown

Examples = Iterator[tuple[int, dict[str, Any]]]


class Source(NamedTuple):
    """A file to download.

    Attributes:
      url: Where it is.
      size: In bytes.
      sha256: Its checksum, in hex.
    """

    url: str
    size: int
    sha256: str

    @property
    def filename(self) -> str:
        """The last part of the address."""
        return self.url.rpartition("/")[2]


class _Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """What the four have in common: the checksums of `SOURCES` are enforced."""

    SOURCES: tuple[Source, ...] = ()

    @property
    def url_infos(self) -> dict[str, UrlInfo]:
        return {
            source.url: UrlInfo(Size(source.size), source.sha256, source.filename)
            for source in self.SOURCES
        }

    def _download(self, manager: Any) -> dict[str, pathlib.Path]:
        """Returns the paths of the downloaded files by their names."""
        directory = pathlib.Path(manager.download_dir) / self.name
        total = sum(source.size for source in self.SOURCES)
        with download_shown(directory, total, f"downloading tfds:{self.name}"):
            paths = manager.download({s.filename: s.url for s in self.SOURCES})
        return {name: pathlib.Path(path) for name, path in paths.items()}


class Mnist(_Builder, skip_registration=True):
    """MNIST (LeCun, Cortes and Burges), from a mirror of its first place."""

    name = "mnist"
    VERSION = tfds.core.Version("3.0.1")
    LABELS: tuple[str, ...] = tuple("0123456789")
    _PLACE = "https://storage.googleapis.com/cvdf-datasets/mnist/"
    SOURCES = (
        Source(
            _PLACE + "train-images-idx3-ubyte.gz",
            9912422,
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        ),
        Source(
            _PLACE + "train-labels-idx1-ubyte.gz",
            28881,
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        ),
        Source(
            _PLACE + "t10k-images-idx3-ubyte.gz",
            1648877,
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        ),
        Source(
            _PLACE + "t10k-labels-idx1-ubyte.gz",
            4542,
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        ),
    )

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Image(shape=(28, 28, 1)),
                    "label": tfds.features.ClassLabel(names=list(self.LABELS)),
                }
            ),
            supervised_keys=("image", "label"),
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Examples]:
        paths = self._download(dl_manager)
        return {
            split: self._generate_examples(
                paths[f"{prefix}-images-idx3-ubyte.gz"],
                paths[f"{prefix}-labels-idx1-ubyte.gz"],
            )
            for split, prefix in (("train", "train"), ("test", "t10k"))
        }

    def _generate_examples(self, images: pathlib.Path, labels: pathlib.Path):
        x, y = read_idx(images), read_idx(labels)
        pairs = shown(zip(x, y, strict=True), len(y), f"preparing tfds:{self.name}")
        for index, (image, label) in enumerate(pairs):
            yield index, {"image": io.BytesIO(encode_png(image)), "label": int(label)}


class FashionMnist(Mnist, skip_registration=True):
    """Fashion-MNIST (Xiao, Rasul and Vollgraf, arXiv 1708.07747)."""

    name = "fashion_mnist"
    LABELS = (
        *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
        *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    )
    _PLACE = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
    SOURCES = (
        Source(
            _PLACE + "train-images-idx3-ubyte.gz",
            26421880,
            "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        ),
        Source(
            _PLACE + "train-labels-idx1-ubyte.gz",
            29515,
            "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        ),
        Source(
            _PLACE + "t10k-images-idx3-ubyte.gz",
            4422102,
            "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        ),
        Source(
            _PLACE + "t10k-labels-idx1-ubyte.gz",
            5148,
            "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        ),
    )


class Cifar10(_Builder, skip_registration=True):
    """CIFAR-10 (Krizhevsky, Learning multiple layers of features, 2009)."""

    name = "cifar10"
    VERSION = tfds.core.Version("3.0.2")
    SOURCES = (
        Source(
            "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
            170052171,
            "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
        ),
    )
    FILES: ClassVar = {
        "train": tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
        "test": ("test_batch.bin",),
    }
    # What a record's first bytes are, and the file that names the classes.
    LABELS: ClassVar = {"label": "batches.meta.txt"}
    CLASSES: ClassVar = {"label": 10}

    def _info(self) -> tfds.core.DatasetInfo:
        labels = {
            key: tfds.features.ClassLabel(num_classes=count)
            for key, count in self.CLASSES.items()
        }
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.FeaturesDict(
                {
                    "id": tfds.features.Text(),
                    "image": tfds.features.Image(shape=(32, 32, 3)),
                    **labels,
                }
            ),
            supervised_keys=("image", "label"),
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Examples]:
        (path,) = self._download(dl_manager).values()
        members = read_tar(path)
        for key, file in self.LABELS.items():
            names = members[file].decode().split("\n")
            self.info.features[key].names = [name for name in names if name]
        return {
            split: self._generate_examples(split, [members[file] for file in files])
            for split, files in self.FILES.items()
        }

    def _generate_examples(self, split: str, records: list[bytes]):
        index = 0
        for data in records:
            labels, images = read_cifar(data, len(self.LABELS))
            pairs = zip(labels, images, strict=True)
            text = f"preparing tfds:{self.name}"
            for label, image in shown(pairs, len(labels), text):
                example = dict(zip(self.LABELS, label.tolist(), strict=True))
                name = f"{split}_{index:05d}"
                yield (
                    index,
                    {"id": name, "image": io.BytesIO(encode_png(image)), **example},
                )
                index += 1


class Cifar100(Cifar10, skip_registration=True):
    """CIFAR-100, whose 100 classes make 20 coarse ones; same source as CIFAR-10."""

    name = "cifar100"
    SOURCES = (
        Source(
            "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
            168513733,
            "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
        ),
    )
    FILES: ClassVar = {"train": ("train.bin",), "test": ("test.bin",)}
    LABELS: ClassVar = {
        "coarse_label": "coarse_label_names.txt",
        "label": "fine_label_names.txt",
    }
    CLASSES: ClassVar = {"label": 100, "coarse_label": 20}


BUILDERS: dict[str, type[_Builder]] = {
    builder.name: builder for builder in (Mnist, FashionMnist, Cifar10, Cifar100)
}
"""The builders by the names of their sets."""
