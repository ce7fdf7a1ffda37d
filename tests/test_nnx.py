"""Models of `flax.nnx`: every lane equals a plain loop of nnx."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest
from flax import nnx, traverse_util
from reference import difference, trial_key

import jaxpack as jp
from jaxpack.data import deck


class Net(nnx.Module):
    """Convolution, BatchNorm, and two dropouts of one shape."""

    def __init__(self, width, rate, rngs):
        self.conv = nnx.Conv(1, width, (3, 3), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.hidden = nnx.Linear(width, 8, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.again = nnx.Dropout(rate, rngs=rngs)
        self.out = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.conv(x))).mean((1, 2))
        x = self.again(self.dropout(nnx.relu(self.hidden(x))))
        return self.out(x)


def train_alone(model, tx, data, *, steps, batch_size, seed):
    """A plain nnx training loop; returns the model."""
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    model.train()

    @nnx.jit
    def step(model, optimizer, x, y):
        def loss_of(model):
            return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()

        optimizer.update(model, nnx.grad(loss_of)(model))

    x, y = data
    per_epoch = -(-len(x) // batch_size)
    for i in range(steps):
        order = deck(seed, len(x), 1, i // per_epoch)[0]
        rows = order[i % per_epoch * batch_size :][:batch_size]
        step(model, optimizer, x[rows], y[rows])
    return model


def arrays(model, kind):
    """A model's variables of one kind as nested dicts of arrays."""
    flat = traverse_util.flatten_dict(nnx.to_pure_dict(nnx.state(model, kind)))
    return traverse_util.unflatten_dict(
        {tuple(map(str, k)): v for k, v in flat.items()}
    )


def make_task(dataset, **options):
    return jp.Task.from_nnx(
        lambda hp, rngs: Net(hp.width, hp.rate, rngs),
        lambda hp: optax.sgd(hp.learning_rate, momentum=0.9),
        dataset,
        batch_size=16,
        **options,
    )


TRIALS = [
    {"learning_rate": 0.05, "rate": 0.0, "width": 4},
    {"learning_rate": 0.02, "rate": 0.3, "width": 4},
    {"learning_rate": 0.01, "rate": 0.6, "width": 4},
]


@pytest.fixture(scope="module")
def alone(tiny_images):
    """Each trial in a loop of its own, its short batches at their true size."""
    models = []
    for i, hp in enumerate(TRIALS):
        rngs = nnx.Rngs(jax.random.fold_in(trial_key(5, i), 0))
        models.append(
            train_alone(
                Net(hp["width"], hp["rate"], rngs),
                optax.sgd(hp["learning_rate"], momentum=0.9),
                tiny_images.train,
                steps=12,
                batch_size=16,
                seed=5,
            )
        )
    return models


@pytest.mark.parametrize(
    "engine", ["packed", "solo", pytest.param("fused", marks=pytest.mark.slow)]
)
def test_lanes_equal_a_plain_loop(tiny_images, alone, engine):
    task = make_task(tiny_images)
    results = jp.train(task, TRIALS, steps=12, engine=engine, seed=5)
    for result, model in zip(results, alone, strict=True):
        state = result.model_state["state"]
        assert difference(result.params, arrays(model, nnx.Param)) < 1e-5
        norm = arrays(model, nnx.BatchStat)["norm"]
        assert difference(state["norm"], norm) < 1e-5
        counts = arrays(model, nnx.RngCount)
        for name in ("dropout", "again"):
            count = counts[name]["rngs"]["count"]
            assert state[name]["rngs"]["count"] == count
        model.eval()
        x, y = tiny_images.validation
        hits = np.mean(np.argmax(model(x), -1) == y)
        assert result.score == pytest.approx(hits)
        assert np.allclose(jp.predict(task, result, x), model(x), atol=1e-4)


