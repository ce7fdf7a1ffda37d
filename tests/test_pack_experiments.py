"""The studies of packs measure what they say, and end with their figures."""

from __future__ import annotations

import doctest
import json
import re

import jax
import numpy as np
import pytest

from experiments import feeding, pack_size, pairwise, shared_input, study, timing
from jaxpack import executables

SMALL = {"families": ("mlp",), "smoke": True, "repeats": 1}
CONFIG = study.Config("mlp", 32, "adam")


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(timing, "paced", lambda run, *_: lambda: run(2))


@pytest.fixture(scope="module")
def lab() -> study.Lab:
    return study.laboratory([CONFIG], study.Flags(smoke=True))


@pytest.mark.parametrize("module", [feeding, shared_input, study])
def test_examples_in_docstrings_are_right(module):
    done = doctest.testmod(module, extraglobs={"np": np})
    assert done.attempted and not done.failed


def test_the_study_is_that_of_the_paper():
    assert len(study.Flags().configs(study.OPTIMIZERS)) == 48


@pytest.mark.slow
def test_pairs_are_packed_if_like_and_fused_if_not(tmp_path, monkeypatch, capsys):
    flags = pairwise.Flags(**SMALL, directory=tmp_path)
    found = pairwise.run(flags)
    assert (found["configurations"], found["pairs"]) == (2, 3)
    content = json.loads((tmp_path / "pairwise.json").read_text())
    assert content["figures"] == found
    engines = {(run["a"], run["b"]): run["engine"] for run in content["runs"]}
    adam, momentum = "mlp 32 adam", "mlp 32 momentum"
    assert engines == {
        (adam, adam): "packed",
        (adam, momentum): "fused",
        (momentum, momentum): "packed",
    }
    for run in content["runs"]:
        alone = run["us_a"] + run["us_b"]
        saved = (alone - run["us_pack"]) / alone
        assert run["improvement"] == pytest.approx(saved, abs=2e-3)
    assert (tmp_path / "pairwise.png").stat().st_size > 1000
    assert "itself" in capsys.readouterr().out

    # What is known is not measured again, unless it was measured otherwise.
    monkeypatch.setattr(timing, "filled", lambda *_: pytest.fail("measured again"))
    assert pairwise.run(flags) == found
    assert not pairwise.known(tmp_path / "pairwise.json", {"image_size": 32})


def test_a_pair_that_does_not_fit_has_no_improvement(tmp_path, monkeypatch):
    def filled(members, lab, real=timing.filled):
        if len(members) > 1:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return real(members, lab)

    monkeypatch.setattr(timing, "filled", filled)
    found = pairwise.run(pairwise.Flags(**SMALL, directory=tmp_path))
    assert found["unlike"] is None and found["pairs"] == 2
    runs = json.loads((tmp_path / "pairwise.json").read_text())["runs"]
    assert [run["improvement"] is None for run in runs] == [False, True, False]


def test_pack_sizes_are_measured_as_far_as_memory_goes(tmp_path, monkeypatch, capsys):
    def filled(members, lab, real=timing.filled):
        if members[0].num_lanes == 4:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return real(members, lab)

    monkeypatch.setattr(timing, "filled", filled)
    flags = pack_size.Flags(**SMALL, models=(2, 4, 8), directory=tmp_path)
    found = pack_size.run(flags)["configurations"]["mlp 32 adam"]
    assert found["largest_models"] == found["best_models"] == 2
    runs = json.loads((tmp_path / "pack_size.json").read_text())["runs"]
    assert [run["models"] for run in runs] == [1, 2]
    assert "4 models do not fit" in capsys.readouterr().out
    one, two = (run["memory_bytes"] for run in runs)
    # The data are there once, the models twice.
    assert one < two < 2 * one
    assert found["memory_of_alone"] == pytest.approx(two / (2 * one), abs=1e-3)
    assert (tmp_path / "pack_size.png").stat().st_size > 1000


@pytest.mark.slow
def test_shared_input_compares_like_with_like(tmp_path, capsys):
    found = shared_input.run(shared_input.Flags(**SMALL, directory=tmp_path))
    assert found["difference"] < 1e-3
    run = json.loads((tmp_path / "shared_input.json").read_text())["runs"][0]
    batch = 32 * (16 * 16 * 3 * 4 + 4)
    assert run["bytes"] == {"alone": 4 * batch, "own": 4 * batch, "shared": batch}
    us = run["us"]["host"]
    saved = found["saved"]["mlp 32 adam"]["host"]
    assert saved["sharing"] == pytest.approx(1 - us["shared"] / us["own"], abs=1e-3)
    assert saved["both"] == pytest.approx(1 - us["shared"] / us["alone"], abs=1e-3)
    assert (tmp_path / "shared_input.png").stat().st_size > 1000


def test_other_batches_are_noticed(lab, monkeypatch):
    def other(pack, inputs, real=feeding.from_host):
        return real(pack._replace(order=pack.order[::-1]), inputs)

    monkeypatch.setitem(shared_input.MAKE, "host", other)
    monkeypatch.setattr(shared_input, "INPUTS", ("alone",))
    flags = shared_input.Flags(**SMALL)
    with pytest.raises(RuntimeError, match=r"mlp 32 adam: .* apart"):
        shared_input.measured(CONFIG, 2, lab, flags)


def test_a_time_is_of_all_steps_of_all_trials(lab):
    with executables.disk_cache():
        bundle = timing.filled([timing.widened(study.pack_spec(CONFIG, lab), 2)], lab)
    assert timing.seconds_of(bundle, 3) > 0
    steps = bundle.packs[0].arguments[0].step
    assert steps.tolist() == [3, 3]
    end = bundle.feed.window * bundle.members[0].program.steps_per_epoch({})
    with pytest.raises(RuntimeError, match=f"steps of {end + 1}"):
        timing.seconds_of(bundle, end + 1)


@pytest.mark.parametrize(
    "experiment, args, message",
    [
        (pairwise, ["--families", "mpl"], "families has 'mpl'.* mobilenet"),
        (pairwise, ["--optimizers", "lion"], "optimizers has 'lion'"),
        (pairwise, ["--repeats", "0"], "repeats is 0"),
        (pack_size, ["--models", "0"], "models has 0"),
        (pack_size, ["--batch-sizes", "0"], "batch-sizes has 0"),
        (shared_input, ["--models", "0"], "models is 0"),
        (shared_input, ["--image-size", "8"], "image-size is 8"),
    ],
)
def test_bad_flags_are_refused(experiment, args, message, capsys, monkeypatch):
    monkeypatch.setattr(study, "laboratory", lambda *_: pytest.fail("not refused"))
    with pytest.raises(SystemExit) as raised:
        experiment.main(args)
    assert re.search(message, f"{raised.value} {capsys.readouterr().err}")


def test_the_last_line_is_json(monkeypatch, capsys):
    monkeypatch.setattr(pack_size, "run", lambda flags: {"models": list(flags.models)})
    pack_size.main(["--models", "1", "2", "--smoke"])
    last = capsys.readouterr().out.splitlines()[-1]
    assert json.loads(last) == {"models": [1, 2]}
