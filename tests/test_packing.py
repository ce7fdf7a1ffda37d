"""Packing policies in a sweep: who trains with whom, and that nothing else changes."""

from __future__ import annotations

import pytest
from tiny import mlp_task, space

import jaxpack as jp
from jaxpack import executables, pack, policies, worker
from jaxpack.explain import draw

SPACE = space(batch_size=jp.choice(10, 25))
SCHEDULER = jp.SuccessiveHalving(6, 2, reduction_factor=2)


def sweep(dataset, policy, engine, **options):
    options = {"workers": 1, "max_lanes": 2, "progress": False} | options
    task = mlp_task(dataset)
    return jp.sweep(task, SPACE, SCHEDULER, policy=policy, engine=engine, **options)


@pytest.fixture(scope="module")
def alone(tiny_dataset):
    return sweep(tiny_dataset, None, "solo")


@pytest.fixture
def together(monkeypatch):
    """The trials in each pack's lanes whenever it is advanced, as it happens."""
    seen = []
    advance = worker.Bundle.advance

    def recorded(self):
        lanes = [lane for p in self.packs for lane in p.live.values()]
        seen.append({lane.ready.trial_id for lane in lanes})
        advance(self)

    monkeypatch.setattr(worker.Bundle, "advance", recorded)
    return seen


@pytest.mark.parametrize("engine", ["packed", "fused", "solo"])
@pytest.mark.parametrize("policy", policies.NAMES)
def test_every_trial_gets_its_solo_score(tiny_dataset, alone, policy, engine):
    result = sweep(tiny_dataset, policy, engine)
    assert result.stats.lane_epochs == SCHEDULER.total_resource()
    for a, b in zip(result.trials, alone.trials, strict=True):
        assert (a.status, a.steps) == (b.status, b.steps)
        assert a.score == pytest.approx(b.score, abs=1e-6)
        assert a.history[-1]["loss"] == pytest.approx(b.history[-1]["loss"], abs=1e-5)


@pytest.mark.parametrize("policy", policies.NAMES)
def test_the_policy_chooses_what_is_fused(tiny_dataset, together, policy):
    sweep(tiny_dataset, policy, "fused", seed=3)
    trials = draw(SPACE, SCHEDULER.num_trials, 3)
    chosen = policies.named(policy, SPACE, seed=3)
    ready = [policies.Candidate(trial.hparams) for trial in trials]
    assert together[0] == set(policies.packs(chosen, ready, 2)[0])
    assert len(together[0]) == (1 if policy == "none" else 2)


def test_the_policy_fills_the_lanes_of_a_program(tiny_dataset, together):
    task = mlp_task(tiny_dataset)
    options = {"engine": "packed", "workers": 1, "max_lanes": 3, "progress": False}
    scheduler = jp.SuccessiveHalving(8, 2, reduction_factor=2)
    jp.sweep(task, space(), scheduler, policy="nearest", **options)
    trials = draw(space(), scheduler.num_trials, 0)
    ready = [policies.Candidate(trial.hparams) for trial in trials]
    assert together[0] == set(policies.packs(policies.nearest(space()), ready, 3)[0])
    assert together[0] != {0, 1, 2}


def test_alone_is_one_lane_of_the_engine_asked_for(tiny_dataset):
    engines = {
        pack["engine"] for pack in sweep(tiny_dataset, "none", "auto").stats.packs
    }
    assert engines == {"solo"}
    packed = sweep(tiny_dataset, "none", "packed")
    assert {pack["lanes"] for pack in packed.stats.packs} == {1}


def test_what_does_not_fit_into_memory_is_fused_by_halves(
    tiny_dataset, alone, monkeypatch
):
    get = executables.get

    def short_of_memory(name, function, arguments, **options):
        program = get(name, function, arguments, **options)

        def run(*args):
            if name == "advance_fused" and len(args[0]) > 1:
                raise executables.jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")
            return program(*args)

        return run

    monkeypatch.setattr(pack.executables, "get", short_of_memory)
    result = sweep(tiny_dataset, "random", "fused")
    assert [t.score for t in result.trials] == [t.score for t in alone.trials]


def test_an_unknown_policy_is_refused_before_anything_runs(tiny_dataset):
    with pytest.raises(ValueError, match="policy is 'knn'; it must be 'none' or "):
        sweep(tiny_dataset, "knn", "auto")
