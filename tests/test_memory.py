"""Memory of packs: the bound, what compiled programs say, and widths that fit."""

from __future__ import annotations

import jax
import pytest
from tiny import CNN, mlp_task, optimizer, space

import jaxpack as jp
from jaxpack import memory
from jaxpack.bundle import Bundle
from jaxpack.executables import CompileLog
from jaxpack.pack import Feed

DEVICE = jax.devices()[0]


def explained(task, **options):
    options = {"engine": "packed", "workers": 1} | options
    plan = jp.explain(task, space(), jp.RandomSearch(16, 1), **options)
    (pack,) = plan.packs
    return plan, pack


def real_bytes(task, spec):
    """What the compiled program says that runs."""
    feed = Feed(task.dataset, 0, 1, DEVICE)
    return Bundle((spec,), feed, 0, CompileLog()).memory_bytes


def test_memory_is_known_before_a_pack_runs(tiny_dataset, monkeypatch):
    task = mlp_task(tiny_dataset)
    plan, pack = explained(task)
    real = real_bytes(task, pack.spec)
    # Nothing is compiled where packs fit by far.
    assert not pack.memory_compiled and pack.spec.num_lanes == 16
    assert real <= pack.memory_bytes < 100 * real
    assert "a lane, in at most " in str(plan)
    # Where memory is short, compiled programs are asked, and widths fit.
    free = int(0.7 * real / memory.SHARE)
    monkeypatch.setattr(memory, "free_bytes", lambda device: free)
    plan, pack = explained(task)
    assert pack.memory_compiled and pack.spec.num_lanes == 8
    real = real_bytes(task, pack.spec)
    assert pack.memory_bytes == pytest.approx(real, rel=0.1)
    assert "a lane, in " in str(plan) and "at most" not in str(plan)
    assert pack.row()["memory_bytes"] == pack.memory_bytes


def test_the_bound_holds_for_convolutions(tiny_images):
    task = jp.Task(lambda hp: CNN(rate=hp.rate), optimizer, tiny_images, batch_size=16)
    _, pack = explained(task, max_lanes=2)
    assert real_bytes(task, pack.spec) <= pack.memory_bytes


def test_workers_share_a_device(tiny_dataset, monkeypatch):
    monkeypatch.setattr(memory, "compiled", lambda *_: memory.Need(0, 100, True))
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1700 / memory.SHARE)
    lanes = [
        explained(mlp_task(tiny_dataset), workers=n)[1].spec.num_lanes for n in (1, 2)
    ]
    assert lanes == [16, 8]
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1)
    assert explained(mlp_task(tiny_dataset))[1].spec.num_lanes == 1


def test_what_is_free_is_asked_of_the_device():
    free = memory.free_bytes(DEVICE)
    assert free is None or free > 2**20

    class Accelerator:
        platform = "gpu"

        def __init__(self, stats):
            self.memory_stats = lambda: stats

    assert memory.free_bytes(Accelerator(None)) is None
    stats = {"bytes_limit": 1000, "bytes_in_use": 300}
    assert memory.free_bytes(Accelerator(stats)) == 700
