"""Datasets: what is checked at the door, conversion, standardisation, embedded sets."""

from __future__ import annotations

import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxpack.data import Dataset, load
from jaxpack.data import embedded as emb


def pair(n=6, **changes):
    """Returns a valid (x, y) with three features and two classes."""
    x = np.random.default_rng(n).normal(size=(n, 3)).astype(np.float32)
    return changes.get("x", x), changes.get("y", np.arange(n) % 2)


def planted(value, *, dtype=np.float32):
    x = np.ones((6, 3), dtype)
    x[2, 1] = x[4, 0] = value
    return x


def splits(data):
    return data.train, data.validation, data.test


# --- what is refused ------------------------------------------------------------

X, Y = pair()
BAD = {
    "no pair": ({"train": X}, "train must be a pair (x, y) of arrays, got ndarray"),
    "no validation": ({"validation": None}, "validation is missing; trials are chosen"),
    "triple": ({"train": (X, Y, Y)}, "train must be a pair"),
    "no array": ({"train": (None, Y)}, "train x holds no array"),
    "empty": ({"train": (X[:0], Y[:0])}, "train x is empty: its shape is (0, 3)"),
    "empty validation": ({"validation": (X[:0], Y[:0])}, "validation x is empty"),
    "empty test": ({"test": (X[:0], Y[:0])}, "test x is empty"),
    "no features": ({"train": (X[:, :0], Y)}, "train x is empty: its shape is (6, 0)"),
    "scalar": ({"train": (X, 3)}, "train y is 3, without an axis of examples"),
    "list": ({"train": (X, [0, 1, 0])}, "train y[0] is 0, without an axis"),
    "lengths": ({"train": (X, Y[:5])}, "train x has 6 examples but train y has 5"),
    "leaf lengths": (
        {"train": ({"a": X, "b": X[:4]}, Y)},
        "train x['a'] has 6 examples but train x['b'] has 4",
    ),
    "object": ({"train": (X.astype(object), Y)}, "train x has the dtype object"),
    "string": ({"train": (X, Y.astype(str))}, "train y has the dtype <U"),
    "complex": ({"train": (X.astype(complex), Y)}, "train x has the dtype complex128"),
    "shape": (
        {"validation": (X[:, :2], Y)},
        "an example of validation x has the shape (2,), but one of train has (3,)",
    ),
    "structure": ({"test": ({"a": X}, Y)}, "test x has the structure"),
    "dtype": (
        {"validation": (X.astype(np.uint8), Y)},
        "validation x has the dtype uint8, but train has float32",
    ),
    "label dtype": ({"test": (X, Y * 1.0)}, "test y has the dtype float64"),
    "nan": (
        {"train": (planted(np.nan), Y)},
        "train x has values that are not finite as float32: 2 of 18, the first nan at "
        "index (2, 1)",
    ),
    "inf in y": ({"test": (X, planted(-np.inf)[:, 0])}, "test y has"),
    "leaf nan": (
        {"validation": ({"a": planted(np.nan)}, Y), "train": ({"a": X}, Y)},
        "validation x['a'] has values that are not finite",
    ),
    "float32 overflow": (
        {"train": (planted(1e300, dtype=np.float64), Y)},
        "not finite as float32: 2 of 18, the first 1e+300",
    ),
    "int32 overflow": (
        {k: (planted(2**31, dtype=np.int64), Y) for k in ("train", "validation")},
        "train x has values that are not within int32: 2 of 18, the first 2147483648",
    ),
    "negative label": (
        {"train": (X, Y - 1)},
        "train y has values that are not class labels from 0 to 1: 3 of 6, the first "
        "-1 at index (0,)",
    ),
    "label too large": (
        {"num_classes": 2, "validation": (X, Y * 2)},
        "validation y has values that are not class labels from 0 to 1: 3 of 6, the "
        "first 2 at index (1,)",
    ),
    "unseen label": (
        {"validation": (X, Y * 7)},
        "validation y has class labels that are not in train y: 7;",
    ),
    "unseen label, classes given": (
        {"num_classes": 10, "test": (X, Y + 1)},
        "test y has class labels that are not in train y: 2;",
    ),
    "no classes": ({"num_classes": 0}, "num_classes must be a positive int, got 0"),
    "text for a flag": ({"standardize": "no"}, "standardize is 'no'; it must be True"),
    "name": ({"name": 3}, "name is 3; it must be a text"),
    "float classes": ({"num_classes": 2.0}, "num_classes must be a positive int"),
}


@pytest.mark.parametrize("case", BAD)
def test_refuses(case):
    changes, message = BAD[case]
    if case == "inf in y":
        changes = {"train": (X, X[:, 0]), "validation": (X, X[:, 0])} | changes
    arguments: dict[str, Any] = {"train": (X, Y), "validation": (X, Y)} | changes
    with pytest.raises(ValueError) as error:
        Dataset.from_arrays(**arguments)
    assert message in str(error.value)


