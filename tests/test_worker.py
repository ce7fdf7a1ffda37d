"""Workers: out of memory, windows of the deck, segments."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from reference import difference
from tiny import mlp_task, space

import jaxpack as jp
from jaxpack import bundle, executables, pack

GIVEN = [{"learning_rate": 0.1 / (i + 1), "rate": 0.3} for i in range(8)]


def train(dataset, **options):
    options = {"epochs": 4, "workers": 1, "engine": "packed"} | options
    return jp.train(mlp_task(dataset), GIVEN, **options)


def short_of_memory(monkeypatch, fails):
    """Makes programs run out of memory where `fails(name, lanes, call)` says so."""
    real, calls, steps = executables.get, {}, []

    def get(name, function, arguments, **options):
        program = real(name, function, arguments, **options)
        leaf = jax.tree.leaves(arguments[0])[0]

        def run(*args):
            lanes = leaf.shape[0] if name == "advance_packed" else 1
            calls[name, lanes] = calls.get((name, lanes), 0) + 1
            if fails(name, lanes, calls[name, lanes]):
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
            return program(*args)

        return run

    monkeypatch.setattr(pack.executables, "get", get)
    return steps


@pytest.mark.parametrize(
    "call", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3))]
)
@pytest.mark.parametrize("name", ["advance_packed", "evaluate", "put", "init"])
def test_a_pack_that_does_not_fit_is_halved(tiny_dataset, monkeypatch, name, call):
    plain = train(tiny_dataset, evaluate_every=1)
    state = {"failed": 0}

    def fails(program, lanes, count):
        if name == "advance_packed":
            failing = program == name and lanes > 2 and count >= call
        else:
            failing = program == name and count == call
        state["failed"] += failing
        return failing

    short_of_memory(monkeypatch, fails)
    results = train(tiny_dataset, evaluate_every=1)
    assert state["failed"] >= 1
    for a, b in zip(plain, results, strict=True):
        assert b.status == "COMPLETE" and b.steps == 16
        assert [row["steps"] for row in b.history] == [4, 8, 12, 16]
        assert difference(a.params, b.params) < 1e-5


def test_no_step_is_trained_twice_when_memory_runs_out(tiny_dataset, monkeypatch):
    short_of_memory(monkeypatch, lambda p, n, c: p == "evaluate" and c == 3)
    result = jp.sweep(
        mlp_task(tiny_dataset),
        space(),
        jp.Hyperband(9),
        engine="packed",
        workers=1,
        progress=False,
    )
    assert result.stats.lane_epochs == 69
    assert {t.status for t in result.trials} == {"COMPLETE", "STOPPED"}


def test_a_trial_that_fits_nowhere_fails_with_the_reason(tiny_dataset, monkeypatch):
    short_of_memory(monkeypatch, lambda p, n, c: p == "advance_packed")
    results = train(tiny_dataset)
    assert {r.status for r in results} == {"FAILED"}
    assert "RESOURCE_EXHAUSTED" in results[0].reason


@pytest.mark.parametrize("engine", ["packed", "solo"])
def test_a_deck_in_windows_changes_nothing(tiny_dataset, monkeypatch, engine):
    options = {"engine": engine, "epochs": [1, 2, 3, 4, 5, 6, 7, 8]}
    whole = train(tiny_dataset, **options)
    monkeypatch.setattr(pack, "window_epochs", lambda *_: 2)
    windows = train(tiny_dataset, **options)
    for a, b in zip(whole, windows, strict=True):
        assert a.history == b.history and a.steps == b.steps
        assert difference(a.params, b.params) == 0


@pytest.mark.parametrize("engine", ["packed", "solo"])
def test_the_length_of_segments_changes_nothing(tiny_dataset, monkeypatch, engine):
    whole = train(tiny_dataset, engine=engine)
    monkeypatch.setattr(pack, "FIRST_SEGMENT", 3)
    monkeypatch.setattr(pack, "SEGMENT_SECONDS", 0.0)
    pieces = train(tiny_dataset, engine=engine)
    for a, b in zip(whole, pieces, strict=True):
        assert a.history == b.history
        assert difference(a.params, b.params) == 0


def test_what_a_worker_raises_reaches_the_caller(tiny_dataset, monkeypatch):
    def broken(self):
        raise RuntimeError("a fault in the worker")

    monkeypatch.setattr(bundle.Bundle, "advance", broken)
    with pytest.raises(RuntimeError, match="a fault in the worker"):
        train(tiny_dataset)


def test_memory_does_not_grow_over_calls(tiny_dataset):
    def live_bytes():
        return sum(array.nbytes for array in jax.live_arrays())

    train(tiny_dataset)
    before = live_bytes()
    for _ in range(3):
        train(tiny_dataset)
    assert live_bytes() == before
    assert np.isfinite(before)
