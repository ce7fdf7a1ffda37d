"""The paper's sweeps: that their ways train the same trials, and their arithmetic."""

from __future__ import annotations

import dataclasses
import json

import pytest
from reference import difference
from tiny import mlp_task, space

import jaxpack as jp
from experiments import hyperband, mixed, paper, policies, rungs, switching, table
from jaxpack import planner

TINY = dataclasses.replace(paper.SMOKE, width=8, batch_sizes=(64,))
SCHEDULER = jp.Hyperband(4, reduction_factor=2)
SOLO = {"engine": "solo", "workers": 1, "seed": 1}


@pytest.fixture(scope="module")
def across(tiny_dataset):
    return rungs.across_brackets(mlp_task(tiny_dataset), space(), SCHEDULER, **SOLO)


@pytest.mark.parametrize(
    "options",
    [{"size": 1, "restart": True}, {"size": 1}, {"size": 3}, {"policy": "nearest"}],
    ids=["original", "resumed", "packs", "policy"],
)
def test_all_ways_of_hyperband_read_the_same_scores(tiny_dataset, across, options):
    task = mlp_task(tiny_dataset)
    run = rungs.by_rungs(task, space(), SCHEDULER, **SOLO, **options)
    assert run.scores == across.scores and run.promoted
    restart = options.get("restart", False)
    assert run.lane_epochs == SCHEDULER.total_resource(resume=not restart)
    assert hyperband.same_scores(
        dict.fromkeys(hyperband.WAYS, across) | {"within_rungs": run}, "solo"
    )


def test_what_differs_between_engines_is_counted():
    scores = {(i, 0): (i / 10, 1.0) for i in range(4)}
    one = rungs.Run(scores | {(3, 1): (0.5, 1.0)}, 1.0, 5, 0.0)
    other = rungs.Run(scores | {(2, 1): (0.5, 1.0)}, 1.0, 5, 0.0)
    assert hyperband.difference(one, one)["changed_promotions"] == 0
    found = hyperband.difference(one, other)
    assert (found["changed_promotions"], found["promotions"]) == (1, 1)
    assert found["rank_correlation"] == 1
    ways = dict.fromkeys(hyperband.WAYS, one)
    assert not hyperband.same_scores(ways | {"original": other}, "solo")


@pytest.mark.slow
def test_the_papers_space_needs_a_program_for_each_batch_size():
    problem = dataclasses.replace(TINY, batch_sizes=(32, 64))
    plan = jp.explain(problem.task, problem.space, jp.Hyperband(9), engine="solo")
    assert [finding.name for finding in plan.findings if not finding.per_lane] == [
        "batch_size"
    ]
    padded = policies.padded_task(problem), policies.padded_space(problem)
    assert len(jp.explain(*padded, jp.Hyperband(9)).packs) == 1


@pytest.mark.slow
def test_padded_trials_train_on_their_first_rows():
    trial = {"learning_rate": 0.01, "optimizer": "adam", "activation": "tanh"}
    small = dataclasses.replace(TINY, batch_sizes=(20,))
    first, same, other = (
        jp.train(
            policies.padded_task(problem),
            [trial | {"rows": rows}],
            steps=1,
            engine="packed",
            workers=1,
        )[0]
        for problem, rows in ((small, 20), (TINY, 20), (TINY, 64))
    )
    assert difference(first.params, same.params) < 1e-6
    assert difference(first.params, other.params) > 1e-3
    assert first.history[-1]["loss"] == pytest.approx(same.history[-1]["loss"], 1e-5)


def test_every_way_of_packing_is_one_of_sweep(tiny_dataset):
    ways = policies.ways(policies.Flags(size=2, fused=2))
    assert {"own, none", "own, planner", "auto", "padded, nearest"} < set(ways)
    chosen = policies.ways(policies.Flags(ways=("fused, random",)))
    assert list(chosen) == ["own, none", "fused, random"]
    with pytest.raises(ValueError, match="ways has 'fused'; it may have own, none; "):
        policies.ways(policies.Flags(ways=("fused",)))
    for options in (ways["own, none"], ways["own, planner"], ways["fused, nearest"]):
        one = jp.SuccessiveHalving(2, 1)
        jp.sweep(mlp_task(tiny_dataset), space(), one, progress=False, **options)


def test_a_mixed_sweep_is_checked_against_solo(tiny_dataset):
    task = mlp_task(tiny_dataset)
    result = jp.sweep(task, space(), SCHEDULER, progress=False, seed=2)
    assert mixed.check(task, result, 4, seed=2) <= 1e-6
    result.trials[0] = dataclasses.replace(result.trials[0], score=9.0)
    assert mixed.check(task, result, 4, seed=2) > 7


def test_fusing_is_timed_against_each_alone(tiny_dataset, monkeypatch):
    widths = {"mlp": 8, "resnet": 16}
    monkeypatch.setattr(mixed, "MODELS", tuple(widths))
    monkeypatch.setattr(planner, "WORTH_FUSING", 0.0)

    def measured(dataset, trials, candidates, devices):
        together = 0.5 if len(devices) == 1 else 2.0
        return {m: together if len(m) > 1 else 1.0 for m in candidates}

    monkeypatch.setattr(planner, "measure", measured)

    def model(hp):
        rate = hp.dropout if hp.model == "mlp" else 0.0
        return jp.models.MLP(widths[hp.model], dropout=rate)

    task = jp.Task(model, mixed.make_optimizer, tiny_dataset)
    found = mixed.fused_of_all(task)
    assert found["1 worker"] == {
        "us_alone": 2e6,
        "us_together": 1e6,
        "improvement": 0.5,
        "fused": True,
    }
    *_, most = found.values()
    if len(found) > 1:
        assert most["improvement"] == -1.0 and not most["fused"]


def test_swaps_are_timed():
    seconds = switching.time_pack(switching.make_task("mlp"), lanes=2, repeats=2)
    assert set(seconds) == {"take", "put", "start", "step", "program"}
    assert all(value > 0 for value in seconds.values())


def test_the_table_has_a_row_for_each_result(tmp_path):
    figures = {"mlp": {"swap_ms": 0.8, "program": 1000.0, "process": 5000.0}}
    content = {"figures": figures, "environment": {"device": "a chip"}}
    (tmp_path / "switching.json").write_text(json.dumps(content))
    *_, row = table.rows(tmp_path)
    assert len(table.rows(tmp_path)) == 3
    assert "a swap takes 0.8 ms, a new program x1,000" in row and "| a chip |" in row
    assert row.endswith("| `python -m experiments.switching --smoke` |")
    full = table.rows(tmp_path, smoke=False)[-1]
    assert full.endswith("| `python -m experiments.switching` |")


def test_only_known_experiments_are_run(tmp_path):
    with pytest.raises(ValueError, match="only has pairs; it may have pairwise, "):
        table.run_all(tmp_path, ["pairs"])


def test_the_readme_has_a_place_for_the_table():
    text = table.README.read_text(encoding="utf-8")
    assert "\nnew row\n" in table.written(text, ["new row"])
    with pytest.raises(ValueError, match="no table"):
        table.written("nothing", [])