def test_many_unseen_labels_are_cut_short():
    y = np.arange(100)
    with pytest.raises(ValueError, match=r"9, 10, \.\.\. \(99 in all\)"):
        Dataset.from_arrays((np.ones((100, 1)), y * 0), (np.ones((100, 1)), y))


# --- conversion -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "x_dtype", "y_dtype"),
    [
        (np.float64, np.float32, np.float32),
        (np.float16, np.float32, np.float32),
        (ml_dtypes.bfloat16, np.float32, np.float32),
        (">f4", np.float32, np.float32),
        (np.int64, np.int32, np.int32),
        (np.uint32, np.int32, np.int32),
        (np.int8, np.int32, np.int32),
        (np.uint8, np.float32, np.int32),
        (bool, np.bool_, np.bool_),
    ],
)
def test_dtype_rule(given, x_dtype, y_dtype):
    x, y = np.ones((4, 2)).astype(given), np.ones((4, 2)).astype(given)
    data = Dataset.from_arrays((x, y), (x, y))
    for leaf, dtype in zip(data.train, (x_dtype, y_dtype), strict=True):
        assert leaf.dtype == dtype and leaf.dtype.isnative
        np.testing.assert_array_equal(leaf, 1)
    assert data.preprocess(x).dtype == x_dtype


def test_images_of_bytes_keep_their_values():
    x = np.arange(256, dtype=np.uint8).reshape(4, 8, 8, 1)
    with pytest.warns(UserWarning, match="train x is uint8.*standardize=True"):
        data = Dataset.from_arrays((x, np.arange(4)), (x, np.arange(4)))
    np.testing.assert_array_equal(data.train[0], x.astype(np.float32))


def test_copies_are_read_only_and_the_users_arrays_stay_as_they_were():
    x, y = pair()
    before = x.copy()
    data = Dataset.from_arrays((x, y), (x, y), (x, y), standardize=True)
    np.testing.assert_array_equal(x, before)
    x[:] = 0
    for leaf in (
        *(leaf for pair in splits(data) for leaf in pair),
        data.mean,
        data.std,
    ):
        assert not leaf.flags.writeable
    assert np.abs(data.train[0]).min() > 0
    with pytest.raises(ValueError, match="read-only"):
        data.train[0][0] = 1


def test_pytrees():
    def split(n):
        x = {"image": np.ones((n, 2, 2, 1)), "tokens": np.ones((n, 5), np.int64)}
        return x, (np.arange(n) % 2, np.linspace(0, 1, n))

    data = Dataset.from_arrays(split(6), split(4), standardize=True, num_classes=7)
    assert data.num_train == 6 and data.num_validation == 4 and data.num_classes == 7
    assert data.train[0]["image"].dtype == np.float32
    np.testing.assert_array_equal(data.train[0]["image"], 0)
    np.testing.assert_array_equal(data.train[0]["tokens"], 1)
    assert data.train[1][1].dtype == np.float32
    new = data.preprocess(
        {"image": np.full((1, 2, 2, 1), 3.0), "tokens": np.ones((1, 5), np.int8)}
    )
    np.testing.assert_array_equal(new["image"], 2)
    np.testing.assert_array_equal(new["tokens"], 1)


def test_counts_classes():
    x = np.ones((6, 1))
    y = np.array([0, 3, 0, 3, 1, 1])
    assert Dataset.from_arrays((x, y), (x, y)).num_classes == 4
    assert Dataset.from_arrays((x, y), (x, y), num_classes=9).num_classes == 9
    assert Dataset.from_arrays((x, y * 0), (x, y * 0)).num_classes == 1


@pytest.mark.parametrize("y", [np.linspace(-1, 1, 6), -np.ones((6, 2), np.int32)])
def test_targets_that_are_no_class_labels_go_unchecked(y):
    assert Dataset.from_arrays((X, y), (X, y + 1)).num_classes is None


# --- standardisation ------------------------------------------------------------


@pytest.mark.parametrize("shape", [(500,), (500, 3), (50, 10, 3), (20, 5, 5, 3)])
def test_standardizes_by_train_statistics_only(shape):
    generator = np.random.default_rng(0)
    train, other = generator.normal(3, 2, shape), generator.normal(-50, 9, shape)
    y = np.zeros(shape[0], np.int32)
    data = Dataset.from_arrays((train, y), (other, y), (other, y), standardize=True)
    axes = tuple(range(len(shape) - 1)) or (0,)
    mean, std = train.mean(axes), train.std(axes)
    np.testing.assert_allclose(data.mean, mean, rtol=1e-5)
    np.testing.assert_allclose(data.std, std, rtol=1e-5)
    np.testing.assert_allclose(data.train[0], (train - mean) / std, atol=1e-5)
    np.testing.assert_allclose(data.validation[0], (other - mean) / std, rtol=1e-4)
    np.testing.assert_array_equal(*(x for x, _ in splits(data)[1:]))


