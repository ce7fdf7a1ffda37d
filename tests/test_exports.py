"""Exports: Optuna studies, tables in files, TensorBoard events."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import shutil
import warnings
from collections import Counter

import optuna
import pandas as pd
import pytest
from optuna.trial import TrialState

import jaxpack as jp
from jaxpack import exports
from jaxpack.exports import source

STATES = {"COMPLETE": "COMPLETE", "STOPPED": "PRUNED", "FAILED": "FAIL"}


@pytest.fixture(autouse=True)
def quiet():
    optuna.logging.set_verbosity(optuna.logging.ERROR)


@pytest.fixture
def cut(swept_directory, tmp_path):
    """Makes the directory of a sweep that has got to its n-th reading."""

    def make(n):
        copy = tmp_path / "running"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(swept_directory[0], copy)
        asked = json.loads((copy / "sweep.json").read_text())
        del asked["outcome"]
        (copy / "sweep.json").write_text(json.dumps(asked))
        lines = (copy / "journal.jsonl").read_text().splitlines(keepends=True)
        (copy / "journal.jsonl").write_text("".join(lines[:n]))
        return copy

    return make


def storages(path):
    backend = optuna.storages.journal.JournalFileBackend(str(path / "study.log"))
    return {
        "sqlite": f"sqlite:///{path / 'study.db'}",
        "journal": optuna.storages.JournalStorage(backend),
    }


def check(study, result):
    """Whether a study says what a sweep does, by its own reading."""
    assert len(study.trials) == len(result.trials)
    for theirs, ours in zip(study.trials, result.trials, strict=True):
        assert theirs.user_attrs["trial_id"] == ours.trial_id
        assert theirs.params == dict(ours.hparams)
        assert theirs.user_attrs["bracket"] == ours.bracket
        assert theirs.user_attrs["rung"] == ours.rung
        values = {
            row["epochs"]: row["accuracy"]
            for row in ours.history
            if math.isfinite(row.get("loss", math.nan))
        }
        assert theirs.intermediate_values == values
        if ours.status in STATES:
            assert theirs.state.name == STATES[ours.status]
        if ours.status in ("COMPLETE", "STOPPED"):
            assert theirs.value == ours.score


@pytest.mark.parametrize("kind", ["sqlite", "journal"])
def test_a_study_says_what_the_sweep_does(swept_directory, tmp_path, kind):
    directory, result = swept_directory
    storage = storages(tmp_path)[kind]
    exports.to_optuna(directory, storage, "sweep")
    again = storages(tmp_path)[kind]
    study = optuna.load_study(study_name="sweep", storage=again)
    assert study.direction.name == "MAXIMIZE"
    check(study, result)
    counts = Counter(trial.state.name for trial in study.trials)
    assert counts == Counter(STATES[t.status] for t in result.trials)
    assert counts["FAIL"] > 0 and counts["PRUNED"] > 0
    trial = study.trials[0]
    rate = trial.distributions["learning_rate"]
    assert rate == optuna.distributions.FloatDistribution(1e-3, 1e6, log=True)
    kinds = optuna.distributions.CategoricalDistribution((8, 16))
    assert trial.distributions["width"] == kinds
    assert trial.user_attrs["engine"] == "packed" and "pack" in trial.user_attrs
    packs = {(t.params["width"], t.user_attrs["pack"]) for t in study.trials}
    assert len(packs) == 2
    assert all(t.datetime_start <= t.datetime_complete for t in study.trials)
    failed = next(t for t in study.trials if t.state == TrialState.FAIL)
    assert "loss was" in failed.user_attrs["reason"]


def test_exported_again_only_the_new_is_added(cut, swept_directory, tmp_path):
    directory, result = swept_directory
    storage = storages(tmp_path)["sqlite"]
    seen = []
    for n in (0, 4, 4, 13, 24):
        part = jp.load(cut(n))
        study = exports.to_optuna(part, storage, "sweep")
        check(study, part)
        seen.append(Counter(trial.state.name for trial in study.trials))
    assert seen[0] == {"WAITING": 17} and seen[1] == seen[2]
    assert seen[1]["RUNNING"] and seen[1]["WAITING"] == 13
    assert seen[3]["PRUNED"] or seen[4]["PRUNED"]
    for _ in range(2):
        check(exports.to_optuna(directory, storage, "sweep"), result)


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_optunas_pictures_work_on_it(swept_directory, tmp_path):
    import matplotlib

    matplotlib.use("agg")
    study = exports.to_optuna(swept_directory[0], storages(tmp_path)["sqlite"], "sweep")
    plots = optuna.visualization.matplotlib
    for plot in (
        plots.plot_optimization_history,
        plots.plot_intermediate_values,
        plots.plot_parallel_coordinate,
        plots.plot_slice,
        plots.plot_timeline,
        plots.plot_edf,
        plots.plot_contour,
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Theirs, about layouts.
            assert plot(study) is not None


def test_optuna_dashboard_answers(swept_directory, tmp_path):
    dashboard = pytest.importorskip("optuna_dashboard")
    _, result = swept_directory
    storage = optuna.storages.get_storage(storages(tmp_path)["sqlite"])
    exports.to_optuna(result, storage, "sweep")
    app = dashboard.wsgi(storage)

    def get(path):
        status = []
        environ = {
            "REQUEST_METHOD": "GET",
            "PATH_INFO": path,
            "QUERY_STRING": "after=0",
        }
        environ |= {"SERVER_NAME": "localhost", "SERVER_PORT": "80"}
        environ |= {"wsgi.url_scheme": "http", "HTTP_HOST": "localhost"}
        body = b"".join(app(environ, lambda s, h, e=None: status.append(s)))
        assert status[0].startswith("200"), (path, status, body[:200])
        return json.loads(body)

    (study,) = get("/api/studies")["study_summaries"]
    assert study["study_name"] == "sweep"
    trials = get(f"/api/studies/{study['study_id']}")["trials"]
    states = Counter(trial["state"].upper() for trial in trials)
    assert states == Counter(STATES[t.status] for t in result.trials)


def test_other_studies_are_refused(swept_directory, tmp_path):
    directory, _ = swept_directory
    storage = storages(tmp_path)["sqlite"]
    study = optuna.create_study(storage=storage, study_name="own", direction="maximize")
    study.add_trial(optuna.create_trial(state=TrialState.FAIL))
    with pytest.raises(ValueError, match="'own', a study whose trial 0 is not of this"):
        exports.to_optuna(directory, storage, "own")
    optuna.create_study(storage=storage, study_name="least")
    with pytest.raises(ValueError, match=r"'least', a study to minimize, .* 'max'"):
        exports.to_optuna(directory, storage, "least")


def test_the_name_is_that_of_the_directory(swept_directory, tmp_path):
    directory, _ = swept_directory
    study = exports.to_optuna(directory, storages(tmp_path)["sqlite"])
    assert study.study_name == directory.name


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_tables(swept_directory, tmp_path, kind):
    directory, result = swept_directory
    write = {"csv": exports.to_csv, "parquet": exports.to_parquet}[kind]
    read = {"csv": pd.read_csv, "parquet": pd.read_parquet}[kind]
    path = write(directory, tmp_path / "new" / f"trials.{kind}")
    frame = read(path).reset_index()
    frame = frame.set_index("trial_id")
    assert list(frame["status"]) == [t.status for t in result.trials]
    assert list(frame["hparams_width"]) == [t.hparams.width for t in result.trials]
    for score, trial in zip(frame["score"], result.trials, strict=True):
        assert score == trial.score or (math.isnan(score) and trial.score is None)
    path = write(result, tmp_path / f"readings.{kind}", readings=True)
    frame = read(path).reset_index()
    assert len(frame) == len(result.history)
    assert list(frame["steps"]) == [
        r["steps"] for t in result.trials for r in t.history
    ]


def test_parquet_of_mixed_values(swept_directory, tmp_path):
    _, result = swept_directory
    mixed = ["none", 1, 0.5, None, True]
    trials = [
        dataclasses.replace(t, hparams=jp.HParams({"x": mixed[i % 5]}))
        for i, t in enumerate(result.trials)
    ]
    result = dataclasses.replace(result, trials=trials)
    frame = pd.read_parquet(exports.to_parquet(result, tmp_path / "x.parquet"))
    assert [json.loads(x) for x in frame["hparams_x"]][:5] == mixed


def test_tensorboard(swept_directory, tmp_path):
    from tensorboardX.proto.event_pb2 import Event

    directory, result = swept_directory
    for _ in range(2):  # The second time replaces the first.
        assert exports.to_tensorboard(directory, tmp_path) == tmp_path
    for trial in result.trials:
        (file,) = (tmp_path / f"trial_{trial.trial_id:04d}").iterdir()
        data, read, tags = file.read_bytes(), [], set()
        while data:
            length = int.from_bytes(data[:8], "little")
            event = Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            for value in event.summary.value:
                tags.add(value.tag)
                if value.tag == "accuracy":
                    read.append((event.step, value.simple_value))
        ours = [(r["steps"], r["accuracy"]) for r in trial.history if "loss" in r]
        assert read == [(step, pytest.approx(value)) for step, value in ours]
        assert "_hparams_/session_start_info" in tags


@pytest.mark.parametrize(
    ("name", "export", "extra"),
    [
        ("optuna", lambda r, p: exports.to_optuna(r, None, "x"), "optuna"),
        ("pyarrow", lambda r, p: exports.to_parquet(r, p / "x"), "parquet"),
        ("tensorboardX", lambda r, p: exports.to_tensorboard(r, p), "tensorboard"),
    ],
)
def test_what_is_missing_is_said(
    swept_directory, tmp_path, monkeypatch, name, export, extra
):
    def missing(wanted):
        if wanted == name:
            raise ModuleNotFoundError(wanted)
        return importlib.import_module(wanted)

    monkeypatch.setattr(source.importlib, "import_module", missing)
    with pytest.raises(ImportError, match=rf"pip install 'jaxpack\[{extra}\]'"):
        export(swept_directory[1], tmp_path)


def test_a_source_is_checked(tmp_path):
    with pytest.raises(ValueError, match="source is 3; expected a SweepResult"):
        exports.to_csv(3, tmp_path / "x.csv")
