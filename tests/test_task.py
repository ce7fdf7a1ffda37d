"""A task's loss and metrics may depend on a trial's hparams."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from reference import difference, train_alone
from tiny import MLP

import jaxpack as jp

SMOOTHINGS = (0.0, 0.1, 0.4)


def smoothed(outputs, labels, smoothing):
    targets = optax.smooth_labels(jax.nn.one_hot(labels, 4), smoothing)
    return optax.softmax_cross_entropy(outputs, targets)


def third(outputs, labels, hparams):
    return smoothed(outputs, labels, hparams.label_smoothing)


def keyword(outputs, labels, *, hp):
    return smoothed(outputs, labels, hp.label_smoothing)


def named(outputs, labels, axis=-1, hp=None):
    assert axis == -1
    return smoothed(outputs, labels, hp.label_smoothing)


def task_of(dataset, loss, **options):
    return jp.Task(
        lambda hp: MLP(),
        lambda hp: optax.sgd(hp.learning_rate, momentum=0.9),
        dataset,
        loss=loss,
        batch_size=16,
        **options,
    )


def trials():
    return [{"learning_rate": 0.05, "label_smoothing": s} for s in SMOOTHINGS]


@pytest.mark.parametrize("engine", ["packed", "solo"])
@pytest.mark.parametrize("loss", [third, keyword, named])
def test_a_smoothing_in_the_loss_is_that_of_its_trial(tiny_dataset, loss, engine):
    task = task_of(tiny_dataset, loss)
    results = jp.train(task, trials(), steps=20, engine=engine)
    for i, (smoothing, result) in enumerate(zip(SMOOTHINGS, results, strict=True)):
        closed_over = functools.partial(smoothed, smoothing=smoothing)
        params, _, _ = train_alone(
            MLP(),
            optax.sgd(0.05, momentum=0.9),
            tiny_dataset.train,
            steps=20,
            batch_size=16,
            trial=i,
            train_flag="train",
            loss=closed_over,
        )
        assert difference(result.params, params) < 1e-5
        x, y = tiny_dataset.validation
        expected = closed_over(MLP().apply({"params": params}, x), y).mean()
        assert result.history[-1]["loss"] == pytest.approx(float(expected), abs=1e-5)


@pytest.mark.parametrize("engine", ["packed", "solo"])
def test_metrics_take_hparams_and_optional_arguments_stay(tiny_dataset, engine):
    def at_temperature(outputs, labels, hp):
        return outputs.max(-1) / hp.temperature

    def scaled(outputs, labels, factor=3.0):
        return jnp.full(len(labels), factor)

    task = task_of(
        tiny_dataset,
        optax.softmax_cross_entropy_with_integer_labels,
        metrics={"top": at_temperature, "scaled": scaled},
    )
    hps = [{"learning_rate": 0.0, "temperature": t, "seed": 0} for t in (1.0, 4.0)]
    one, four = jp.train(task, hps, epochs=1, engine=engine, metric="top", mode="max")
    top = one.history[-1]["top"]
    assert four.history[-1]["top"] == pytest.approx(top / 4, rel=1e-5)
    assert one.history[-1]["scaled"] == 3.0


def test_an_hparam_of_the_loss_alone_is_used_and_per_lane(tiny_dataset):
    space = jp.Space(
        learning_rate=jp.log_uniform(1e-3, 1e-1), label_smoothing=jp.uniform(0, 0.3)
    )
    explained = jp.explain(task_of(tiny_dataset, third), space)
    findings = {finding.name: finding for finding in explained.findings}
    assert findings["label_smoothing"].per_lane
    assert findings["label_smoothing"].reason == "a traced argument"
    assert "test_task.py" in findings["label_smoothing"].line


@pytest.mark.slow
def test_a_choice_of_losses_is_static_or_switched(tiny_dataset):
    def plain(outputs, labels):
        return optax.softmax_cross_entropy_with_integer_labels(outputs, labels)

    def soft(outputs, labels):
        return smoothed(outputs, labels, 0.5)

    kinds = {"plain": plain, "soft": soft}

    def looked_up(outputs, labels, hp):
        return kinds[str(hp.kind)](outputs, labels)

    def switched(outputs, labels, hp):
        return jp.switch(hp.kind, kinds)(outputs, labels)

    space = jp.Space(learning_rate=0.1, kind=jp.choice(*kinds))
    found = {}
    for loss in (looked_up, switched):
        task = task_of(tiny_dataset, loss)
        (finding,) = [f for f in jp.explain(task, space).findings if f.name == "kind"]
        found[loss] = finding.per_lane
        hps = [{"learning_rate": 0.1, "kind": kind} for kind in kinds]
        for i, result in enumerate(jp.train(task, hps, steps=6)):
            params, _, _ = train_alone(
                MLP(),
                optax.sgd(0.1, momentum=0.9),
                tiny_dataset.train,
                steps=6,
                batch_size=16,
                trial=i,
                train_flag="train",
                loss=list(kinds.values())[i],
            )
            assert difference(result.params, params) < 1e-5
    assert found == {looked_up: False, switched: True}


def test_losses_that_differ_are_programs_that_differ(tiny_dataset):
    hps = [{"learning_rate": 0.05, "label_smoothing": 0.3}]
    results = [
        jp.train(task_of(tiny_dataset, loss), hps, epochs=1)[0].history[-1]["loss"]
        for loss in (third, keyword, lambda o, y, hp: 2 * third(o, y, hp))
    ]
    assert results[0] == results[1] != results[2]


def test_an_hparam_that_the_loss_cannot_trace_says_where(tiny_dataset):
    def loss(outputs, labels, hp):
        return smoothed(outputs, labels, float(np.exp(hp.label_smoothing) - 1))

    space = jp.Space(learning_rate=0.1, label_smoothing=jp.uniform(0, 0.3))
    with pytest.raises(ValueError, match=r"label_smoothing is continuous.*jnp\.log"):
        jp.explain(task_of(tiny_dataset, loss), space)


def test_what_is_wrong_with_a_loss_is_said(tiny_dataset):
    with pytest.raises(ValueError, match="loss is 3; it must be a function"):
        task_of(tiny_dataset, 3)
    with pytest.raises(ValueError, match=r"order \(outputs, labels, hp\)"):
        task_of(tiny_dataset, lambda hp, outputs, labels: outputs)
    task = task_of(tiny_dataset, lambda outputs, labels, hp: hp.smothing)
    with pytest.raises(AttributeError, match="no hparam 'smothing'"):
        jp.train(task, trials(), epochs=1)


def test_defaults_follow_the_labels(tiny_dataset):
    x, y = tiny_dataset.train
    floats = jp.data.Dataset.from_arrays((x, y * 1.0), (x, y * 1.0))
    given = lambda hp: MLP(), lambda hp: optax.sgd(0.1)
    for dataset, what in ((floats, "float32"), (several(x, y), "a dict")):
        with pytest.raises(ValueError, match=f"loss is the default.* y is {what}; "):
            jp.Task(*given, dataset)
    loss = jp.metrics.squared_error
    assert jp.Task(*given, floats, loss=loss).metric_names == ("loss",)
    assert jp.Task(*given, tiny_dataset).metric_names == ("accuracy", "loss")


def several(x, y):
    return jp.data.Dataset.from_arrays((x, {"a": y}), (x, {"a": y}))


@pytest.mark.parametrize(
    ("result", "hint"),
    [
        (lambda outputs, y: outputs[:, :1] - y[None], "outputs of shape .* met labels"),
        (lambda outputs, y: outputs, "take the mean over the other axes"),
        (lambda outputs, y: outputs.mean(), "drop the mean"),
    ],
)
def test_a_loss_of_another_shape(tiny_dataset, result, hint):
    task = task_of(tiny_dataset, result)
    with pytest.raises(ValueError, match=rf"loss returned a value of shape.*\({hint}"):
        jp.train(task, trials(), epochs=1)


def test_outputs_that_do_not_fit_the_labels(tiny_dataset):
    def apply(variables, hp, x, *, train, key, mask):
        return x[:, None] @ variables["params"], {}

    task = jp.Task.from_functions(
        lambda key, hp, x: {"params": jnp.ones((x.shape[-1], 4))},
        apply,
        lambda hp: optax.sgd(0.1),
        tiny_dataset,
    )
    with pytest.raises(ValueError, match=r"outputs have shape \(32, 1, .*reshape\(len"):
        jp.train(task, [{}], epochs=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": MLP()}, "model is MLP(.|\n)*it must be a function of the hparams"),
        ({"model": MLP}, "model is .*tiny.MLP.*it must be a function of the hparams"),
        ({"model": 3}, "model is 3; it must be a function"),
        ({"optimizer": optax.sgd(0.1)}, "optimizer is .*; it must be a function"),
        ({"dataset": "mnist5k"}, "dataset is a str; make one with"),
        ({"loss": "mse"}, "loss is 'mse'; it must be a function"),
        ({"metrics": jp.metrics.accuracy}, "metrics is .*; it must map names"),
        ({"metrics": {3: jp.metrics.accuracy}}, "metrics holds 3; a metric's name is"),
        ({"metrics": {"top": 5}}, r"metrics\['top'\] is 5; it must be a function"),
        ({"augment": True}, "augment is True; it must be a function"),
        ({"batch_size": 51}, "batch_size is 51, more than the 50 training examples"),
        ({"batch_size": 16.0}, "batch_size is 16.0; it must be a whole number >= 1"),
        ({"eval_batch_size": True}, "eval_batch_size is True"),
    ],
)
def test_bad_arguments_are_named(tiny_dataset, options, message):
    given = {
        "model": lambda hp: MLP(),
        "optimizer": lambda hp: optax.sgd(0.1),
        "dataset": tiny_dataset,
    } | options
    with pytest.raises(ValueError, match=message):
        jp.Task(**given)
