"""Programs are shared by what computes the same, and by nothing else."""

from __future__ import annotations

import contextlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from reference import difference, train_alone
from tiny import MLP, mlp_task

import jaxpack as jp
from jaxpack import jaxprs

HP = {"learning_rate": 0.1, "rate": 0.0}


def scores(dataset, **options):
    """The metrics of one trial of the tiny task."""
    (result,) = jp.train(mlp_task(dataset, **options), [HP], epochs=1)
    return result.history[-1]


def constant(value):
    def metric(outputs, labels):
        return jnp.full(len(labels), value)

    return metric


def flat(function, *args):
    return jaxprs.fingerprint([jaxprs.flatten(jax.make_jaxpr(function)(*args))])


@pytest.mark.parametrize("wrap", ["map", "cond", "remat", "scan"])
def test_constants_of_inner_functions_count(wrap):
    def make(table):
        inner = jax.jit(lambda x: x * table)
        return {
            "map": lambda x: jax.lax.map(inner, x),
            "cond": lambda x: jax.lax.cond(x.sum() > 0, inner, lambda x: x, x[0]),
            "remat": jax.checkpoint(lambda x: inner(x[0])),
            "scan": lambda x: jax.lax.scan(lambda c, y: (c, inner(y)), 0, x),
        }[wrap]

    x = np.ones((2, 3), np.float32)
    tables = [np.arange(3, dtype=np.float32), np.arange(3, dtype=np.float32) + 1]
    assert flat(make(tables[0]), x) == flat(make(tables[0].copy()), x)
    assert flat(make(tables[0]), x) != flat(make(tables[1]), x)


def test_callbacks_count_by_what_they_call():
    def make(factor):
        def host(x):
            return np.asarray(x) * factor

        aval = jax.ShapeDtypeStruct((3,), np.float32)
        return lambda xs: jax.lax.map(lambda x: jax.pure_callback(host, aval, x), xs)

    x = np.ones((2, 3), np.float32)
    assert flat(make(1.0), x) != flat(make(100.0), x)


def test_names_of_metrics_count(tiny_dataset):
    first = scores(tiny_dataset, metrics={"a": constant(1.0), "b": constant(2.0)})
    second = scores(tiny_dataset, metrics={"b": constant(1.0), "c": constant(2.0)})
    assert (first["a"], first["b"]) == (1.0, 2.0)
    assert (second["b"], second["c"]) == (1.0, 2.0)


def test_the_form_of_the_state_counts(tiny_dataset):
    def train(optimizer):
        task = jp.Task(lambda hp: MLP(), optimizer, tiny_dataset)
        return jp.train(task, [{"lr": 0.1}], epochs=1)[0].opt_state

    plain = train(lambda hp: optax.sgd(hp.lr))
    chained = train(lambda hp: optax.chain(optax.sgd(hp.lr), optax.identity()))
    assert jax.tree.structure(plain) != jax.tree.structure(chained)


class Masked(nn.Module):
    """Another network where there is a mask, or at one batch size."""

    by: str
    factor: float

    @nn.compact
    def __call__(self, x, *, mask=None):
        special = mask is not None if self.by == "mask" else len(x) == 23
        return nn.Dense(4)(x) * (self.factor if special else 1.0)


@pytest.mark.parametrize("by", ["mask", "size"])
def test_what_evaluation_alone_computes_counts(tiny_dataset, by):
    losses = []
    for factor in (1.0, 50.0):
        task = jp.Task(
            lambda hp, factor=factor: Masked(by, factor),
            lambda hp: optax.sgd(hp.lr),
            tiny_dataset,
            batch_size=25,  # No short batch, so no mask in training.
        )
        (result,) = jp.train(task, [{"lr": 0.01}], epochs=1)
        losses.append(result.history[-1]["loss"])
    assert losses[1] > 2 * losses[0]


def test_a_true_is_not_a_one(tiny_dataset):
    def optimizer(hp):
        return optax.sgd(0.1 if type(hp.n) is bool else 0.01)

    task = jp.Task(lambda hp: MLP(), optimizer, tiny_dataset)
    one, true = jp.train(task, [{"n": 1, "seed": 0}, {"n": True, "seed": 0}], epochs=1)
    assert difference(one.params, true.params) > 1e-3


def test_a_setting_in_force_reaches_the_workers(tiny_dataset):
    losses = []
    for partitionable in (True, False):
        with jax.threefry_partitionable(partitionable):
            losses.append(scores(tiny_dataset)["loss"])
            params, _, _ = train_alone(
                MLP(),
                optax.sgd(0.1, momentum=0.9),
                tiny_dataset.train,
                steps=0,
                batch_size=16,
                train_flag="train",
            )
            (start,) = jp.train(mlp_task(tiny_dataset), [HP], steps=0)
            assert difference(start.params, params) < 1e-6
    assert losses[0] != losses[1]
    assert scores(tiny_dataset)["loss"] == losses[0]


def test_a_caught_refusal_is_found_out(tiny_dataset):
    table = {"relu": nn.relu, "tanh": nn.tanh}

    class Net(nn.Module):
        activation: object

        @nn.compact
        def __call__(self, x):
            return nn.Dense(4)(self.activation(nn.Dense(8)(x)))

    def model(hp):
        with contextlib.suppress(TypeError):
            return Net(table[hp.activation])
        return Net(nn.relu)

    task = jp.Task(model, lambda hp: optax.sgd(0.1), tiny_dataset)
    space = jp.Space(activation=jp.choice("relu", "tanh"))
    (finding,) = jp.explain(task, space).findings
    assert not finding.per_lane


def test_an_overflow_of_traced_integers_is_found_out(tiny_dataset):
    class Net(nn.Module):
        factor: object

        @nn.compact
        def __call__(self, x):
            return nn.Dense(4)(x) * jnp.float32(self.factor)

    def model(hp):
        return Net(hp.k * hp.k * 1e-6)

    task = jp.Task(model, lambda hp: optax.sgd(0.1), tiny_dataset)
    small = jp.explain(task, jp.Space(k=jp.choice(100, 200))).findings
    large = jp.explain(task, jp.Space(k=jp.choice(100, 100_000))).findings
    assert small[0].per_lane and not large[0].per_lane


@pytest.mark.parametrize("where", ["loss", "model"])
def test_mixing_is_found_whatever_the_first_rows_are(where):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(50, 8)).astype(np.float32)
    x[:4] = x[0]
    y = np.arange(50, dtype=np.int32) % 4
    dataset = jp.data.Dataset.from_arrays(train=(x, y), validation=(x, y))

    class Centred(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(4)(x)
            return x - x.mean(0, keepdims=True) if where == "model" else x

    def loss(outputs, labels):
        if where == "loss":
            outputs = outputs - outputs.mean(0, keepdims=True)
        return optax.softmax_cross_entropy_with_integer_labels(outputs, labels)

    task = jp.Task(
        lambda hp: Centred(),
        lambda hp: optax.sgd(hp.lr),
        dataset,
        loss=loss,
        batch_size=16,
    )
    (result,) = jp.train(task, [{"lr": 0.1}], epochs=2)
    params, _, _ = train_alone(
        Centred(), optax.sgd(0.1), dataset.train, steps=8, batch_size=16, loss=loss
    )
    assert difference(result.params, params) < 1e-5
