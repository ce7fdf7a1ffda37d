"""What a trained trial predicts, and what it is worth once exported."""

from __future__ import annotations

import json

import flax.linen as nn
import flax.traverse_util
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny import CNN, MLP, mlp_task, space

import jaxpack as jp


@pytest.fixture(scope="module")
def digits():
    """A part of the digits, their pixels from 0 to 16, to be standardised."""
    loaded = jp.data.load("digits")

    def raw(split):
        x = split[0] * (1 if loaded.std is None else loaded.std)
        return x + (0 if loaded.mean is None else loaded.mean), split[1]

    train, validation, test = map(raw, (loaded.train, loaded.validation, loaded.test))
    train, validation = ((x[:203], y[:203]) for x, y in (train, validation))
    return jp.data.Dataset.from_arrays(train, validation, test, standardize=True), test


@pytest.fixture(scope="module")
def trained(digits):
    task = jp.Task(
        lambda hp: Wide(hp.width, hp.rate),
        lambda hp: optax.adam(hp.learning_rate),
        digits[0],
        eval_batch_size=64,
    )
    dims = space(width=jp.choice(8, 12))
    scheduler = jp.Hyperband(3)
    return task, jp.sweep(task, dims, scheduler, keep=2, progress=False)


class Wide(nn.Module):
    width: int
    rate: float

    @nn.compact
    def __call__(self, x, *, train: bool = False):
        x = nn.Dense(self.width, use_bias=False)(x.reshape(len(x), -1))
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
        return nn.Dense(10)(nn.Dropout(self.rate, deterministic=not train)(x))


def accuracy(outputs, labels):
    return float(np.mean(np.argmax(outputs, -1) == labels))


def test_predictions_have_the_score_and_the_test_metrics(trained):
    task, result = trained
    data = task.dataset
    outputs = jp.predict(task, result.best, "validation")
    assert accuracy(outputs, data.validation[1]) == pytest.approx(result.best_score)
    outputs = jp.predict(task, result.best, "test")
    measured = accuracy(outputs, data.test[1])
    assert measured == pytest.approx(result.test_metrics["accuracy"])
    loss = optax.softmax_cross_entropy_with_integer_labels(outputs, data.test[1]).mean()
    assert float(loss) == pytest.approx(result.test_metrics["loss"], rel=1e-5)


@pytest.mark.parametrize("count", [1, 3, 64, 65, 200])
def test_new_inputs_are_standardised_and_those_of_splits_are_not(
    trained, digits, count
):
    task, result = trained
    best = result.best
    model = Wide(best.hparams.width, best.hparams.rate)
    variables = {"params": best.params, **best.model_state}
    expected = model.apply(variables, task.dataset.test[0][:count])
    for x in (task.dataset.test[0][:count], digits[1][0][:count]):
        outputs = jp.predict(task, best, x)
        assert outputs.shape == (count, 10) and isinstance(outputs, np.ndarray)
        assert np.allclose(outputs, expected, atol=1e-5)


def test_equal_calls_compile_nothing(trained, monkeypatch):
    task, result = trained
    jp.predict(task, result.best, "test")
    monkeypatch.setattr("jaxpack.executables._lower", None)  # It would raise.
    jp.predict(task, result.best, "test")


def test_outputs_may_be_a_tree(tiny_images):
    class Two(nn.Module):
        @nn.compact
        def __call__(self, x):
            return {"class": CNN()(x), "mean": x.mean((1, 2, 3))}

    def loss(outputs, labels):
        logits = outputs["class"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels)

    task = jp.Task(
        lambda hp: Two(),
        lambda hp: optax.sgd(hp.lr),
        tiny_images,
        loss=loss,
        metrics={},
    )
    (trial,) = jp.train(task, [{"lr": 0.1}], steps=1)
    outputs = jp.predict(task, trial, tiny_images.train[0])
    assert outputs["class"].shape == (50, 4)
    assert np.allclose(outputs["mean"], tiny_images.train[0].mean((1, 2, 3)), atol=1e-6)


