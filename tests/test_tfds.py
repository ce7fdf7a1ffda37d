"""Sets of TFDS, from files of their true formats that a server on loopback serves."""

from __future__ import annotations

import functools
import gzip
import hashlib
import http.server
import importlib
import io
import pathlib
import shutil
import sys
import tarfile
import threading
from typing import NamedTuple

import flax.linen as nn
import numpy as np
import optax
import pytest
import tensorflow_datasets as tfds
from PIL import Image
from rich.console import Console

import jaxpack as jp
from jaxpack.data import array_cache, builders, formats, guard, loading, shown
from jaxpack.data import tfds as jaxpack_tfds

TRAIN, TEST = 300, 60


class Pixels(NamedTuple):
    """Images `[n, ...]` and labels `[n]`, uint8, of each split of a made-up set."""

    train: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]


def pixels(shape: tuple[int, ...], num_classes: int) -> Pixels:
    """Makes noisy images that are brighter the higher their class."""
    rng = np.random.default_rng(0)

    def split(count: int) -> tuple[np.ndarray, np.ndarray]:
        y = rng.permutation(np.arange(count) % num_classes).astype(np.uint8)
        x = rng.integers(0, 100, (count, *shape), np.uint8)
        x += (150 * y // num_classes).astype(np.uint8).reshape(-1, *[1] * len(shape))
        return x, y

    return Pixels(split(TRAIN), split(TEST))


def idx(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
    return gzip.compress(header + array.tobytes(), 1, mtime=0)


def cifar_records(x: np.ndarray, *labels: np.ndarray) -> bytes:
    columns = [*(y[:, None] for y in labels), x.transpose(0, 3, 1, 2).reshape(-1, 3072)]
    return np.concatenate(columns, axis=1).tobytes()


def tar(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return out.getvalue()


def mnist_files(made: Pixels) -> dict[str, bytes]:
    return {
        f"{prefix}-{kind}-idx{array.ndim}-ubyte.gz": idx(array)
        for prefix, split in (("train", made.train), ("t10k", made.test))
        for kind, array in zip(("images", "labels"), split, strict=True)
    }


def cifar10_files(made: Pixels) -> dict[str, bytes]:
    place = "cifar-10-batches-bin"
    batches = [
        cifar_records(x, y)
        for x, y in zip(*(np.split(a, 5) for a in made.train), strict=True)
    ]
    files = {f"{place}/data_batch_{i}.bin": b for i, b in enumerate(batches, 1)}
    files[f"{place}/test_batch.bin"] = cifar_records(*made.test)
    files[f"{place}/batches.meta.txt"] = names("class", 10)
    return {"cifar-10-binary.tar.gz": tar(files)}


def cifar100_files(made: Pixels) -> dict[str, bytes]:
    place = "cifar-100-binary"
    files = {
        f"{place}/{split}.bin": cifar_records(x, y // 5, y)
        for split, (x, y) in made._asdict().items()
    }
    files[f"{place}/fine_label_names.txt"] = names("fine", 100)
    files[f"{place}/coarse_label_names.txt"] = names("coarse", 20)
    return {"cifar-100-binary.tar.gz": tar(files)}


def names(prefix: str, count: int) -> bytes:
    return "".join(f"{prefix}{i}\n" for i in range(count)).encode() + b"\n"


SETS = {
    "mnist": (pixels((28, 28), 10), mnist_files),
    "fashion_mnist": (pixels((28, 28), 10), mnist_files),
    "cifar10": (pixels((32, 32, 3), 10), cifar10_files),
    "cifar100": (pixels((32, 32, 3), 100), cifar100_files),
}


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves files quietly; with `cut`, only half of what it says it sends."""

    cut = False

    def log_message(self, *_):
        pass

    def copyfile(self, source, outputfile):
        data = source.read()
        outputfile.write(data[: len(data) // 2] if self.cut else data)


@pytest.fixture
def home(tmp_path, monkeypatch) -> pathlib.Path:
    """An empty place for all that is kept on disk, and no network."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "tfds"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for builder in builders.BUILDERS.values():
        sources = [s._replace(url=unreachable(s.filename)) for s in builder.SOURCES]
        monkeypatch.setattr(builder, "SOURCES", tuple(sources))
    jaxpack_tfds._dataset.cache_clear()
    return tmp_path


def unreachable(filename: str) -> str:
    return f"http://127.0.0.1:9/{filename}"


@pytest.fixture
def serve(home, monkeypatch):
    """Serves the files of a set, and has its builder download them from there."""
    directory = home / "served"
    directory.mkdir()
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Handler, directory=str(directory))
    )
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()

    def start(name: str) -> Pixels:
        made, files = SETS[name]
        sources = []
        for filename, data in files(made).items():
            (directory / filename).write_bytes(data)
            url = f"http://127.0.0.1:{server.server_port}/{filename}"
            digest = hashlib.sha256(data).hexdigest()
            sources.append(builders.Source(url, len(data), digest))
        monkeypatch.setattr(builders.BUILDERS[name], "SOURCES", tuple(sources))
        return made

    yield start
    server.shutdown()
    thread.join()
    server.server_close()


def images_of(dataset: jp.data.Dataset, *splits: str) -> list[tuple[int, bytes]]:
    """Returns labels and original pixels of some splits' examples, in order."""
    found = []
    for x, y in (getattr(dataset, split) for split in splits):
        raw = np.rint((x * dataset.std + dataset.mean) * 255).astype(np.uint8)
        found += [
            (int(label), image.tobytes()) for label, image in zip(y, raw, strict=True)
        ]
    return sorted(found)


def examples_of(x: np.ndarray, y: np.ndarray) -> list[tuple[int, bytes]]:
    return sorted((int(b), a.tobytes()) for a, b in zip(x, y, strict=True))


def test_files_are_those_of_tfds():
    from tensorflow_datasets.core.download import checksums

    known = checksums.get_all_url_infos()
    for builder in builders.BUILDERS.values():
        for source in builder.SOURCES:
            info = known[source.url]
            assert (info.size, info.checksum) == (source.size, source.sha256)
    assert tuple(builders.BUILDERS) == loading.DOWNLOADABLE


@pytest.mark.parametrize("name", SETS)
def test_downloads_prepares_and_reads(name, serve, home, monkeypatch, capfd):
    made = serve(name)
    dataset = jp.data.load(f"tfds:{name}")
    num_classes = 100 if name == "cifar100" else 10
    shape = (32, 32, 3) if "cifar" in name else (28, 28, 1)
    assert repr(dataset) == (
        f"Dataset('tfds:{name}', train=270, validation=30, test={TEST}, "
        f"num_classes={num_classes})"
    )
    assert dataset.train[0].shape == (270, *shape)
    assert images_of(dataset, "train", "validation") == examples_of(*made.train)
    assert images_of(dataset, "test") == examples_of(*made.test)
    np.testing.assert_allclose(dataset.train[0].mean((0, 1, 2)), 0, atol=1e-3)
    np.testing.assert_allclose(dataset.train[0].std((0, 1, 2)), 1, atol=1e-3)
    assert capfd.readouterr() == ("", "")
    assert jp.data.load(f"tfds:{name}") is dataset

    # From now on there is neither a server nor TFDS.
    monkeypatch.setattr(builders.BUILDERS[name], "SOURCES", ())
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    jaxpack_tfds._dataset.cache_clear()
    again = jp.data.load(f"tfds:{name}")
    assert again is not dataset
    assert again.content_hash == dataset.content_hash
    (arrays,) = (home / "cache" / "jaxpack" / "data").iterdir()
    assert np.load(arrays / "train_x.npy").dtype == np.uint8


@pytest.mark.parametrize("name", ["fashion_mnist", "cifar100"])
def test_tfds_itself_reads_what_was_prepared(name, serve, home):
    made = serve(name)
    jp.data.load(f"tfds:{name}")
    stock = tfds.builder(name, data_dir=home / "tfds")
    assert stock.is_prepared()
    data = stock.as_data_source(
        split="test", decoders={"image": tfds.decode.SkipDecoding()}
    )
    assert sorted(example["label"] for example in data) == sorted(made.test[1])
    label = stock.info.features["label"]
    if name == "cifar100":
        assert label.int2str(7) == "fine7"
        assert all(e["coarse_label"] == e["label"] // 5 for e in data)
        assert {e["id"] for e in data} == {
            f"test_{i:05d}".encode() for i in range(TEST)
        }
    else:
        assert label.int2str(9) == "Ankle boot"


def test_a_wrong_file_is_refused_and_not_kept(serve, home):
    serve("mnist")
    served = home / "served" / "t10k-labels-idx1-ubyte.gz"
    good = served.read_bytes()
    served.write_bytes(idx(np.zeros(TEST, np.uint8)))
    with pytest.raises(OSError, match=r"not the one that TFDS knows.*try again") as e:
        jp.data.load("tfds:mnist")
    assert "t10k-labels-idx1-ubyte.gz" in str(e.value)
    assert not list((home / "tfds").glob("mnist/*"))
    served.write_bytes(good)
    assert jp.data.load("tfds:mnist").num_train == 270


def test_a_download_cut_short_is_not_used(serve, home, monkeypatch):
    serve("cifar10")
    monkeypatch.setattr(Handler, "cut", True)
    with pytest.raises(ConnectionError, match="cannot download tfds:cifar10"):
        jp.data.load("tfds:cifar10")
    assert not list((home / "tfds").glob("cifar10/*"))
    monkeypatch.setattr(Handler, "cut", False)
    assert jp.data.load("tfds:cifar10").num_train == 270


def test_progress_is_shown_in_terminals_only(serve, monkeypatch, capfd):
    from tensorflow_datasets.core.utils import tqdm_utils

    serve("cifar10")
    monkeypatch.setattr(
        shown, "_console", lambda: (Console(stderr=True, force_terminal=True), True)
    )
    jp.data.load("tfds:cifar10")
    out, err = capfd.readouterr()
    assert out == ""
    for doing in ("downloading", "preparing", "reading"):
        assert f"{doing} tfds:cifar10" in err
    assert "Generating" not in err
    assert tqdm_utils._active


def test_bytes_in_a_directory(tmp_path):
    (tmp_path / "below").mkdir()
    for name, size in (("a", 3), ("below/b", 4)):
        (tmp_path / name).write_bytes(bytes(size))
    assert shown.bytes_in(tmp_path) == 7


def test_a_set_that_another_process_prepares_meanwhile_is_taken(serve, home):
    made = serve("mnist")
    jp.data.load("tfds:mnist")
    ready = home / "tfds" / "mnist" / "3.0.1"
    away = ready.rename(home / "ready")
    png = builders.encode_png

    def and_put_back(image):
        if away.exists():
            away.rename(ready)
        return png(image)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builders, "encode_png", and_put_back)
        dataset = jp.data.load("tfds:mnist")
    assert images_of(dataset, "test") == examples_of(*made.test)
    assert [path.name for path in ready.parent.iterdir()] == ["3.0.1"]


def test_a_missing_file_says_so(serve, home):
    serve("mnist")
    (home / "served" / "train-images-idx3-ubyte.gz").unlink()
    with pytest.raises(ConnectionError, match="HTTP code: 404"):
        jp.data.load("tfds:mnist")


def test_without_a_network_it_says_what_to_do(home):
    with pytest.raises(ConnectionError, match="cannot download tfds:mnist") as error:
        jp.data.load("tfds:mnist", data_dir=home / "data")
    message = str(error.value)
    assert "data_dir=DIR" in message
    assert f"{home / 'data' / 'downloads' / 'manual'}" in message
    assert "train-images-idx3-ubyte.gz" in message
    assert "digits, mnist5k, photos" in message
    from tensorflow_datasets.core.download import downloader

    assert downloader.MAX_RETRIES == 10


def test_files_put_into_the_manual_directory_need_no_network(serve, home, monkeypatch):
    made = serve("mnist")
    manual = home / "data" / "downloads" / "manual"
    shutil.copytree(home / "served", manual)
    away = [s._replace(url=unreachable(s.filename)) for s in builders.Mnist.SOURCES]
    monkeypatch.setattr(builders.Mnist, "SOURCES", tuple(away))
    dataset = jp.data.load("tfds:mnist:3.0.1", data_dir=home / "data")
    assert images_of(dataset, "test") == examples_of(*made.test)


class Shapes(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Images with more features than two, as a user's own builder would have them."""

    name = "shapes"
    VERSION = tfds.core.Version("1.10.0")
    COUNTS = {"train": 40, "validation": 10, "test": 8}  # noqa: RUF012
    SIDES: tuple[int, ...] = (12,)
    LABELLED = True

    def _info(self):
        side = self.SIDES[0] if len(self.SIDES) == 1 else None
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.FeaturesDict(
                {
                    "photo": tfds.features.Image(
                        shape=(side, side, 3), encoding_format="png"
                    ),
                    "shape": tfds.features.ClassLabel(names=["disc", "square"]),
                    "size": tfds.features.Scalar(np.int64),
                }
            ),
        )

    def _split_generators(self, dl_manager):
        return {
            split: self._generate_examples(split, n) for split, n in self.COUNTS.items()
        }

    def _generate_examples(self, split, count):
        for i in range(count):
            side = self.SIDES[i % len(self.SIDES)]
            image = np.full((side, side, 3), 100 * (i % 2) + i, np.uint8)
            hidden = split == "test" and not self.LABELLED
            yield (
                i,
                {
                    "photo": io.BytesIO(formats.encode_png(image)),
                    "shape": -1 if hidden else i % 2,
                    "size": side,
                },
            )


def prepare(root: pathlib.Path, **attributes) -> pathlib.Path:
    """Prepares `Shapes` with other attributes, and returns where."""
    builder_class = type(
        "Shapes", (Shapes,), {"name": "shapes"} | attributes, skip_registration=True
    )
    builder = builder_class(data_dir=root, file_format="array_record")
    builder.download_and_prepare(file_format="array_record")
    return pathlib.Path(builder.data_dir)


def test_reads_a_set_prepared_by_others(home):
    prepare(home / "own")
    dataset = jp.data.load("tfds:shapes", data_dir=home / "own")
    assert repr(dataset) == (
        "Dataset('tfds:shapes', train=40, validation=10, test=8, num_classes=2)"
    )
    assert dataset.train[0].shape == (40, 12, 12, 3)
    expected = [
        (i % 2, np.full((12, 12, 3), 100 * (i % 2) + i, np.uint8).tobytes())
        for i in range(10)
    ]
    assert images_of(dataset, "validation") == sorted(expected)
    with pytest.raises(ValueError, match="validation split of its own, of 10 examples"):
        jp.data.load("tfds:shapes", data_dir=home / "own", validation=0.2)


def test_the_newest_version_is_read_unless_one_is_named(home):
    prepare(home, COUNTS={"train": 20}, VERSION=tfds.core.Version("1.9.0"))
    prepare(home, COUNTS={"train": 30})
    assert jp.data.load("tfds:shapes", data_dir=home).num_train == 27
    assert jp.data.load("tfds:shapes:1.9.0", data_dir=str(home)).num_train == 18


def test_configs(home):
    configs = [tfds.core.BuilderConfig(name=n, version="1.0.0") for n in ("a", "b")]
    for config in configs:
        builder = type(
            "Shapes",
            (Shapes,),
            {"name": "shapes", "BUILDER_CONFIGS": configs},
            skip_registration=True,
        )(data_dir=home, config=config, file_format="array_record")
        builder.download_and_prepare(file_format="array_record")
    assert jp.data.load("tfds:shapes/b", data_dir=home).num_train == 40
    with pytest.raises(ValueError, match="choose one of: tfds:shapes/a, tfds:shapes/b"):
        jp.data.load("tfds:shapes", data_dir=home)
    shutil.rmtree(home / "shapes" / "b")
    assert jp.data.load("tfds:shapes", data_dir=home).num_train == 40


def test_images_of_different_sizes_are_resized(home):
    prepare(home, SIDES=(12, 20, 9))
    with pytest.raises(ValueError, match=r"differ in size; give image_size="):
        jp.data.load("tfds:shapes", data_dir=home)
    dataset = jp.data.load("tfds:shapes", data_dir=home, image_size=(8, 10))
    assert dataset.train[0].shape == (40, 8, 10, 3)
    expected = [
        (i % 2, np.full((8, 10, 3), 100 * (i % 2) + i, np.uint8).tobytes())
        for i in range(8)
    ]
    assert images_of(dataset, "test") == sorted(expected)
    assert jp.data.load("tfds:shapes", data_dir=home, image_size=6).train[0].shape[
        1:
    ] == (6, 6, 3)


def test_an_unlabelled_test_split_is_left_out(home):
    prepare(home, LABELLED=False)
    assert jp.data.load("tfds:shapes", data_dir=home).test is None


def test_a_set_of_other_content_is_read_anew(home):
    path = prepare(home, SIDES=(12,))
    first = jp.data.load("tfds:shapes", data_dir=home)
    shutil.rmtree(path)
    prepare(home, SIDES=(9,))
    assert jp.data.load("tfds:shapes", data_dir=home).train[0].shape[1:] == (9, 9, 3)
    assert first.train[0].shape[1:] == (12, 12, 3)


def test_other_formats_and_other_features_are_refused(home):
    path = prepare(home)
    for shard in path.glob("*.array_record*"):
        shard.rename(shard.with_name(shard.name.replace("array_record", "tfrecord")))
    with pytest.raises(ValueError, match=r"not as array_record.*tfds\.builder"):
        jp.data.load("tfds:shapes", data_dir=home)

    shutil.rmtree(path)
    prepare(home, COUNTS={"extra": 10})
    with pytest.raises(ValueError, match="no train split, only extra"):
        jp.data.load("tfds:shapes", data_dir=home)

    def info(self):
        features = {"shape": tfds.features.ClassLabel(num_classes=2)}
        return tfds.core.DatasetInfo(
            builder=self, features=tfds.features.FeaturesDict(features)
        )

    shutil.rmtree(path)
    prepare(home, _info=info, _generate_examples=lambda *_: iter([(0, {"shape": 1})]))
    with pytest.raises(ValueError, match="no set of image classification"):
        jp.data.load("tfds:shapes", data_dir=home)


def test_an_unknown_name_lists_what_there_is(home):
    prepare(home / "own")
    with pytest.raises(ValueError, match="did you mean 'tfds:fashion_mnist'") as error:
        jp.data.load("tfds:fashionmnist", data_dir=home / "own")
    known = "tfds:mnist, tfds:fashion_mnist, tfds:cifar10, tfds:cifar100"
    assert known in str(error.value)
    assert f"{home / 'own'}, which are tfds:shapes:1.10.0" in str(error.value)
    with pytest.raises(ValueError, match=r"which are none; .*array_record"):
        jp.data.load("tfds:imagenet2012")
    with pytest.raises(ValueError, match=r"only version 3\.0\.1 is downloaded"):
        jp.data.load("tfds:mnist:1.0.0")


def test_a_set_being_prepared_is_not_seen(home):
    path = prepare(home)
    path.rename(path.with_name("incomplete.X1_1.10.0"))
    with pytest.raises(ValueError, match="which are none"):
        jp.data.load("tfds:shapes", data_dir=home)


def test_reading_that_is_interrupted_leaves_nothing(home, monkeypatch):
    prepare(home)
    calls = []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 20:
            raise KeyboardInterrupt
        return formats.decode_image(*args)

    with monkeypatch.context() as patch:
        patch.setattr(jaxpack_tfds, "decode_image", interrupted)
        with pytest.raises(KeyboardInterrupt):
            jp.data.load("tfds:shapes", data_dir=home)
    assert not list(array_cache.cache_directory().iterdir())
    assert jp.data.load("tfds:shapes", data_dir=home).num_train == 40


@pytest.mark.parametrize("file", ["train_x.npy", "facts.json"])
@pytest.mark.parametrize("left", [0, 150])
def test_damaged_arrays_are_read_anew(home, file, left):
    prepare(home)
    first = jp.data.load("tfds:shapes", data_dir=home).content_hash
    (arrays,) = array_cache.cache_directory().iterdir()
    content = (arrays / file).read_bytes()
    (arrays / file).write_bytes(content[: min(left, len(content) - 1)])
    jaxpack_tfds._dataset.cache_clear()
    assert jp.data.load("tfds:shapes", data_dir=home).content_hash == first
    assert (arrays / file).read_bytes() == content


def test_the_validation_split(home):
    prepare(home, COUNTS={"train": 40, "test": 8})
    load = functools.partial(jp.data.load, "tfds:shapes", data_dir=home)
    for validation, count in ((None, 4), (0.25, 10), (12, 12), (0.001, 1)):
        dataset = load(validation=validation)
        assert dataset.num_validation == count
        assert dataset.num_train == 40 - count
        if count % 2 == 0:
            assert np.bincount(dataset.validation[1]).tolist() == [count // 2] * 2
        train, held_out = (
            set(images_of(dataset, split)) for split in ("train", "validation")
        )
        assert len(train | held_out) == 40
    choices = [load(seed, validation=10).content_hash for seed in (0, 1, 0)]
    assert choices[0] == choices[2] != choices[1]
    with pytest.raises(ValueError, match="leaves nothing to train on: there are 40"):
        load(validation=40)
    with pytest.raises(ValueError, match="seed is -1; it must be a whole"):
        load(-1)


@pytest.mark.parametrize("value", [0, 1.0, -3, True, "10", float("nan")])
def test_refuses_validation(home, value):
    with pytest.raises(ValueError, match="validation must be a fraction"):
        jp.data.load("tfds:mnist", validation=value)


@pytest.mark.parametrize("value", [0, (32,), (32, 0), "32", (32.0, 32.0), True])
def test_refuses_image_size(home, value):
    with pytest.raises(ValueError, match="image_size must be"):
        jp.data.load("tfds:mnist", image_size=value)


@pytest.mark.parametrize(
    "option", [{"validation": 0.1}, {"data_dir": "x"}, {"image_size": 8}]
)
def test_embedded_sets_take_no_options(option):
    (name,) = option
    with pytest.raises(ValueError, match=f"{name}=.* is for names .* tfds:"):
        jp.data.load("digits", **option)


class Net(nn.Module):
    """A linear classifier."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(x.reshape(len(x), -1))


def test_trains(home):
    prepare(home, COUNTS={"train": 80, "test": 8})
    task = jp.Task(
        lambda hp: Net(),
        lambda hp: optax.adam(hp.learning_rate),
        jp.data.load("tfds:shapes", data_dir=home),
        batch_size=16,
    )
    results = jp.train(task, [{"learning_rate": r} for r in (1e-2, 1e-3)], epochs=1)
    assert [result.status for result in results] == ["COMPLETE"] * 2
    assert results[0].score > 0.9


FAKE_TENSORFLOW = """
hidden = []
class config:
    def set_visible_devices(devices, kind):
        hidden.append((devices, kind))
        if {in_use}:
            raise RuntimeError("Visible devices cannot be modified after being used")
"""


@pytest.fixture
def fake_tensorflow(tmp_path, monkeypatch):
    """Installs a fake TensorFlow, whose GPUs may be in use already."""

    def install(in_use: bool = False) -> None:
        package = tmp_path / "installed" / "tensorflow"
        package.mkdir(parents=True)
        text = FAKE_TENSORFLOW.format(in_use=in_use)
        (package / "__init__.py").write_text(text)
        monkeypatch.syspath_prepend(str(package.parent))

    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)
    yield install
    sys.modules.pop("tensorflow", None)


@pytest.mark.parametrize("in_use", [False, True])
@pytest.mark.parametrize("before", [False, True])
def test_tensorflow_gets_no_gpu(fake_tensorflow, in_use, before):
    fake_tensorflow(in_use)
    finders = list(sys.meta_path)
    if before:
        importlib.import_module("tensorflow")
    with guard.without_tensorflow_gpus():
        tensorflow = importlib.import_module("tensorflow")
    assert tensorflow.hidden == [([], "GPU")]
    assert "FileLoader" in type(tensorflow.__spec__.loader).__name__
    assert sys.meta_path == finders


def test_tensorflow_is_left_alone_elsewhere(fake_tensorflow):
    fake_tensorflow()
    with guard.without_tensorflow_gpus():
        pass
    assert "tensorflow" not in sys.modules
    assert importlib.import_module("tensorflow").hidden == []


def test_tensorflow_that_is_not_installed_is_still_not_found(fake_tensorflow):
    with (
        guard.without_tensorflow_gpus(),
        pytest.raises(ModuleNotFoundError, match="'tensorflow'"),
    ):
        importlib.import_module("tensorflow.nothing")


def test_loading_keeps_the_gpus_from_tensorflow(home, fake_tensorflow, monkeypatch):
    fake_tensorflow()
    prepare(home)

    def decode(*args):
        importlib.import_module("tensorflow")
        return formats.decode_image(*args)

    monkeypatch.setattr(jaxpack_tfds, "decode_image", decode)
    jp.data.load("tfds:shapes", data_dir=home)
    assert sys.modules["tensorflow"].hidden == [([], "GPU")]


def test_formats_at_full_size(tmp_path):
    images = np.arange(60000 * 784, dtype=np.uint32).astype(np.uint8)
    images = images.reshape(60000, 28, 28)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(idx(images))
    np.testing.assert_array_equal(formats.read_idx(path), images)
    x = np.arange(10000 * 3072, dtype=np.uint32).astype(np.uint8)
    x = x.reshape(10000, 32, 32, 3)
    y = (np.arange(10000) % 10).astype(np.uint8)
    labels, found = formats.read_cifar(cifar_records(x, y), 1)
    np.testing.assert_array_equal(labels[:, 0], y)
    np.testing.assert_array_equal(found, x)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x89PNG", "no IDX file of bytes"),
        (b"\0\0\x08", "no IDX file of bytes"),
        (b"\0\0\x0d\x01\0\0\0\0", "no IDX file of bytes"),
        (b"\0\0\x08\x01\0\0\0\x05abc", "should hold 5 values.*but has 3"),
    ],
)
def test_idx_refuses(tmp_path, data, message):
    (tmp_path / "x.gz").write_bytes(gzip.compress(data))
    with pytest.raises(ValueError, match=message):
        formats.read_idx(tmp_path / "x.gz")


def test_cifar_refuses():
    with pytest.raises(ValueError, match="no whole number of 3073-byte records"):
        formats.read_cifar(bytes(3074), 1)


def test_decodes_other_files_and_channels():
    grey = np.repeat(np.arange(0, 200, 25, dtype=np.uint8)[:, None], 6, axis=1)
    file = io.BytesIO()
    Image.fromarray(grey).save(file, "jpeg", quality=100)
    data = file.getvalue()
    assert formats.decode_image(data, (8, 6, 1), None).shape == (8, 6, 1)
    rgb = formats.decode_image(data, (8, 6, 3), None)
    np.testing.assert_allclose(rgb, np.stack([grey] * 3, -1), atol=3)
    assert formats.decode_image(data, (4, 3, 3), (4, 3)).shape == (4, 3, 3)
    with pytest.raises(ValueError, match="8 x 6 pixels, where 4 x 3 were expected"):
        formats.decode_image(data, (4, 3, 3), None)
