"""Trials of unlike batch sizes in one pack, their batches padded to the largest."""

from __future__ import annotations

import jax.numpy as jnp
import optax
import pytest
from reference import difference, train_alone
from tiny import MLP, mlp_task, optimizer, space

import jaxpack as jp
from jaxpack import planner, widths
from jaxpack.groups import kinds_of_trials

SIZES = (5, 8, 16)  # Of 50 examples: 10, 7 and 4 steps an epoch.
TRIALS = [
    {"learning_rate": 0.05, "rate": 0.3, "batch_size": 5},
    {"learning_rate": 0.02, "rate": 0.0, "batch_size": 8},
    {"learning_rate": 0.1, "rate": 0.5, "batch_size": 16},
]


def planned(task, trials=TRIALS, engine="packed", epochs=2, **options):
    numbered = [planner.Trial(i, jp.HParams(trial)) for i, trial in enumerate(trials)]
    spes = [-(-50 // trial["batch_size"]) for trial in trials]
    totals = [epochs * spe for spe in spes]
    work = planner.Work(((((1, epochs),),) * len(trials)), tuple(spes))
    kinds = kinds_of_trials(numbered)
    return planner.plan(task, numbered, kinds, totals, work, engine=engine, **options)


def test_lanes_of_unlike_batch_sizes_equal_trials_alone(tiny_dataset):
    # A schedule, and a rate made of the batch size, of which each lane has its own.
    def sgd(peak, total_steps, per_epoch, size):
        schedule = jp.schedules.cosine(peak, total_steps)
        momentum = optax.sgd(schedule, momentum=0.9)
        return optax.chain(momentum, optax.scale(per_epoch / 10 + size / 16))

    task = jp.Task(
        lambda hp: MLP(rate=hp.rate),
        lambda hp: sgd(
            hp.learning_rate, hp.total_steps, hp.steps_per_epoch, hp.batch_size
        ),
        tiny_dataset,
    )
    results = jp.train(
        task, TRIALS, epochs=[3, 2, 4], horizon=4, engine="packed", workers=1
    )
    for i, (result, epochs) in enumerate(zip(results, [3, 2, 4], strict=True)):
        size, rate = TRIALS[i]["batch_size"], TRIALS[i]["learning_rate"]
        spe = -(-50 // size)
        params, _, opt_state = train_alone(
            MLP(rate=TRIALS[i]["rate"]),
            sgd(rate, 4 * spe, spe, size),
            tiny_dataset.train,
            steps=epochs * spe,
            batch_size=size,
            trial=i,
            train_flag="train",
        )
        assert result.steps == epochs * spe and result.history[-1]["epochs"] == epochs
        assert difference(result.params, params) < 1e-5
        assert difference(result.opt_state, opt_state) < 1e-5


@pytest.mark.slow
def test_a_sweep_counts_epochs_of_every_size(tiny_dataset, tmp_path):
    scheduler = jp.Hyperband(3)
    dims, options = space(batch_size=jp.choice(*SIZES)), {"progress": False}
    task = mlp_task(tiny_dataset)
    result = jp.sweep(
        task, dims, scheduler, engine="packed", directory=tmp_path, **options
    )
    assert [pack["padded"] for pack in result.stats.packs] == [True]
    assert result.stats.lane_epochs == scheduler.total_resource()
    assert result.stats.compiles_by_name["advance_packed"] == 1
    assert len({t.hparams.batch_size for t in result.trials}) > 1
    assert result.plan.packs[0].spec.program.batch_size == max(SIZES)
    assert all(check.ok for check in jp.verify(result, k=2).checks)
    text = str(result.plan)
    assert "batches are padded to the largest" in text and "1 program for" in text
    # Where nothing speaks for padding any more, what is on record is obeyed.
    longer = jp.Hyperband(3, repeats=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "GAIN", 0.0)
        fresh = jp.explain(task, dims, longer, engine="packed")
        assert len(fresh.packs) > 1
        more = jp.sweep(
            task, dims, longer, engine="packed", directory=tmp_path, **options
        )
    assert [pack["padded"] for pack in more.stats.packs] == [True]
    assert more.trials[0].score == result.trials[0].score


def test_programs_of_their_own_where_that_is_faster(tiny_dataset, monkeypatch):
    task, two = mlp_task(tiny_dataset), TRIALS[::2]
    (pack,) = planned(task, two, epochs=1).packs
    assert pack.spec.program.padded and pack.spec.program.batch_size == 16
    assert pack.row()["padded"] and pack.key == ()
    assert len(planned(task, two, epochs=10**6).packs) == 2
    # On accelerators a lane's padding is next to nothing.
    monkeypatch.setattr(planner, "pace_of", lambda platform: widths.ACCELERATOR)
    assert len(planned(task, two, epochs=10**5, workers=1).packs) == 1
    assert len(planned(task, two, epochs=1, padding=False).packs) == 2


def test_what_padding_would_change_is_not_padded(tiny_dataset):
    def mixing(outputs, labels):
        return optax.softmax_cross_entropy_with_integer_labels(
            outputs - jnp.mean(outputs, 0, keepdims=True), labels
        )

    two = TRIALS[:2]
    task = mlp_task(tiny_dataset, loss=mixing)
    assert len(planned(task, two, padding=True).packs) == 2

    def sized(hp):  # The batch size has to be a number here.
        return MLP(width=2 * hp.batch_size, rate=hp.rate)

    task = jp.Task(sized, optimizer, tiny_dataset)
    assert len(planned(task, two, padding=True).packs) == 2
    assert len(planned(mlp_task(tiny_dataset), two, engine="solo").packs) == 2
