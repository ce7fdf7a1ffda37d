"""The README's example runs as it stands, and its paths exist."""

from __future__ import annotations

import importlib
import operator
import pathlib
import re
import types

import flax
import jax
import numpy as np
import optax
import pytest
from flax import nnx
from tiny import MLP, mlp_task

import jaxpack as jp

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAP = (ROOT / "jaxpack" / "README.md").read_text(encoding="utf-8")


def test_the_example_runs(tmp_path, monkeypatch, capsys):
    pytest.importorskip("mlxtend")
    monkeypatch.chdir(tmp_path)
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL).group(1)
    small = code.replace("max_resource=27", "max_resource=3")
    assert small != code
    exec(compile(small, "README.md", "exec"), {})
    out = capsys.readouterr().out
    assert "TrialResult(" in out and "accuracy" in out
    assert (tmp_path / "rungs.png").stat().st_size > 1000


def block(beginning):
    """The block of code that begins so."""
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (found,) = [code for code in blocks if code.startswith(beginning)]
    return compile(found, "README.md", "exec")


class Layers(nnx.Module):
    def __init__(self, width, dropout, *, rngs):
        self.hidden = nnx.Linear(8, width, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.out = nnx.Linear(width, 2, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(nnx.relu(self.hidden(x))))


def test_the_own_task_trains(tiny_dataset):
    x, y = (split[0] for split in (tiny_dataset.train, tiny_dataset.validation))
    dataset = jp.data.Dataset.from_arrays((x, x[:, :2]), (y, y[:, :2]))
    names = {"jp": jp, "jax": jax, "optax": optax, "Net": Layers, "dataset": dataset}
    names["optimizer"] = lambda hp: optax.adam(hp.learning_rate)
    exec(block("def model(hp, rngs)"), names)
    hp = {"learning_rate": 0.01, "width": 8, "dropout": 0.1, "delta": 1.0, "noise": 0.1}
    first, last = (jp.train(names["task"], [hp], epochs=n)[0].score for n in (0, 20))
    assert last < 0.5 * first  # A mean squared error.


def test_trials_are_used_as_shown(tiny_dataset, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    models = {
        "model": lambda hp: MLP(),
        "optimizer": lambda hp: optax.sgd(hp.learning_rate),
    }
    space = jp.Space(learning_rate=jp.log_uniform(1e-3, 1e-1))
    names = {"jp": jp, "np": np, "flax": flax, "dataset": tiny_dataset, **models}
    names["task"] = task = jp.Task(dataset=tiny_dataset, **models)
    names["result"] = jp.sweep(task, space, jp.Hyperband(3), progress=False)
    names["x"] = x = tiny_dataset.validation[0]
    exec(block("outputs = jp.predict"), names)
    outputs = MLP().apply(names["variables"], x)
    assert np.allclose(outputs, names["outputs"], atol=1e-5)
    assert names["final"].steps == 27 * 3 and len(names["result"].trials) == 6
    assert "hparams_learning_rate" in capsys.readouterr().out


def test_records_reach_other_tools(tiny_dataset, monkeypatch):
    calls = []

    class Fake:
        def __init__(self, *args, **kwargs): ...

        def log(self, values):
            calls.append(values)

        def add_scalar(self, name, value, step):
            calls.append((name, value, step))

    names = {
        "jp": jp,
        "wandb": types.SimpleNamespace(init=Fake),
        "tensorboardX": types.SimpleNamespace(SummaryWriter=Fake),
        "task": mlp_task(tiny_dataset),
        "space": jp.Space(learning_rate=jp.log_uniform(1e-3, 1e-1), rate=0.0),
    }
    exec(block("run = wandb.init"), names)
    assert len(calls) == 2 * len(names["result"].history) > 0
    first = names["result"].history[0]
    step, score = first["steps"], first["accuracy"]
    assert calls[0] == {f"trial {first['trial_id']}": score, "steps": step}
    assert calls[1] == (f"score/trial {first['trial_id']}", score, step)


PATHS = r"`([\w/]+(?:\.py|/))`"


@pytest.mark.parametrize("text", [README, MAP], ids=["README", "map"])
def test_the_paths_that_are_named_exist(text):
    for name in re.findall(PATHS, text):
        assert (ROOT / name).exists() or (ROOT / "jaxpack" / name).exists(), name


def test_the_links_lead_somewhere():
    for text, folder in ((README, ROOT), (MAP, ROOT / "jaxpack")):
        for link in re.findall(r"\]\(([^):]+)\)", text):
            assert (folder / link).exists(), link


def test_the_map_names_what_there_is():
    text = re.sub(PATHS, "", MAP.partition("| layer |")[0])
    found = set(re.findall(r"`([a-z_]+(?:\.\w+)+)`", text))
    assert len(found) > 25
    for name in found:
        module, _, rest = name.partition(".")
        loaded = importlib.import_module(f"jaxpack.{module}")
        assert operator.attrgetter(rest)(loaded), name
