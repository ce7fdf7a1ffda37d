"""Trials that fail, each alone: whatever it is that fails them, and by every engine."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from reference import difference
from tiny import mlp_task, model, optimizer

import jaxpack as jp
from jaxpack import executables


class Misshapen(nn.Module):
    """Adds what does not fit."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(x) + jnp.zeros((1, 5))


def fragile_model(hp):
    if hp.width == 11:
        raise RuntimeError("no such model")
    return Misshapen() if hp.width == 12 else model(hp)


def fragile_optimizer(hp):
    if hp.width == 13:
        raise KeyError("no such optimizer")
    return optimizer(hp)


def given(*widths, rate=0.1):
    return [
        {"learning_rate": rate / (i + 1), "rate": 0.3, "width": width, "seed": width}
        for i, width in enumerate(widths)
    ]


@pytest.mark.parametrize("engine", ["packed", "solo", "fused"])
def test_a_trial_whose_code_raises_fails_alone(tiny_dataset, engine):
    task = jp.Task(fragile_model, fragile_optimizer, tiny_dataset, batch_size=16)
    trials = given(8, 11, 8, 12, 13)
    trials.append({**trials[0], "learning_rate": 1e30, "seed": 99})
    options = {"epochs": 1, "engine": engine, "workers": 1, "max_lanes": 3}
    results = jp.train(task, trials, **options)
    assert [r.status for r in results] == [
        "COMPLETE",
        "FAILED",
        "COMPLETE",
        "FAILED",
        "FAILED",
        "FAILED",
    ]
    reasons = [r.reason for r in results]
    assert reasons[1] == "RuntimeError: no such model"
    assert "(1, 5)" in reasons[3] and results[3].steps == 0
    assert reasons[4] == "KeyError: 'no such optimizer'"
    assert reasons[5] == f"training loss was not finite at step {results[5].steps - 1}"
    assert [r.params is None for r in results] == [r is not None for r in reasons]
    healthy = jp.train(
        mlp_task(tiny_dataset), [trials[0], trials[2], {**trials[0]}], **options
    )
    for a, b in zip((results[0], results[2]), healthy, strict=False):
        assert difference(a.params, b.params) == 0 and a.history == b.history


@pytest.mark.parametrize("engine", ["packed", "solo"])
def test_a_trial_that_does_not_fit_even_alone_fails_alone(
    tiny_dataset, monkeypatch, engine
):
    real = executables.get

    def get(name, function, arguments, **options):
        program = real(name, function, arguments, **options)
        wide = any(9 in leaf.shape for leaf in jax.tree.leaves(arguments))

        def run(*args):
            if name.startswith("advance") and wide:
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
            return program(*args)

        return run

    monkeypatch.setattr(executables, "get", get)
    results = jp.train(
        mlp_task(tiny_dataset), given(8, 9, 8), epochs=1, engine=engine, workers=1
    )
    assert [r.status for r in results] == ["COMPLETE", "FAILED", "COMPLETE"]
    assert results[1].reason.startswith("out of memory: RESOURCE_EXHAUSTED")
    assert np.isfinite(results[2].score) and results[2].steps == 4


def test_more_classes_than_outputs_are_named(tiny_dataset):
    def narrow(hp):
        return jp.models.MLP(width=8, num_classes=3)

    with pytest.raises(ValueError, match=r"the model gives 3 outputs.*go up to 3"):
        jp.train(
            jp.Task(narrow, lambda hp: optax.sgd(0.1), tiny_dataset), [{}], steps=1
        )
