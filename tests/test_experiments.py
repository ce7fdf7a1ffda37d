"""The experiments run, and end as promised."""

from __future__ import annotations

import json

import pytest

import jaxpack as jp
from experiments import digits_hyperband, mnist_hyperband
from jaxpack.cli import outcome

KEYS = [
    *("best_score", "test_score", "trials", "lane_epochs", "lane_steps", "compiles"),
    *("compile_seconds", "train_seconds", "wall_seconds", "engine", "occupancy"),
]
SMALL = ["--max-resource=1", "--engine=solo"]


@pytest.mark.parametrize(
    "experiment, args, trials, epochs, engine",
    [
        (digits_hyperband, ["--max-resource=3"], 5, 11, "packed"),
        (mnist_hyperband, SMALL, 1, 1, "solo"),
        (mnist_hyperband, [*SMALL, "--model=cnn"], 1, 1, "solo"),
    ],
    ids=["digits", "mnist-mlp", "mnist-cnn"],
)
def test_ends_with_a_line_of_json(
    tmp_path, capsys, experiment, args, trials, epochs, engine
):
    directory = tmp_path / "run"
    experiment.main([*args, "--workers=1", "--quiet", f"--directory={directory}"])
    out = capsys.readouterr().out
    line = json.loads(out.splitlines()[-1])
    assert list(line) == KEYS
    assert (line["trials"], line["lane_epochs"]) == (trials, epochs)
    assert isinstance(line["lane_epochs"], int)
    assert line["engine"] == engine
    assert 0.1 < line["best_score"] <= 1 and 0.1 < line["test_score"] <= 1
    assert line["wall_seconds"] == round(line["wall_seconds"], 3)
    picture = directory / "report" / "rungs.png"
    assert f"scores by rung: {picture}\n" in out and picture.exists()
    assert "learning_" in out and "lane-steps" in out and "on the test split" in out


@pytest.mark.parametrize("experiment", [digits_hyperband, mnist_hyperband])
def test_help_explains_every_flag(capsys, monkeypatch, experiment):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        experiment.main(["--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert f"python -m {experiment.__name__}" in out
    for flag in ("engine", "max-resource", "reduction-factor", "seed", "directory"):
        assert f"--{flag} " in out
    for flag in ("max-lanes", "workers", "overwrite", "quiet"):
        assert f"--{flag} " in out
    assert "Hyperband's R. (default: " in out
    assert ("--model {mlp,cnn}" in out) == (experiment is mnist_hyperband)


def test_spaces_need_as_few_programs_as_claimed():
    digits = jp.explain(digits_hyperband.make_task(), digits_hyperband.SPACE)
    assert len(digits.packs) == 1
    static = {
        name: dim
        for name, dim in mnist_hyperband.SPACE.dims.items()
        if dim.values() and name != "activation"
    }
    assert jp.Space(**static).size == 8


def test_directories_are_never_shared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = [outcome.new_directory("name") for _ in range(3)]
    assert len(set(made)) == 3 and all(path.parent.name == "runs" for path in made)