def test_without_standardization():
    data = Dataset.from_arrays((X, Y), (X, Y))
    assert data.mean is None and data.std is None
    np.testing.assert_array_equal(data.train[0], X)
    np.testing.assert_array_equal(data.preprocess(X), X)


def test_constant_features_are_only_centred():
    x = np.tile(np.array([0.1, 0, 1e6, -7], np.float32), (1001, 1))
    y = np.zeros(1001, np.int32)
    data = Dataset.from_arrays((x, y), (x + 2, y), standardize=True)
    np.testing.assert_array_equal(data.std, 1)
    np.testing.assert_array_equal(data.train[0], 0)
    np.testing.assert_allclose(data.validation[0], 2, rtol=1e-5)


def test_statistics_of_a_large_offset_are_exact(monkeypatch):
    monkeypatch.setattr("jaxpack.data.dataset._CHUNK_BYTES", 1000)
    x = (1000 + np.random.default_rng(0).normal(size=(999, 4))).astype(np.float32)
    y = np.zeros(999, np.int32)
    data = Dataset.from_arrays((x, y), (x, y), standardize=True)
    np.testing.assert_allclose(data.std, x.astype(float).std(0), rtol=1e-6)
    np.testing.assert_allclose(data.mean, x.astype(float).mean(0), rtol=1e-7)


def test_preprocess_treats_new_inputs_as_the_splits():
    x, y = pair(30)
    data = Dataset.from_arrays((x, y), (x[:10], y[:10]), standardize=True)
    np.testing.assert_array_equal(data.preprocess(x[:10]), data.validation[0])
    np.testing.assert_array_equal(data.preprocess(x.astype(float)), data.train[0])
    assert data.preprocess(x[:1]).shape == (1, 3)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (X[:, :2], "an example of new x has the shape"),
        (X[0], "an example of new x has the shape"),
        ({"a": X}, "new x has the structure"),
        (X.astype(np.int32), "new x has the dtype int32, but train has float32"),
        (planted(np.nan), "new x has values that are not finite"),
        (X[:0], "new x is empty"),
        (None, "new x holds no array"),
    ],
)
def test_preprocess_refuses(x, message):
    data = Dataset.from_arrays((X, Y), (X, Y))
    with pytest.raises(ValueError, match=message):
        data.preprocess(x)


