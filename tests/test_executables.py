"""Programs are compiled once, counted, and kept on disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest

from jaxpack import executables, trees

DEVICE = jax.devices()[0]


def get(function, identity, log, **options):
    arguments = (jax.ShapeDtypeStruct((3,), np.float32),)
    return executables.get(
        "double",
        function,
        arguments,
        identity=identity,
        device=DEVICE,
        log=log,
        **options,
    )


def test_one_identity_compiles_once_in_all_threads():
    log = executables.CompileLog()
    traces = []

    def double(x):
        traces.append(1)
        return x * 2

    identity = object()
    threads = [
        threading.Thread(target=get, args=(double, identity, log)) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(traces) == 1
    assert log.compiles == {"double": 1}
    assert log.seconds > 0
    np.testing.assert_array_equal(get(double, identity, log)(np.ones(3, "f4")), 2)


def test_a_failed_compilation_is_raised_and_may_be_tried_again():
    log = executables.CompileLog()
    fails = [True]

    def sometimes(x):
        if fails:
            fails.pop()
            raise RuntimeError("not now")
        return x

    identity = object()
    with pytest.raises(RuntimeError, match="not now"):
        get(sometimes, identity, log)
    get(sometimes, identity, log)


def test_put_and_take_touch_one_lane_only():
    stack = trees.avals({"w": np.zeros((64, 1000), np.float32)})
    lane = trees.avals({"w": np.zeros(1000, np.float32)})
    index = jax.ShapeDtypeStruct((), np.int32)
    common = {"identity": None, "device": DEVICE, "log": executables.CompileLog()}
    put = executables.get("put", trees.put, (stack, lane, index), donate=(0,), **common)
    take = executables.get("take", trees.take, (stack, index), **common)
    assert put.memory_analysis().temp_size_in_bytes < 64 * 1000 * 4 // 2
    assert take.memory_analysis().temp_size_in_bytes < 64 * 1000 * 4 // 2
    states = jax.device_put({"w": np.zeros((64, 1000), np.float32)})
    # The first call cannot take over memory that is numpy's.
    states = put(states, {"w": np.zeros(1000, np.float32)}, np.int32(0))
    pointer = states["w"].unsafe_buffer_pointer()
    states = put(states, {"w": np.ones(1000, np.float32)}, np.int32(3))
    assert states["w"].unsafe_buffer_pointer() == pointer
    assert take(states, np.int32(3))["w"].sum() == 1000


PROGRAM = """
import json, os, sys
sys.path.insert(0, {tests!r})
import jax
from tiny import mlp_task, space
import jaxpack as jp
import numpy as np
x, y = np.zeros((40, 8), np.float32), np.arange(40, dtype=np.int32) % 4
data = jp.data.Dataset.from_arrays(train=(x, y), validation=(x, y))
if {own!r}:
    jax.config.update("jax_compilation_cache_dir", {own!r})
result = jp.sweep(mlp_task(data), space(), jp.Hyperband(3), progress=False)
print(json.dumps([result.stats.compiles, jax.config.jax_compilation_cache_dir,
                  jax.config.jax_persistent_cache_min_compile_time_secs]))
"""


def run(cache, own=""):
    code = PROGRAM.format(tests=os.path.dirname(__file__), own=own)
    env = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    del env["JAX_ENABLE_COMPILATION_CACHE"]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_a_second_process_finds_its_programs_on_disk(tmp_path):
    compiled, directory, seconds = run(tmp_path)
    assert compiled > 0 and directory is None and seconds == 1.0
    assert list(tmp_path.glob("jaxpack/xla-*/*"))
    assert run(tmp_path)[0] == 0


def test_the_users_own_cache_is_left_as_it_is(tmp_path):
    own = tmp_path / "own"
    assert run(tmp_path, str(own))[1:] == [str(own), 1.0]
    assert not (tmp_path / "jaxpack").exists()


def test_memory_counts_what_is_taken_over_once():
    def take(x, table):
        return x + table.sum()

    shapes = jax.ShapeDtypeStruct((1000,), np.float32), jax.ShapeDtypeStruct((9,), "f4")
    sizes = [
        executables.memory_bytes(
            executables.get(
                "take",
                take,
                shapes,
                identity=donate,
                device=DEVICE,
                log=executables.CompileLog(),
                donate=donate,
            )
        )
        for donate in ((), (0,))
    ]
    assert sizes[0] - sizes[1] == 4000
    assert 4036 <= sizes[1] < 8000
