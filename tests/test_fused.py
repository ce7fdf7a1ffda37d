"""Unlike trials in one program: results, swaps, memory, and when it is chosen."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest
from reference import difference
from tiny import CNN, MLP, mlp_task, space

import jaxpack as jp
from jaxpack import executables, pack, planner, step, tune
from jaxpack.bundle import Bundle
from jaxpack.combine import filled, partition
from jaxpack.groups import kinds_of_trials
from jaxpack.pack import Feed, Ready
from jaxpack.types import HParams, Trial

UNLIKE = [
    {"learning_rate": 0.1, "rate": 0.3, "width": 8, "batch_size": 8},
    {"learning_rate": 0.05, "rate": 0.0, "width": 16, "batch_size": 25},
    {"learning_rate": 0.02, "rate": 0.5, "width": 24, "batch_size": 8},
]


def train(dataset, trials=UNLIKE, **options):
    options = {"epochs": 4, "engine": "fused", "workers": 1} | options
    return jp.train(mlp_task(dataset), trials, **options)


def compiled_names(monkeypatch):
    """The programs asked for from now on, a name each time one is compiled."""
    names = []
    real = executables.CompileLog.add

    def add(self, name, *, compiled):
        names.append(name)
        real(self, name, compiled=compiled)

    monkeypatch.setattr(executables.CompileLog, "add", add)
    return names


def test_unlike_trials_share_one_program(tiny_dataset, monkeypatch):
    executables.clear()
    names = compiled_names(monkeypatch)
    results = train(tiny_dataset, epochs=[2, 4, 3])
    # 7 steps an epoch of batches of 8, 2 of batches of 25.
    assert [r.steps for r in results] == [14, 8, 21]
    assert [r.status for r in results] == ["COMPLETE"] * 3
    assert [name for name in names if "advance" in name] == ["advance_fused"]


@pytest.mark.slow
def test_models_of_other_families_are_fused(tiny_images, monkeypatch):
    executables.clear()

    def model(hp):
        if hp.model == "cnn":
            return CNN(batch_norm=True)
        return nn_flat(width=hp.width)

    def optimizer(hp):
        if hp.model == "cnn":
            return optax.adam(hp.learning_rate)
        return optax.sgd(hp.learning_rate, momentum=0.9)

    trials = [
        {"model": "cnn", "width": 0, "learning_rate": 0.01, "batch_size": 16},
        {"model": "mlp", "width": 8, "learning_rate": 0.01, "batch_size": 25},
    ]
    task = jp.Task(model, optimizer, tiny_images)
    names = compiled_names(monkeypatch)
    fused = jp.train(task, trials, steps=10, engine="fused", workers=1)
    assert names.count("advance_fused") == 1
    solo = jp.train(task, trials, steps=10, engine="solo", workers=1)
    for a, b in zip(fused, solo, strict=True):
        assert a.history[-1]["steps"] == 10
        assert a.score == pytest.approx(b.score, abs=1e-6)
        assert difference(a.params, b.params) < 5e-5
        assert difference(a.model_state, b.model_state) < 5e-5
    # From step 1 on without its neighbour.
    left = jp.train(task, trials, steps=[10, 1], engine="fused", workers=1)
    assert difference(left[0].params, fused[0].params) == 0


def nn_flat(width):
    """An MLP over flattened images."""

    class Flat(MLP):
        def __call__(self, x, *, train: bool = False):
            return super().__call__(x.reshape(len(x), -1), train=train)

    return Flat(width=width)


def test_neighbours_change_no_bit(tiny_dataset):
    options = {"evaluate_every": 1}
    plain = train(tiny_dataset, **options)
    # The first neighbour leaves early, the last one fails: its steps overflow.
    others = [UNLIKE[0] | {"learning_rate": 0.9}, UNLIKE[1]]
    others += [UNLIKE[2] | {"learning_rate": 1e30}]
    changed = train(tiny_dataset, others, epochs=[1, 4, 4], **options)
    assert changed[1].history == plain[1].history
    assert difference(changed[1].params, plain[1].params) == 0
    assert difference(changed[1].opt_state, plain[1].opt_state) == 0
    assert changed[2].status == "FAILED" and changed[2].first_bad_step >= 1


@pytest.mark.slow
def test_like_trials_are_fused_too(tiny_dataset, monkeypatch):
    trials = [UNLIKE[0] | {"learning_rate": 0.1 / (i + 1)} for i in range(6)]
    executables.clear()
    names = compiled_names(monkeypatch)
    fused = train(tiny_dataset, trials)
    assert names.count("advance_fused") == 1
    solo = train(tiny_dataset, trials, engine="solo")
    for a, b in zip(fused, solo, strict=True):
        assert difference(a.params, b.params) < 1e-5


def test_a_sweep_swaps_trials_without_compiling_again(tiny_dataset):
    executables.clear()
    options = {"engine": "fused", "workers": 2, "progress": False}
    dims = space(width=jp.choice(8, 16), batch_size=jp.choice(10, 25))
    result = jp.sweep(mlp_task(tiny_dataset), dims, jp.Hyperband(9), **options)
    keys = len(result.plan.packs)
    assert keys == 4
    assert result.stats.lane_epochs == 69
    rungs = [rung for bracket in jp.Hyperband(9).brackets() for rung in bracket]
    assert result.stats.swaps == sum(num_trials for num_trials, _ in rungs)
    assert result.stats.compiles_by_name["advance_fused"] == 1
    assert result.stats.compiles_by_name["init"] == keys
    assert 0 < result.stats.occupancy <= 1
    assert {row["engine"] for row in result.stats.packs} == {"fused"}
    assert {row["lanes"] for row in result.stats.packs} == {4}


def bundle_of(dataset, engines):
    """A bundle with a pack an engine, and a trial for each of its lanes."""
    trials = [Trial(i, HParams(UNLIKE[i])) for i in range(len(engines))]
    plan = planner.plan(
        mlp_task(dataset),
        trials,
        kinds_of_trials(trials),
        [28] * len(trials),
        engine="solo",
    )
    members = tuple(
        planner.PackSpec(p.spec.program, engine, lanes, p.spec.state)
        for p, (engine, lanes) in zip(plan.packs, engines, strict=True)
    )
    feed = Feed(dataset, 0, 8, jax.devices()[0])
    return Bundle(members, feed, 0, executables.CompileLog()), trials


def ready(bundle, trial, member, trial_id, steps):
    spec = bundle.members[member]
    values = dict(trial.hparams) | {"total_steps": 28}
    lane = step.lane_values(spec.program.lane_hparams, values)
    return Ready((trial_id,), trial_id, spec, lane, trial_id, None, 0, (steps,))


def test_a_member_may_be_a_pack(tiny_dataset):
    engines = [("packed", 3), ("solo", 1), ("packed", 2)]
    bundle, trials = bundle_of(tiny_dataset, engines)
    places = [(0, 0, 14), (0, 1, 7), (1, 2, 8), (2, 3, 21)]
    for member, trial_id, steps in places:
        bundle.put(ready(bundle, trials[member], member, trial_id, steps))
    assert bundle.free == dict(zip(bundle.members, (1, 0, 1), strict=True))
    states = {}
    while bundle.live:
        bundle.advance()
        states |= {r.trial_id: r for r in bundle.drain()}
    assert [states[i].steps for i in range(4)] == [14, 7, 8, 21]
    given = [UNLIKE[0], UNLIKE[0], UNLIKE[1], UNLIKE[2]]
    solo = train(tiny_dataset, given, epochs=None, steps=[14, 7, 8, 21], engine="solo")
    for i, result in enumerate(solo):
        assert difference(states[i].state.params, result.params) < 1e-5


def test_an_empty_member_is_kept_as_it_is(tiny_dataset):
    bundle, trials = bundle_of(tiny_dataset, [("solo", 1), ("solo", 1)])
    bundle.put(ready(bundle, trials[0], 0, 0, 7))
    before = jax.device_get(bundle.packs[1].arguments[0])
    bundle.advance()
    after = jax.device_get(bundle.packs[1].arguments[0])
    assert difference(before, after) == 0
    assert int(bundle.packs[0].arguments[0].step) == 7
    (reading,) = bundle.drain()
    used = bundle.packs[1].usage
    assert reading.done and (used.lane_steps, used.computed, used.swaps) == (0, 0, 0)


@pytest.mark.parametrize("call", [1, 2])
def test_out_of_memory_halves_the_members(tiny_dataset, monkeypatch, call):
    plain = train(tiny_dataset)
    real, widths = executables.get, []

    def get(name, function, arguments, **options):
        program = real(name, function, arguments, **options)
        members = len(arguments[0]) if name == "advance_fused" else 1
        calls = []

        def run(*args):
            calls.append(name)
            if name.startswith("advance"):
                widths.append(members)
            if members > 2 and len(calls) >= call:
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
            return program(*args)

        return run

    monkeypatch.setattr(pack.executables, "get", get)
    results = train(tiny_dataset)
    assert max(widths) == 3 and {1, 2} <= set(widths)
    for a, b in zip(plain, results, strict=True):
        assert b.status == "COMPLETE" and a.steps == b.steps
        assert difference(a.params, b.params) < 1e-5


@pytest.mark.slow
def test_a_deck_in_windows_changes_nothing(tiny_dataset, monkeypatch):
    whole = train(tiny_dataset, epochs=[8, 5, 3])
    monkeypatch.setattr(pack, "window_epochs", lambda *_: 2)
    windows = train(tiny_dataset, epochs=[8, 5, 3])
    for a, b in zip(whole, windows, strict=True):
        assert a.history == b.history
        assert difference(a.params, b.params) == 0


def test_the_plan_says_what_is_fused(tiny_dataset):
    dims = space(width=jp.choice(8, 16, 24, 32, 40))
    made = jp.explain(
        mlp_task(tiny_dataset), dims, jp.RandomSearch(20, 1), engine="fused", workers=1
    )
    programs = {p.fused for p in made.packs}
    assert len(programs) == 2 and {len(p) for p in programs} == {4}
    text = str(made)
    assert "2 programs for 20 trials" in text
    assert "of 4 lanes of program 2" in text
    assert "as long to compile as all of theirs" in text


def test_max_lanes_is_the_most_trials_of_a_fused_program(tiny_dataset):
    made = jp.explain(
        mlp_task(tiny_dataset),
        space(width=jp.choice(8, 16, 24)),
        jp.RandomSearch(12, 1),
        engine="fused",
        max_lanes=2,
        workers=1,
    )
    assert {p.num_lanes for p in made.packs} == {2}


@pytest.mark.parametrize(
    ("together", "fused"), [(0.5, True), (0.95, False), (2, False)]
)
def test_fused_is_chosen_where_it_measures_faster(
    tiny_dataset, monkeypatch, together, fused
):
    measured = []

    def measure(dataset, trials, candidates, devices):
        measured.append(candidates)
        assert set(trials) == {spec.program for (*_, spec) in candidates}
        return {m: 1e-6 * (together if len(m) > 1 else 1.0) for m in candidates}

    monkeypatch.setattr(planner, "measure", measure)
    monkeypatch.setattr(planner, "WORTH_FUSING", 0.0)
    dims = space(width=jp.choice(8, 16))
    arguments = mlp_task(tiny_dataset), dims, jp.RandomSearch(8, 4)
    packs = jp.explain(*arguments, workers=2).packs
    assert [len(m) for m in measured[-1]] == [1, 1, 2]
    for found in packs:
        assert (found.engine == "fused") == fused
        assert found.spec.engine == "packed"  # What was usual for each stays.
        assert ("not fused, by measurement" in found.reason) != fused
        assert dict(found.measured)["fused of 2"] == pytest.approx(together, abs=0.01)
    if not fused:
        return
    executables.clear()
    result = jp.sweep(*arguments, workers=2, progress=False)
    assert result.stats.compiles_by_name["advance_fused"] == 1
    assert all(t.status == "COMPLETE" for t in result.trials)


def test_fusing_is_measured_on_real_steps(tiny_dataset, monkeypatch):
    arguments = (
        mlp_task(tiny_dataset),
        space(width=jp.choice(8, 16)),
        jp.RandomSearch(8, 4),
    )
    short = jp.explain(*arguments, workers=1)
    assert all(p.measured == () for p in short.packs)
    monkeypatch.setattr(planner, "WORTH_FUSING", 0.0)
    monkeypatch.setattr(tune, "ROUND_SECONDS", 0.005)
    made = jp.explain(*arguments, workers=1)
    assert all(dict(p.measured)["fused of 2"] > 0 for p in made.packs)


@pytest.mark.parametrize("most", [1, 2, 3, 4, 7])
def test_every_pack_is_in_one_program_of_no_more_than_allowed(most):
    steps = np.random.default_rng(0).permutation(11).tolist()
    parts = partition(steps, most)
    assert sorted(i for part in parts for i in part) == list(range(11))
    assert max(map(len, parts)) <= most
    assert len(parts) == -(-11 // most)
    lengths = [steps[i] for part in parts for i in part]
    assert lengths == sorted(lengths, reverse=True)


@pytest.mark.parametrize(
    ("trials", "workers", "copies"),
    [
        ([1], 1, [0]),
        ([2], 1, [0, 0]),
        ([9], 1, [0] * 4),
        ([4, 3], 1, [0, 0, 1, 1]),
        ([4, 1], 2, [0, 0, 1]),
        ([2], 2, [0]),
    ],
)
def test_copies_are_no_more_than_the_trials_need(trials, workers, copies):
    members = tuple(range(len(trials)))
    assert filled(members, trials, 4, workers) == tuple(copies)
