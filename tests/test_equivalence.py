"""Every lane equals the trial trained alone."""

from __future__ import annotations

import functools

import flax.linen as nn
import optax
import pytest
from reference import difference, train_alone
from tiny import CNN, MLP

import jaxpack as jp

ENGINES = ("packed", "solo", "fused")

# Each as a function of the learning rate, with the tolerance of its family.
OPTIMIZERS = {
    "sgd": (optax.sgd, 1e-5),
    "momentum": (lambda lr: optax.sgd(lr, momentum=0.9), 1e-5),
    "nesterov": (lambda lr: optax.sgd(lr, momentum=0.9, nesterov=True), 1e-5),
    "clipped": (
        lambda lr: optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(lr)),
        1e-5,
    ),
    "adam": (optax.adam, 5e-5),
    "adamw": (lambda lr: optax.adamw(lr, weight_decay=1e-2), 5e-5),
    "adagrad": (optax.adagrad, 5e-5),
}


def cases(names, slow):
    marks = {name: [pytest.mark.slow] * (name in slow) for name in names}
    return [pytest.param(name, marks=marks[name]) for name in names]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_mlp_lanes_equal_trials_alone(tiny_dataset, name):
    make, tolerance = OPTIMIZERS[name]
    task = jp.Task(
        lambda hp: MLP(rate=hp.rate), lambda hp: make(hp.learning_rate), tiny_dataset
    )
    # Of 50 examples, batches of 8 leave a short one at the end, batches of 25 none.
    trials = [
        {"learning_rate": lr, "rate": rate, "batch_size": size}
        for lr, rate, size in ((0.01, 0.0, 8), (0.003, 0.3, 8), (0.002, 0.6, 25))
    ]
    alone = [
        train_alone(
            MLP(rate=hp["rate"]),
            make(hp["learning_rate"]),
            tiny_dataset.train,
            steps=100,
            batch_size=hp["batch_size"],
            seed=3,
            trial=i,
            train_flag="train",
        )
        for i, hp in enumerate(trials)
    ]
    # What fused adds does not depend on the optimizer.
    for engine in ENGINES if name == "adam" else ENGINES[:2]:
        results = jp.train(task, trials, steps=100, engine=engine, seed=3)
        for result, (params, _, opt_state) in zip(results, alone, strict=True):
            assert result.steps == 100
            assert difference(result.params, params) <= tolerance, engine
            assert difference(result.opt_state, opt_state) <= tolerance, engine


@pytest.mark.parametrize(
    ("batch_norm", "name"),
    [
        (True, "momentum"),
        (False, "adam"),
        pytest.param(True, "adam", marks=pytest.mark.slow),
        pytest.param(False, "momentum", marks=pytest.mark.slow),
    ],
)
def test_cnn_lanes_equal_trials_alone(tiny_images, batch_norm, name):
    make, tolerance = OPTIMIZERS[name]
    task = jp.Task(
        lambda hp: CNN(batch_norm=batch_norm, rate=hp.rate),
        lambda hp: make(hp.learning_rate),
        tiny_images,
        batch_size=16,
    )
    trials = [
        {"learning_rate": 0.01, "rate": 0.25},
        {"learning_rate": 0.003, "rate": 0.5},
    ]
    alone = [
        train_alone(
            CNN(batch_norm=batch_norm, rate=hp["rate"]),
            make(hp["learning_rate"]),
            tiny_images.train,
            steps=20,
            batch_size=16,
            seed=1,
            trial=i,
            train_flag="train",
        )
        for i, hp in enumerate(trials)
    ]
    for engine in ENGINES if batch_norm else ENGINES[:2]:
        results = jp.train(task, trials, steps=20, engine=engine, seed=1)
        for result, (params, state, _) in zip(results, alone, strict=True):
            assert difference(result.params, params) <= tolerance, engine
            assert difference(result.model_state, state) <= tolerance, engine


ZOO = {
    "resnet": functools.partial(jp.models.ResNet, width=4),
    "mobilenet": functools.partial(
        jp.models.MobileNetV2, stages=((1, 8, 1, 1), (2, 8, 2, 2)), features=16
    ),
    "densenet": functools.partial(jp.models.DenseNet, 7, growth=4),
    "transformer": functools.partial(jp.models.Transformer, 8, 1, 2),
}
ACTIVATIONS = {"tanh": nn.tanh, "relu": nn.relu}


@pytest.fixture(scope="module")
def photos():
    """Returns a function that takes so many photographs, of 8x8."""
    loaded = jp.data.load("photos")

    def few(split, count):
        rows = slice(None, None, len(split[1]) // count)
        return split[0][rows, ::4, ::4][:count], split[1][rows][:count]

    return lambda count: jp.data.Dataset.from_arrays(
        train=few(loaded.train, count), validation=few(loaded.validation, 16)
    )


@pytest.mark.parametrize("name", cases(ZOO, {"resnet", "densenet"}))
def test_lanes_of_the_zoo_equal_trials_alone(photos, name):
    # Momentum: where BatchNorm takes out a scale, its gradient is rounding noise for
    # as long as the bias beside it is zero, and Adam makes a step of it.
    optimizer, tolerance = OPTIMIZERS["momentum"]

    def build(rate, activation):
        return ZOO[name](dropout=rate, activation=activation, num_classes=9)

    # One of the models with BatchNorm meets a short last batch.
    dataset = photos(44 if name == "mobilenet" else 32)
    task = jp.Task(
        lambda hp: build(hp.rate, jp.switch(hp.activation, ACTIVATIONS)),
        lambda hp: optimizer(hp.learning_rate),
        dataset,
        batch_size=16,
    )
    trials = [
        {"learning_rate": 0.01, "rate": 0.0, "activation": "relu"},
        {"learning_rate": 0.003, "rate": 0.3, "activation": "tanh"},
    ]
    alone = [
        train_alone(
            build(hp["rate"], ACTIVATIONS[hp["activation"]]),
            optimizer(hp["learning_rate"]),
            dataset.train,
            steps=6,
            batch_size=16,
            trial=i,
            train_flag="train",
        )
        for i, hp in enumerate(trials)
    ]
    for engine in ENGINES[:2]:
        results = jp.train(task, trials, steps=6, engine=engine)
        for result, (params, state, _) in zip(results, alone, strict=True):
            assert difference(result.params, params) <= tolerance, engine
            assert difference(result.model_state, state) <= tolerance, engine
