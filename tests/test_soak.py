"""The soak test at a small size: kills, and memory over many sweeps."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

from experiments import soak

ROOT = pathlib.Path(__file__).parents[1]


def test_kills_change_nothing_and_lose_nothing(tmp_path):
    # The children of one run share their compiled programs.
    more = {"JAX_ENABLE_COMPILATION_CACHE": "true", "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "experiments.soak", "--kills=2", "--seed=1"],
        cwd=ROOT,
        env=os.environ | more,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "kills": 2,
        "different": 0,
        "lost": 0,
        "retrained_beyond_checkpoint": 0,
    }


def test_memory_does_not_grow_over_sweeps(tmp_path):
    found = soak.memory(4, tmp_path)
    assert found["device_bytes_more"] <= 0
    assert found["host_bytes_more"] < 20e6


@pytest.mark.parametrize("place", soak.PLACES)
def test_every_place_to_die_at_is_there(place):
    owner, name, _ = soak.PLACES[place]
    assert callable(getattr(owner, name))