def test_what_cannot_be_predicted_says_why(trained, tmp_path):
    task, result = trained
    stopped = next(t for t in result.trials if t.params is None)
    for call in (
        lambda trial: jp.predict(task, trial, "test"),
        lambda trial: jp.export(task, trial, tmp_path),
    ):
        with pytest.raises(ValueError, match=f"trial {stopped.trial_id} holds no wei"):
            call(stopped)
        with pytest.raises(ValueError, match="trial is a SweepResult; give"):
            call(result)
    with pytest.raises(ValueError, match="x is 'tests'; the dataset has the splits"):
        jp.predict(task, result.best, "tests")
    with pytest.raises(ValueError, match="an example of new x has the shape"):
        jp.predict(task, result.best, np.zeros((2, 3), np.float32))


def test_an_exported_trial_scores_the_same_without_jaxpack(trained, tmp_path):
    task, result = trained
    directory = jp.export(task, result.best, tmp_path / "exported")
    flat = np.load(directory / "weights.npz")
    variables = flax.traverse_util.unflatten_dict(dict(flat), sep="/")
    described = json.loads((directory / "trial.json").read_text())
    model = Wide(described["hparams"]["width"], 0.0)
    x, y = task.dataset.validation
    assert accuracy(model.apply(variables, x), y) == pytest.approx(result.best_score)
    assert described["score"] == result.best_score
    assert described["metrics"]["accuracy"] == result.best_score
    assert described["hparams"] == dict(result.best_hparams)
    assert np.array_equal(np.float32(described["mean"]), task.dataset.mean)
    assert np.array_equal(np.float32(described["std"]), task.dataset.std)
    names = described["variables"]
    assert names["params/Dense_0/kernel"]["dtype"] == "float32"
    assert set(names) == set(flat.keys())


def test_exporting_keeps_bfloat16_and_refuses_slashes(tiny_dataset, tmp_path):
    def init(key, hp, x):
        return {"params": {hp.name: jnp.full((8, 4), 0.3, jnp.bfloat16)}}

    def apply(variables, hp, x, *, train, key, mask):
        return x @ variables["params"][hp.name].astype(jnp.float32), {}

    task = jp.Task.from_functions(init, apply, lambda hp: optax.sgd(0.01), tiny_dataset)
    good, bad = jp.train(task, [{"name": "w"}, {"name": "a/b"}], steps=0)
    directory = jp.export(task, good, tmp_path)
    stored = np.load(directory / "weights.npz")["params/w"]
    described = json.loads((directory / "trial.json").read_text())
    assert described["variables"]["params/w"] == {"shape": [8, 4], "dtype": "bfloat16"}
    assert np.array_equal(stored.astype(good.params["w"].dtype), good.params["w"])
    with pytest.raises(ValueError, match="take the slashes out"):
        jp.export(task, bad, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="path is 3; it must be a path"):
        jp.export(task, good, 3)
    with pytest.raises(ValueError, match="which is a file"):
        jp.export(task, good, tmp_path / "file")


def test_the_winner_is_trained_again_on_all_there_is(tiny_dataset):
    merged = tiny_dataset.merged()
    assert (merged.num_train, merged.num_validation) == (73, 23)
    assert np.array_equal(merged.train[0][50:], tiny_dataset.validation[0])
    assert np.array_equal(merged.train[1][:50], tiny_dataset.train[1])
    assert merged.content_hash != tiny_dataset.content_hash
    assert not merged.train[0].flags.writeable
    task = mlp_task(merged)
    (trial,) = jp.train(task, [{"learning_rate": 0.1, "rate": 0.1}], epochs=2)
    assert trial.steps == 2 * 5
    model = MLP(rate=0.1)
    expected = model.apply({"params": trial.params}, tiny_dataset.train[0])
    outputs = jp.predict(task, trial, tiny_dataset.train[0])
    assert np.allclose(outputs, expected, atol=1e-5)