def test_host_memory_stays_below_three_times_the_arrays():
    x = np.random.default_rng(0).normal(size=(2_500, 4_000)).astype(np.float32)
    y = np.zeros(2_500, np.int32)
    tracemalloc.start()
    Dataset.from_arrays((x, y), (x[:10], y[:10]), standardize=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert x.nbytes + peak < 3 * x.nbytes


# --- identity -------------------------------------------------------------------


def test_content_hash_knows_values_places_shapes_and_dtypes():
    def digest(x=X, y=Y, **more):
        return Dataset.from_arrays((x, y), (X, Y) if x is X else (x, y), **more)

    variants = [
        digest(),
        digest(name="other"),
        digest(x=X + 1),
        digest(y=Y[::-1]),
        digest(x=X.reshape(6, 1, 3)),
        digest(x={"a": X}),
        digest(x={"b": X}),
        digest(test=(X, Y)),
        digest(standardize=True),
    ]
    hashes = [data.content_hash for data in variants]
    assert hashes[0] == hashes[1] and len(set(hashes)) == len(hashes) - 1
    assert all(len(h) == 64 and int(h, 16) for h in hashes)
    zeros = np.zeros((6, 3), np.int32)
    ints, floats = digest(x=zeros), digest(x=zeros.astype(np.float32))
    assert ints.content_hash != floats.content_hash
    assert variants[0].content_hash is variants[0].content_hash


def test_dataset_is_frozen_and_hashable():
    data = Dataset.from_arrays((X, Y), (X, Y), (X, Y), name="mine")
    with pytest.raises(AttributeError):
        data.name = "other"  # pyrefly: ignore
    assert hash(data) == hash(data) and data == data
    assert data != Dataset.from_arrays((X, Y), (X, Y))
    expected = "Dataset('mine', train=6, validation=6, test=6, num_classes=2)"
    assert repr(data) == expected


# --- embedded sets --------------------------------------------------------------

SETS = {
    "digits": ((8, 8, 1), (1197, 300, 300), 10),
    "mnist5k": ((28, 28, 1), (4000, 500, 500), 10),
    "photos": ((32, 32, 3), (4500, 900, 900), 9),
}


def load_or_skip(name, seed=0):
    try:
        return load(name, seed)
    except ImportError as error:
        pytest.skip(str(error))


@pytest.fixture(params=SETS)
def embedded(request):
    return load_or_skip(request.param)


def test_embedded_shapes_and_statistics(embedded):
    shape, sizes, num_classes = SETS[embedded.name]
    assert embedded.num_classes == num_classes
    for (x, y), size in zip(splits(embedded), sizes, strict=True):
        assert x.shape == (size, *shape) and x.dtype == np.float32
        assert y.shape == (size,) and y.dtype == np.int32
        counts = np.bincount(y, minlength=num_classes) * num_classes / size
        assert counts.min() > 0.9 and counts.max() < 1.1
    axes = (0, 1, 2)
    x = embedded.train[0].astype(float)
    np.testing.assert_allclose(x.mean(axes), 0, atol=1e-6)
    np.testing.assert_allclose(x.std(axes), 1, atol=1e-6)
    scaled = embedded.train[0] * embedded.std + embedded.mean
    assert scaled.min() > -1e-4 and scaled.max() < 1 + 1e-4 and scaled.max() > 0.99


def test_embedded_splits_share_no_example(embedded):
    seen = [{x.tobytes() for x in split[0]} for split in splits(embedded)]
    shared = (seen[0] & seen[1]) | (seen[0] & seen[2]) | (seen[1] & seen[2])
    # The black corners of the retina look alike, though they are different pixels.
    for crop in shared:
        pixels = np.frombuffer(crop, np.float32).reshape(-1, SETS[embedded.name][0][-1])
        assert (pixels == pixels[0]).all()
    assert len(shared) <= (embedded.name == "photos")


def test_every_label_is_that_of_its_image(embedded):
    """A nearest class mean beats chance by far, on examples it has not seen."""
    x, y = embedded.train
    means = np.stack([x[y == c].mean(0).ravel() for c in range(embedded.num_classes)])
    x, y = embedded.test
    x, y = x[::3], y[::3]
    distances = np.square(x.reshape(len(x), 1, -1) - means).sum(-1)
    assert (distances.argmin(1) == y).mean() > 3 / embedded.num_classes


def test_load_is_cached_and_fixed_by_seed():
    other = load_or_skip("digits", seed=1)
    assert load("digits") is load("digits", 0) is load(name="digits", seed=0)
    assert other.content_hash != load("digits").content_hash
    emb._load.cache_clear()
    assert load("digits", seed=1).content_hash == other.content_hash


def test_load_refuses():
    with pytest.raises(ValueError, match=r"'mnist': .*; did you mean 'mnist5k'\?"):
        load("mnist")
    with pytest.raises(ValueError, match=r"'xyz': there are digits, .*tfds:cifar100$"):
        load("xyz")
    with pytest.raises(ValueError, match="data_dir is 3; it must be a path"):
        load("tfds:mnist", data_dir=3)
    with pytest.raises(ValueError, match="seed is -1; it must be a whole number from"):
        load("digits", seed=-1)


@pytest.mark.parametrize("size", [(300, 451), (512, 512), (1411, 1000)])
@pytest.mark.parametrize("seed", [0, 1])
def test_no_pixel_of_a_photo_is_in_two_splits(size, seed):
    owner = np.zeros(size, np.int32)
    for number, blocks in enumerate(emb.photo_blocks(size, seed, 3).values(), 1):
        corners = emb.crop_corners(blocks)
        assert len(corners) == 25 * len(blocks)
        for row, column in corners:
            crop = owner[row : row + emb.CROP, column : column + emb.CROP]
            assert crop.shape == (emb.CROP, emb.CROP)
            assert np.isin(crop, (0, number)).all()
            crop[:] = number
    pixels = np.bincount(owner.ravel())[1:]
    expected = [blocks * emb.BLOCK**2 for blocks in emb.BLOCKS.values()]
    np.testing.assert_array_equal(pixels, expected)


def test_photo_blocks_differ_by_seed_and_photo():
    choices = [
        emb.photo_blocks((512, 512), *k)["test"] for k in ((0, 0), (0, 1), (1, 0))
    ]
    assert len({choice.tobytes() for choice in choices}) == 3


def test_crops_are_cut_where_the_corners_say():
    data = load_or_skip("photos")
    image_module = pytest.importorskip("PIL.Image")
    with image_module.open(emb._package_file(emb.PHOTOS[1])) as image:
        chelsea = np.asarray(image.convert("RGB"))
    corners = emb.crop_corners(emb.photo_blocks(chelsea.shape, 0, 1)["test"])
    crops = [chelsea[r : r + 32, c : c + 32] for r, c in corners]
    x, y = splits(data)[2]
    found = x[y == 1] * data.std + data.mean
    np.testing.assert_allclose(found * 255, crops, atol=1e-2)
