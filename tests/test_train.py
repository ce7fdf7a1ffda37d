"""`jaxpack.train`: placement, isolation, evaluation, going on."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest
from reference import difference
from tiny import CNN, MLP, mlp_task

import jaxpack as jp

ENGINES = ("packed", "solo")


def trials(*learning_rates, first_seed=10):
    """Trials whose identity is their `seed`, not their place in the list."""
    return [
        {"learning_rate": lr, "rate": 0.3, "seed": first_seed + i}
        for i, lr in enumerate(learning_rates)
    ]


def same_bits(a, b):
    """Whether two results hold the same weights, moments and readings to the bit."""
    leaves = [(x.params, x.model_state, x.opt_state, x.key) for x in (a, b)]
    equal = jax.tree.map(
        lambda x, y: np.array_equal(x, y, equal_nan=x.dtype.kind == "f"), *leaves
    )
    return all(jax.tree.leaves(equal)) and repr(a.history) == repr(b.history)


def run(dataset, given, **options):
    options = {"epochs": 3, "workers": 1, "engine": "packed"} | options
    return jp.train(mlp_task(dataset), given, **options)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_result_does_not_depend_on_lane_or_neighbours(tiny_dataset, engine):
    given = trials(0.1, 0.03, 0.01, 0.003)
    straight = run(tiny_dataset, given, engine=engine)
    order = [2, 0, 3, 1]
    permuted = run(tiny_dataset, [given[i] for i in order], engine=engine)
    for place, i in enumerate(order):
        assert same_bits(straight[i], permuted[place])
    other = trials(0.5, 0.2, 0.4, first_seed=50)
    assert same_bits(
        straight[1], run(tiny_dataset, [*other, given[1]], engine=engine)[3]
    )
    twins = run(tiny_dataset, [given[1]] * 4, engine=engine)
    assert all(same_bits(straight[1], twin) for twin in twins)


def test_solo_is_the_same_to_the_bit_with_any_number_of_workers(tiny_dataset):
    given = trials(0.1, 0.03, 0.01)
    one = run(tiny_dataset, given, engine="solo", workers=1)
    two = run(tiny_dataset, given, engine="solo", workers=2)
    alone = run(tiny_dataset, given[:1], engine="solo", workers=1)
    assert all(map(same_bits, one, two))
    assert same_bits(one[0], alone[0])


def test_initial_states_are_the_same_to_the_bit_whatever_the_width(tiny_dataset):
    given = trials(0.1, 0.03, 0.01, 0.003, 0.02)
    results = [
        run(tiny_dataset, given, steps=0, epochs=None, engine=engine, max_lanes=lanes)
        for engine, lanes in (
            ("solo", None),
            ("packed", 1),
            ("packed", 2),
            ("packed", 8),
        )
    ]
    for other in results[1:]:
        assert all(map(same_bits, results[0], other))
    assert results[0][0].steps == 0
    kernels = [r.params["Dense_0"]["kernel"].tobytes() for r in results[0]]
    assert len(set(kernels)) == len(given)


def test_packs_of_other_widths_agree_within_tolerance(tiny_dataset):
    given = trials(0.1, 0.03, 0.01, 0.003, 0.02)
    widths = [run(tiny_dataset, given, max_lanes=lanes) for lanes in (1, 2, 3, 8)]
    for other in widths[1:]:
        for a, b in zip(widths[0], other, strict=True):
            assert difference(a.params, b.params) < 1e-5


@pytest.mark.parametrize("engine", ENGINES)
def test_a_trial_that_diverges_leaves_the_others_alone(tiny_dataset, engine):
    good = trials(0.1, 0.03, 0.01)
    spoiled = [*good, {"learning_rate": 1e30, "rate": 0.3, "seed": 99}]
    healthy = [*good, {"learning_rate": 0.02, "rate": 0.3, "seed": 99}]
    with_bad = run(tiny_dataset, spoiled, engine=engine)
    with_good = run(tiny_dataset, healthy, engine=engine)
    assert all(map(same_bits, with_bad[:3], with_good[:3]))
    bad = with_bad[3]
    assert bad.status == "FAILED"
    # The first step's loss is finite; its update is what breaks the weights.
    assert 1 <= bad.first_bad_step <= 3
    assert bad.steps == bad.first_bad_step + 1
    assert f"step {bad.first_bad_step}" in bad.reason
    assert with_bad[0].status == "COMPLETE" and with_bad[0].first_bad_step is None


@pytest.mark.parametrize("engine", ENGINES)
def test_a_trial_fails_by_its_loss_and_not_by_its_metric(tiny_dataset, engine):
    nan_metric = {"accuracy": lambda outputs, labels: outputs[:, 0] * np.nan}
    task = mlp_task(tiny_dataset, metrics=nan_metric)
    (result,) = jp.train(task, trials(0.1), epochs=1, engine=engine)
    assert result.status == "COMPLETE" and np.isnan(result.score)


@pytest.mark.parametrize("eval_batch_size", [1, 4, 10, 23, 500])
def test_evaluation_counts_every_example_once(tiny_dataset, eval_batch_size):
    task = mlp_task(tiny_dataset, eval_batch_size=eval_batch_size)
    (result,) = jp.train(task, trials(0.1), epochs=1, engine="solo")
    x, y = tiny_dataset.validation
    outputs = MLP().apply({"params": result.params}, x)
    loss = optax.softmax_cross_entropy_with_integer_labels(outputs, y).mean()
    row = result.history[-1]
    np.testing.assert_allclose(row["loss"], loss, rtol=1e-5)
    assert row["accuracy"] == pytest.approx(np.mean(np.argmax(outputs, -1) == y))


def test_weights_of_the_loss_and_metrics_count(tiny_dataset):
    def weigh(value, labels):
        return value, (labels == 1).astype("float32")

    def loss(outputs, labels):
        plain = optax.softmax_cross_entropy_with_integer_labels(outputs, labels)
        return weigh(plain, labels)

    metrics = {"accuracy": lambda o, y: weigh(jp.metrics.accuracy(o, y), y)}
    task = mlp_task(tiny_dataset, loss=loss, metrics=metrics, eval_batch_size=4)
    (result,) = jp.train(task, trials(0.1), epochs=3)
    x, y = tiny_dataset.validation
    right = np.argmax(MLP().apply({"params": result.params}, x), -1) == y
    assert result.score == pytest.approx(right[y == 1].mean())
    assert result.score == 1.0  # Only class 1 was trained for.
    assert right.mean() < 0.5


@pytest.mark.parametrize(
    "engine", ["packed", pytest.param("solo", marks=pytest.mark.slow)]
)
def test_a_result_goes_on_as_if_it_had_never_stopped(tiny_images, engine):
    task = jp.Task(
        lambda hp: CNN(batch_norm=True, rate=hp.rate),
        lambda hp: optax.adam(
            optax.cosine_decay_schedule(hp.learning_rate, hp.total_steps)
        ),
        tiny_images,
        batch_size=16,
    )
    options = {"engine": engine, "workers": 1, "horizon": 4}
    given = [
        {"learning_rate": 0.01, "rate": 0.3},
        {"learning_rate": 0.003, "rate": 0.1},
    ]
    straight = jp.train(task, given, epochs=4, evaluate_every=2, **options)
    half = jp.train(task, given, epochs=2, **options)
    rest = jp.train(task, half, epochs=4, **options)
    for a, b, c in zip(straight, rest, half, strict=True):
        assert same_bits(a, b) or a.history[-1:] == b.history
        assert difference(a.params, b.params) == 0
        assert difference(a.opt_state, b.opt_state) == 0
        assert difference(a.model_state, b.model_state) == 0
        assert (c.steps, b.steps) == (8, 16)
        assert difference(a.params, c.params) > 0


def test_going_on_is_refused_where_it_cannot_be(tiny_dataset):
    task = mlp_task(tiny_dataset)
    (result,) = jp.train(task, trials(0.1), epochs=2)
    with pytest.raises(ValueError, match="has trained for 8 steps, more than the 4"):
        jp.train(task, [result], epochs=1)
    wider = jp.Task(
        lambda hp: MLP(width=17, rate=hp.rate), task.functions.optimizer, tiny_dataset
    )
    with pytest.raises(ValueError, match=r"is float32\[16\], the task's is"):
        jp.train(wider, [result], epochs=9)


def test_rows_of_history(tiny_dataset):
    (result,) = run(tiny_dataset, trials(0.1), evaluate_every=1)
    assert [row["epochs"] for row in result.history] == [1, 2, 3]
    assert [row["steps"] for row in result.history] == [4, 8, 12]
    assert result.history[0]["train_loss"] > result.history[-1]["train_loss"] > 0
    (in_steps,) = run(tiny_dataset, trials(0.1), epochs=None, steps=6)
    assert in_steps.steps == 6 and in_steps.history[-1]["epochs"] == 1.5


def test_train_loss_is_the_mean_over_the_epoch(tiny_dataset):
    task = mlp_task(tiny_dataset, batch_size=50)
    hparams = {"learning_rate": 0.1, "rate": 0.0}
    start, one = (
        jp.train(task, [hparams], steps=steps, engine="solo")[0] for steps in (0, 1)
    )
    x, y = tiny_dataset.train
    outputs = MLP().apply({"params": start.params}, x)
    loss = optax.softmax_cross_entropy_with_integer_labels(outputs, y).mean()
    np.testing.assert_allclose(one.history[-1]["train_loss"], loss, rtol=1e-5)


def test_a_thousand_tiny_trials_all_learn(tiny_dataset):
    given = [{"learning_rate": 0.1, "rate": 0.0}] * 1000
    task = mlp_task(tiny_dataset)
    before = jp.train(task, given, steps=0, engine="packed", max_lanes=256)
    after = jp.train(task, given, epochs=3, engine="packed", max_lanes=256)
    for a, b in zip(before, after, strict=True):
        assert b.history[-1]["loss"] < a.history[-1]["loss"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "exactly one"),
        ({"epochs": 1, "steps": 1}, "exactly one"),
        ({"epochs": -1}, "epochs is -1"),
        ({"epochs": 1.5}, "epochs is 1.5"),
        ({"epochs": [1, 2, 3]}, "3 numbers for 2 trials"),
        ({"epochs": 1, "engine": "fast"}, "engine is 'fast'"),
        ({"epochs": 1, "seed": -1}, "seed is -1"),
        ({"epochs": 1, "max_lanes": 0}, "max_lanes is 0"),
        ({"epochs": 1, "workers": 0}, "workers is 0"),
        ({"epochs": 1, "metric": "f1"}, "metric is 'f1'"),
        ({"epochs": 1, "mode": "up"}, "mode is 'up'"),
        ({"epochs": 1, "evaluate_every": 0}, "evaluate_every is 0"),
        ({"epochs": "12"}, "epochs is '12'"),
        ({"epochs": True}, "epochs is True"),
        ({"epochs": np.ones((2, 2), int)}, "epochs is array"),
        ({"epochs": 2**30}, f"are {2**32} steps; a trial can have"),
        ({"epochs": 1, "horizon": 2.0}, "horizon is 2.0"),
        ({"epochs": 1, "seed": [1]}, r"seed is \[1\]"),
        ({"epochs": 1, "seed": True}, "seed is True"),
        ({"epochs": 1, "max_lanes": 2.0}, "max_lanes is 2.0"),
        ({"epochs": 1, "workers": 10**6}, "workers is 1000000; .* < 1025"),
        ({"epochs": 1, "engine": ["solo"]}, r"engine is \['solo'\]"),
        ({"epochs": 1, "metric": 3}, "metric is 3; it must be 'accuracy' or 'loss'"),
        ({"epochs": 1, "evaluate_every": True}, "evaluate_every is True"),
        ({"epochs": 1, "patience": 2}, "evaluated at their end only"),
        ({"epochs": 1, "patience": 1.5, "evaluate_every": 1}, "patience is 1.5"),
    ],
)
def test_bad_arguments_are_named(tiny_dataset, options, message):
    with pytest.raises(ValueError, match=message):
        jp.train(mlp_task(tiny_dataset), trials(0.1, 0.2), **options)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([{"learning_rate": float("nan"), "rate": 0.1}], "not finite"),
        ([{"learning_rate": [1], "rate": 0.1}], "values are"),
        ([{"learning_rate": 1.0, "rate": 0.1, "batch_size": 51}], "batch_size is 51"),
        ([{"learning_rate": 1.0, "rate": 0.1, "seed": -2}], "seed is -2"),
        ({"learning_rate": 1.0}, "give a list"),
        ("ab", "trials is of type str; give a list"),
        (3, "trials is of type int; give a list"),
        ([3], r"trials\[0\] is 3; it must map"),
        ([{"learning_rate": 1.0, "rate": 0.1, "batch_size": 0}], "batch_size is 0"),
        ([{"learning_rate": 1.0, "rate": 0.1, "seed": 2**32}], "seed is 4294967296"),
        ([{"learning_rate": 1.0, "rate": 0.1, "seed": 1.5}], "seed is 1.5"),
        ([{3: 1.0}], "3 cannot name an hparam"),
    ],
)
def test_bad_trials_are_named(tiny_dataset, given, message):
    with pytest.raises(ValueError, match=message):
        jp.train(mlp_task(tiny_dataset), given, epochs=1)


def test_a_loss_that_drops_the_examples_is_named(tiny_dataset):
    def loss(outputs, labels):
        return optax.softmax_cross_entropy_with_integer_labels(outputs, labels).mean()

    with pytest.raises(ValueError, match="drop the mean"):
        jp.train(mlp_task(tiny_dataset, loss=loss), trials(0.1), epochs=1)


def test_going_on_with_more_evaluations(tiny_dataset):
    straight = run(tiny_dataset, trials(0.1), epochs=4, evaluate_every=1)
    half = run(tiny_dataset, trials(0.1), epochs=2, evaluate_every=1)
    rest = run(tiny_dataset, half, epochs=4, evaluate_every=1)
    assert same_bits(straight[0], rest[0])
    assert [row["epochs"] for row in rest[0].history] == [1, 2, 3, 4]
    (there,) = run(tiny_dataset, rest, epochs=4, evaluate_every=1)
    assert there.steps == 16 and difference(there.params, rest[0].params) == 0


def test_going_on_keeps_the_seed(tiny_dataset):
    half = run(tiny_dataset, trials(0.1), epochs=2, seed=4)
    straight = run(tiny_dataset, trials(0.1), epochs=4, seed=4)
    rest = run(tiny_dataset, half, epochs=4)
    assert difference(straight[0].params, rest[0].params) == 0
    with pytest.raises(ValueError, match="trained with seed 4"):
        run(tiny_dataset, half, epochs=4, seed=0)


def test_train_loss_counts_the_weights(tiny_dataset):
    def loss(outputs, labels):
        value = optax.softmax_cross_entropy_with_integer_labels(outputs, labels)
        return value, (labels == 1).astype("float32")

    task = mlp_task(tiny_dataset, loss=loss)
    frozen = [{"learning_rate": 0.0, "rate": 0.0}]
    (result,) = jp.train(task, frozen, epochs=1)
    x, y = tiny_dataset.train
    value, weight = loss(MLP().apply({"params": result.params}, x), y)
    expected = float((value * weight).sum() / weight.sum())
    assert result.history[-1]["train_loss"] == pytest.approx(expected, rel=1e-5)


def test_no_weight_at_all_is_no_score(tiny_dataset):
    def loss(outputs, labels):
        value = optax.softmax_cross_entropy_with_integer_labels(outputs, labels)
        return value, np.zeros(len(labels), "float32")

    (result,) = jp.train(mlp_task(tiny_dataset, loss=loss), trials(0.1), epochs=1)
    assert result.status == "FAILED" and "validation loss" in result.reason


@pytest.mark.parametrize("engine", ENGINES)
def test_plain_functions_and_structured_data(engine):
    rng = np.random.default_rng(0)
    x = {
        "a": rng.normal(size=(50, 3)).astype("f4"),
        "b": (rng.normal(size=50).astype("f4"),),
    }
    y = x["a"] @ np.float32([[1.0], [2.0], [3.0]])
    dataset = jp.data.Dataset.from_arrays(train=(x, y), validation=(x, y))

    def init(key, hp, x):
        return {"params": {"w": jax.numpy.zeros((3, 1))}}

    def apply(variables, hp, x, *, train, key, mask):
        return x["a"] @ variables["params"]["w"], {}

    def loss(outputs, targets):
        return ((outputs - targets) ** 2).mean(-1)

    task = jp.Task.from_functions(
        init, apply, lambda hp: optax.sgd(hp.lr), dataset, loss=loss, metrics={}
    )
    good, bad = jp.train(task, [{"lr": 0.1}, {"lr": 0.0}], epochs=30, engine=engine)
    assert good.score < 1e-3 < bad.score
    np.testing.assert_allclose(good.params["w"][:, 0], [1, 2, 3], atol=0.05)
    no_params = jp.Task.from_functions(
        lambda *_: {}, apply, task.functions.optimizer, dataset, loss=loss, metrics={}
    )
    with pytest.raises(ValueError, match="without 'params'"):
        jp.train(no_params, [{"lr": 0.1}], epochs=1)


@pytest.mark.parametrize("name", ["steps", "loss", "score"])
def test_metrics_may_not_take_other_names(tiny_dataset, name):
    with pytest.raises(ValueError, match=f"metrics holds '{name}'"):
        mlp_task(tiny_dataset, metrics={name: jp.metrics.accuracy})