def test_rates_and_learning_rates_are_per_lane_and_sizes_static(tiny_images):
    space = jp.Space(
        learning_rate=jp.log_uniform(1e-3, 1e-1),
        rate=jp.uniform(0.0, 0.5),
        width=jp.choice(4, 6),
    )
    plan = jp.explain(make_task(tiny_images), space)
    per_lane = {finding.name: finding.per_lane for finding in plan.findings}
    assert per_lane == {"learning_rate": True, "rate": True, "width": False}
    assert len(plan.packs) == 2


def test_a_trial_goes_on_as_if_it_had_not_stopped(tiny_images):
    task = make_task(tiny_images)
    whole = jp.train(task, TRIALS, steps=6, seed=5, engine="packed")
    half = jp.train(task, TRIALS, steps=3, horizon=6, seed=5, engine="packed")
    rest = jp.train(task, half, steps=6, engine="packed")
    for a, b in zip(whole, rest, strict=True):
        assert difference(a.params, b.params) == 0
        assert difference(a.model_state, b.model_state) == 0


def test_the_weights_go_back_into_a_model_built_anew(tiny_images, tmp_path):
    task = make_task(tiny_images)
    (trial,) = jp.train(task, TRIALS[1:2], steps=5)
    x = tiny_images.validation[0]
    flat = dict(np.load(jp.export(task, trial, tmp_path) / "weights.npz"))
    exported = traverse_util.unflatten_dict(flat, sep="/")
    for params, norm in (
        (trial.params, trial.model_state["state"]["norm"]),
        (exported["params"], exported["state"]["norm"]),
    ):
        model = Net(4, 0.3, nnx.Rngs(0))
        for kind, values in ((nnx.Param, params), (nnx.BatchStat, {"norm": norm})):
            state = nnx.state(model, kind)
            nnx.replace_by_pure_dict(state, values)
            nnx.update(model, state)
        model.eval()
        assert np.allclose(model(x), jp.predict(task, trial, x), atol=1e-5)


class Listed(nnx.Module):
    """Layers in a list, a flag of its own, and an intermediate result."""

    def __init__(self, rngs):
        layers = [nnx.Linear(8, 8, rngs=rngs) for _ in range(11)]
        self.layers = nnx.List(layers) if hasattr(nnx, "List") else layers
        self.out = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x, *, train):
        for layer in self.layers:
            x = nnx.tanh(layer(x))
        self.features = nnx.Intermediate(x)
        return self.out(x) * (1.0 if train else 0.0)


@pytest.mark.slow
def test_lists_flags_and_intermediate_results(tiny_dataset):
    task = jp.Task.from_nnx(
        lambda hp, rngs: Listed(rngs), lambda hp: optax.adam(hp.lr), tiny_dataset
    )
    (trial,) = jp.train(task, [{"lr": 0.01}], epochs=3)
    model = Listed(nnx.Rngs(jax.random.fold_in(trial_key(0, 0), 0)))
    (start,) = jp.train(task, [{"lr": 0.01}], steps=0)
    assert difference(start.params, arrays(model, nnx.Param)) < 1e-6
    assert set(trial.params["layers"]) == set(map(str, range(11)))
    assert trial.history[-1]["train_loss"] < 1.2  # Trained with the flag,
    assert trial.history[-1]["loss"] == pytest.approx(np.log(4))  # judged without.


def test_what_is_no_nnx_module_is_refused(tiny_dataset):
    task = jp.Task.from_nnx(
        lambda hp, rngs: jp.models.MLP(4), lambda hp: optax.sgd(0.1), tiny_dataset
    )
    with pytest.raises(ValueError, match=r"must return a flax\.nnx\.Module"):
        jp.train(task, [{"n": 1}], steps=1)
    task = jp.Task(
        lambda hp: Listed(nnx.Rngs(0)), lambda hp: optax.sgd(0.1), tiny_dataset
    )
    with pytest.raises(ValueError, match=r"for flax\.nnx there is jaxpack\.Task\.from"):
        jp.train(task, [{"n": 1}], steps=1)
