"""The examples run, learn, and compute what their words say."""

from __future__ import annotations

import importlib

import jax
import numpy as np
import optax
import pytest

import jaxpack as jp
from experiments.examples import language_model, multi_label, regression
from jaxpack.data import deck

# Each with how long its best trial trains, and what it then has to reach.
EXAMPLES = {
    "regression": (9, lambda best: best.score < 10),
    "language_model": (3, lambda best: best.score > 0.4),
    "multi_label": (3, lambda best: best.score > 0.5),
    "nnx_augmented": (3, lambda best: best.score > 0.7),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_runs_and_learns(name, capsys):
    max_resource, learnt = EXAMPLES[name]
    module = importlib.import_module(f"experiments.examples.{name}")
    result = module.main(max_resource)
    assert learnt(result.best), result.best
    assert "TrialResult(" in capsys.readouterr().out
    static = {f.name for f in result.plan.findings if not f.per_lane}
    assert static == ({"width"} if name == "language_model" else set())


@pytest.mark.slow
def test_tokens_count_once_whatever_the_sentence():
    task = language_model.make_task()
    hp = {"learning_rate": 0.01, "dropout": 0.0, "width": 16}
    (trial,) = jp.train(task, [hp], epochs=1)
    x, y = task.dataset.validation
    logits = jp.predict(task, trial, x)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
    real = y > 0
    assert len(np.unique(real.sum(1))) > 3
    row = trial.history[-1]
    assert row["loss"] == pytest.approx(float(losses[real].mean()), rel=1e-5)
    hits = (logits.argmax(-1) == y)[real].mean()
    assert row["token_accuracy"] == pytest.approx(hits, rel=1e-5)
    # Training weighs tokens alike, too: the first step's loss says so.
    model = language_model.Model(16, 0.0)
    (start,) = jp.train(task, [hp], steps=0)
    (first,) = jp.train(task, [hp], steps=1)
    rows = deck(0, len(task.dataset.train[0]), 1)[0][: task.batch_size]
    x, y = (split[rows] for split in task.dataset.train)
    logits = jax.jit(model.apply)({"params": start.params}, x)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
    expected = float(losses[y > 0].mean())
    assert first.history[-1]["train_loss"] == pytest.approx(expected, rel=1e-5)


def test_the_likelihood_and_the_error_are_what_they_are_called():
    task = regression.make_task()
    (trial,) = jp.train(task, [{"learning_rate": 0.01, "floor": 0.5}], epochs=2)
    mean, raw = jp.predict(task, trial, "validation").T.astype(float)
    y = task.dataset.validation[1]
    deviation = 0.5 + np.log1p(np.exp(raw))
    density = np.exp(-0.5 * ((y - mean) / deviation) ** 2) / deviation
    row = trial.history[-1]
    assert row["loss"] == pytest.approx(-np.log(density).mean(), rel=1e-4)
    assert row["mse"] == pytest.approx(((y - mean) ** 2).mean(), rel=1e-4)
    assert trial.score == row["mse"]


def test_all_labels_have_to_be_right():
    task = multi_label.make_task()
    (trial,) = jp.train(task, [{"learning_rate": 0.1, "dropout": 0.1}], epochs=2)
    right = (jp.predict(task, trial, "validation") > 0) == task.dataset.validation[1]
    row = trial.history[-1]
    assert row["exact_match_accuracy"] == pytest.approx(right.all(1).mean(), rel=1e-5)
    assert row["label_accuracy"] == pytest.approx(right.mean(), rel=1e-5)
    assert row["exact_match_accuracy"] < row["label_accuracy"]
