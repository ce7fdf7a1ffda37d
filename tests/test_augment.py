"""Augmentation: inside the program, for every lane, in training alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from reference import difference, trial_key
from tiny import MLP

import jaxpack as jp
from jaxpack.data import deck


def noisy(key, x, hp):
    return x + hp.noise * jax.random.normal(key, x.shape)


def make_task(dataset, augment=noisy, **options):
    return jp.Task(
        lambda hp: MLP(),
        lambda hp: optax.sgd(hp.learning_rate),
        dataset,
        augment=augment,
        **({"batch_size": 25} | options),
    )


def train_alone(dataset, trial, hp, steps, seed):
    """A plain loop, the keys by the documented rule."""
    model, (x, y) = MLP(), dataset.train
    key = trial_key(seed, trial)
    params = jax.jit(model.init)(jax.random.fold_in(key, 0), x[:1])["params"]

    @jax.jit
    def step(params, key, x, y):
        x = x + hp["noise"] * jax.random.normal(key, x.shape)

        def loss_of(params):
            outputs = model.apply({"params": params}, x)
            return optax.softmax_cross_entropy_with_integer_labels(outputs, y).mean()

        grads = jax.grad(loss_of)(params)
        return jax.tree.map(lambda p, g: p - hp["learning_rate"] * g, params, grads)

    for i in range(steps):
        rows = deck(seed, 50, 1, i // 2)[0][i % 2 * 25 :][:25]
        augment_key = jax.random.fold_in(jax.random.fold_in(key, 2), i)
        params = step(params, augment_key, x[rows], y[rows])
    return params


@pytest.mark.parametrize("engine", ["packed", "solo", "fused"])
def test_lanes_equal_trials_alone(tiny_dataset, engine):
    trials = [{"learning_rate": 0.1, "noise": noise} for noise in (0.0, 0.5, 2.0)]
    task = make_task(tiny_dataset)
    results = jp.train(task, trials, steps=10, seed=4, engine=engine)
    for i, (result, hp) in enumerate(zip(results, trials, strict=True)):
        alone = train_alone(tiny_dataset, i, hp, 10, seed=4)
        assert difference(result.params, alone) < 1e-5
        # Evaluations see no noise.
        outputs = MLP().apply({"params": alone}, tiny_dataset.validation[0])
        hits = np.mean(np.argmax(outputs, -1) == tiny_dataset.validation[1])
        assert result.score == pytest.approx(hits)


def test_its_hparams_are_per_lane_where_they_can_be(tiny_dataset):
    def augment(key, x, hp):
        return noisy(key, x, hp) * (1.0 if hp.kind == "plain" else 2.0)

    space = jp.Space(
        learning_rate=jp.log_uniform(1e-3, 1e-1),
        noise=jp.uniform(0.0, 1.0),
        kind=jp.choice("plain", "double"),
    )
    plan = jp.explain(make_task(tiny_dataset, augment), space)
    per_lane = {finding.name: finding.per_lane for finding in plan.findings}
    assert per_lane == {"learning_rate": True, "noise": True, "kind": False}
    assert "test_augment.py" in plan.findings[1].line


@pytest.mark.slow
def test_tasks_that_differ_in_it_share_no_program(tiny_dataset):
    hp = [{"learning_rate": 0.1}]
    tasks = [
        make_task(tiny_dataset, lambda key, x, hp, sign=sign: sign * x)
        for sign in (1.0, -1.0)
    ]
    (a,), (b,) = (jp.train(task, hp, steps=2) for task in tasks)
    assert difference(a.params, b.params) > 1e-3
    (none,) = jp.train(make_task(tiny_dataset, None), hp, steps=2)
    assert difference(a.params, none.params) < 1e-6


def test_one_that_mixes_examples_sees_no_padding(tiny_dataset):
    def mixing(key, x, hp):
        return 0.5 * x + 0.5 * jnp.roll(x, 1, axis=0)

    hp = [{"learning_rate": 0.1}]
    # Batches of 16 of 50 leave a short one of 2.
    (trial,) = jp.train(make_task(tiny_dataset, mixing, batch_size=16), hp, epochs=2)
    params = jax.jit(MLP().init)(
        jax.random.fold_in(trial_key(0, 0), 0), tiny_dataset.train[0][:1]
    )["params"]
    x, y = tiny_dataset.train

    @jax.jit
    def step(params, x, y):
        def loss_of(params):
            outputs = MLP().apply({"params": params}, mixing(None, x, None))
            return optax.softmax_cross_entropy_with_integer_labels(outputs, y).mean()

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss_of)(params))

    for i in range(8):
        rows = deck(0, 50, 1, i // 4)[0][i % 4 * 16 :][:16]
        params = step(params, x[rows], y[rows])
    assert difference(trial.params, params) < 1e-5


@pytest.mark.parametrize(
    ("augment", "message"),
    [
        (lambda key, x, hp: x[:, :4], r"augment turned inputs of float32\[25, 8\] int"),
        (lambda key, x, hp: x > 0, "structure, shapes and dtypes"),
        (lambda key, x, hp: {"x": x}, "structure, shapes and dtypes"),
    ],
)
def test_it_keeps_the_form_of_the_inputs(tiny_dataset, augment, message):
    hp = [{"learning_rate": 0.1}]
    with pytest.raises(ValueError, match=message):
        jp.train(make_task(tiny_dataset, augment), hp, steps=1)
    with pytest.raises(ValueError, match="augment is 'flip'; it must be a function"):
        make_task(tiny_dataset, "flip")
