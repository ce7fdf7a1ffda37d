"""The command line: what it prints, where, and how it ends."""

from __future__ import annotations

import concurrent.futures
import inspect
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import warnings

import pandas as pd
import pytest

import jaxpack as jp
from jaxpack import driver
from jaxpack.cli import errors, main
from jaxpack.cli.flags import Flags
from jaxpack.cli.main import COMMANDS
from jaxpack.cli.modules import NOTE
from jaxpack.journal import encode
from jaxpack.lock import Lock, holder

ROOT = pathlib.Path(__file__).parents[1]
QUICK = ["--engine=solo", "--workers=1", "--max-resource=3", "--quiet"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the written example, swept into `a`; what it said in `said`."""
    folder = tmp_path_factory.mktemp("cli")
    task = str(folder / "task.py")
    assert main(["init", task]) == 0
    # As written but for the number of programs.
    text = pathlib.Path(task).read_text()
    pathlib.Path(task).write_text(text.replace("jp.choice(16, 32)", "8"))
    with pytest.MonkeyPatch.context() as patch, open(folder / "said", "w") as said:
        patch.setattr(sys, "stdout", said)
        directory = f"--directory={folder / 'a'}"
        assert main(["sweep", task, *QUICK, directory, "--json"]) == 0
    return folder


@pytest.fixture
def here(folder, monkeypatch):
    """The folder, as the current one."""
    monkeypatch.chdir(folder)
    return folder


def run(capsys, *args):
    """Runs a command; returns its exit code, stdout and stderr."""
    try:
        code = main([str(arg) for arg in args])
    except SystemExit as stop:
        code = stop.code
    said = capsys.readouterr()
    for text in said:
        assert "\x1b" not in text  # Piped, so no escape codes.
    return code, said.out, said.err


def module(here, name, text):
    (here / f"{name}.py").write_text(text)
    return f"{name}.py"


def test_a_sweep_says_what_it_found(here):
    said = (here / "said").read_text()
    assert "\x1b" not in said
    line = json.loads(said.splitlines()[-1])
    assert (line["trials"], line["lane_epochs"], line["engine"]) == (5, 11, "solo")
    loaded = jp.load("a")
    assert line["best_score"] == loaded.best_score
    assert f"trial {loaded.best.trial_id} is the best: accuracy" in said
    for name, value in loaded.best_hparams.items():
        assert f"  {name} = {value!r}\n" in said
    for path in re.findall(r"^(?:scores by rung|page|all results): (.*)$", said, re.M):
        assert pathlib.Path(path).exists()
    assert len(re.findall(r"^ +\d+ +0\.\d+ +(?:STOPPED|COMPLETE)", said, re.M)) == 5
    assert json.loads((here / "a" / NOTE).read_text())["module"].endswith("task.py")


def test_the_same_command_goes_on(here, capsys):
    code, out, _ = run(capsys, "sweep", "task.py", *QUICK, "--directory=a")
    assert code == 0 and "nothing was left to train" in out
    code, _, err = run(capsys, "sweep", "task.py", *QUICK, "--seed=1", "--directory=a")
    assert code == 1 and err.startswith("error: directory 'a' holds another sweep")
    assert "give --overwrite, which" in err and "Traceback" not in err


def test_explain_trains_nothing(here, capsys):
    code, out, _ = run(capsys, "explain", "task.py", "--max-resource=9")
    assert code == 0 and "Hyperband: 17 trials, 69 epochs in 3 brackets" in out
    assert re.search(r"learning_rate +per-lane", out) and "program for 17 trials" in out
    assert "task.py:31" in out


def test_the_example_runs_as_it_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, out, _ = run(capsys, "init", "my/own.py")
    assert code == 0 and "python -m jaxpack sweep my/own.py" in out
    text = (tmp_path / "my/own.py").read_text()
    assert "sweep my/own.py" in text and len(text.splitlines()) < 50
    code, out, _ = run(capsys, "explain", "my/own.py")
    assert code == 0 and "Hyperband: 49 trials" in out and "2 programs" in out
    code, _, err = run(capsys, "init", "my/own.py")
    assert code == 2 and "exists already" in err
    assert text == (tmp_path / "my/own.py").read_text()
    assert run(capsys, "init", "own.txt")[0] == 2


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("task = space = 1", 1, "error: task is 1; make one with jaxpack.Task"),
        ("from task import task", 2, "error: module 'm.py' has no `space`; write"),
        ("Task = 1", 2, "has no `task` (it has `Task`); write task = jaxpack.Task"),
        (
            "import jaxpack as jp\nspace = jp.Space(x=jp.uniform(3, 1))",
            1,
            "error: uniform: hi is 1.0; expected more than lo, 3.0 (",
        ),
        (
            "from task import space, task\nimport jaxpack as jp\n"
            "scheduler = jp.RandomSearch(2, 1)",
            2,
            "error: --reduction-factor is 4, but RandomSearch(num_trials=2, ",
        ),
        (
            "from task import space, task\nimport jaxpack as jp\n"
            "task = jp.Task(lambda hp: None, lambda hp: None,\n"
            "    task.dataset, metrics={'cost': jp.metrics.accuracy})",
            1,
            "give --mode min or --mode max",
        ),
        (
            "from task import jp, task\nscheduler = jp.SuccessiveHalving(4, 1)\n"
            "space = jp.Space(learning_rate=0.1, dropout=0.1, widht=8)",
            1,
            "error: no hparam 'width'; did you mean 'widht'? (",
        ),
    ],
    ids=["kinds", "no space", "no task", "in the module", "scheduler", "mode", "typo"],
)
def test_a_module_that_will_not_do(here, capsys, text, code, said):
    path = module(here, "m", text)
    found, out, err = run(capsys, "sweep", path, "--reduction-factor=4", "--quiet")
    assert (found, out) == (code, "") and said in err and err.count("\n") == 1
    assert not list(here.glob("runs/*"))


@pytest.mark.parametrize(
    ("text", "last"),
    [
        ("import no_such_package", "ModuleNotFoundError: No module named"),
        ("def f():\n    raise ValueError('mine')\nf()", "ValueError: mine"),
        ("1 +", "SyntaxError: invalid syntax"),
    ],
)
def test_errors_of_the_module_keep_their_traceback(here, capsys, text, last):
    code, _, err = run(capsys, "sweep", module(here, "broken", text))
    assert code == 1 and "broken.py" in err
    assert err.splitlines()[-1].startswith(last) and "jaxpack/cli" not in err


def test_errors_without_a_line_of_the_user_begin_in_the_library(capsys):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        error = pool.submit(jp.metrics.infer_mode, 3).exception()  # pyrefly: ignore
    assert errors.tell(error) == errors.FAILED
    first = capsys.readouterr().err.splitlines()[1]
    assert re.search(r"jaxpack.metrics\.py", first)


@pytest.mark.filterwarnings("always")
def test_warnings_are_a_line(capsys):
    with errors.warnings_in_a_line():
        warnings.warn("something is odd", stacklevel=1)
    assert capsys.readouterr().err == "warning: something is odd\n"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["sweep", "nix.py"], "module is 'nix.py', and there is no such file"),
        (["sweep", "./"], "module is './', a folder; expected a Python file"),
        (["sweep", "no.such"], "module is 'no.such', and there is no such module"),
        (["sweep", "task.py", "--engine=vmap"], "invalid choice 'vmap'"),
        (["sweep", "task.py", "--lanes=2"], "Unrecognized options: --lanes"),
        (["sweep", "task.py", "--seed=x"], "Error parsing --seed"),
        (["sweep", "task.py", "--enqueue=nix.json"], "--enqueue is 'nix.json': .*No s"),
        (["sweep", "task.py", "--max-resorce=2"], "--max-resource INT"),
        (["sweep", "./task"], "no such file; did you mean ./task.py"),
        (["swep"], "there is no command 'swep'; did you mean 'sweep'"),
    ],
)
def test_wrong_use(here, capsys, args, said):
    code, out, err = run(capsys, *args)
    assert code == 2 and out == "" and re.search(said, err)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[{", "Expecting property name"),
        ('{"dropout": 0.1}', "expected a list of objects, such as"),
        ("[1]", "which holds .1.; expected"),
    ],
)
def test_trials_to_enqueue_that_will_not_do(here, capsys, text, said):
    (here / "trials.json").write_text(text)
    code, _, err = run(capsys, "sweep", "task.py", "--enqueue=trials.json")
    assert code == 2 and re.search(f"error: --enqueue is 'trials.json'.*{said}", err)


def test_flags_reach_the_sweep(here, capsys):
    trials = [{"learning_rate": 0.05, "dropout": 0.25, "width": 8}]
    (here / "trials.json").write_text(json.dumps(trials))
    args = ["--max-resource=1", "--metric=loss", "--mode=min", "--seed=3"]
    args += ["--enqueue=trials.json", "--directory=b", "--policy=none"]
    assert run(capsys, "sweep", "task.py", *QUICK, *args)[0] == 0
    (trial,) = jp.load("b").trials
    asked = json.loads((here / "b" / "sweep.json").read_text())
    assert dict(trial.hparams) == trials[0]
    assert (asked["metric"], asked["mode"], asked["seed"]) == ("loss", "min", 3)


def test_all_trials_failed(here, capsys):
    text = "from task import *\nspace = jp.Space(learning_rate=1e30, dropout=0.0, "
    path = module(here, "diverges", f"{text}width=8)")
    args = ["--max-resource=1", "--directory=c"]
    code, _, err = run(capsys, "sweep", path, *QUICK, *args)
    assert code == 1 and err.startswith("error: no trial of this sweep has a finite")


def test_status_of_a_complete_sweep(here, capsys):
    code, out, _ = run(capsys, "status", "a")
    best = jp.load("a").best
    assert code == 0 and out.startswith("a: complete\n")
    assert "5 trials: 2 STOPPED, 3 COMPLETE" in out or "3 COMPLETE" in out
    assert re.search(r"6 readings, the last \d+:\d\d:\d\d ago, of trial \d", out)
    assert f"trial {best.trial_id} after {best.steps} steps" in out
    assert re.search(r"^ +0 +3/3 x 1 +2/2 x 3 *$", out, re.M)


@pytest.fixture
def running(here):
    """A copy of the sweep as it was after its first two readings."""
    directory = here / "running"
    shutil.copytree(here / "a", directory, dirs_exist_ok=True)
    asked = json.loads((directory / "sweep.json").read_text())
    del asked["outcome"]
    (directory / "sweep.json").write_text(json.dumps(asked))
    journal = directory / "journal.jsonl"
    journal.write_text("".join(journal.read_text().splitlines(True)[:2]))
    return directory


def test_status_of_a_running_sweep(running, capsys):
    code, out, _ = run(capsys, "status", running)
    assert code == 0 and "not running; the same command goes on with it\n" in out
    lock = Lock(running)
    code, out, _ = run(capsys, "status", running)
    lock.release()
    assert code == 0 and f": running, as process {os.getpid()} on " in out
    assert "2 readings, " in out and "RUNNING" in out
    assert re.search(r"running, or ready to: \d(, \d)+\n", out)
    assert "on the test split" not in out and "best accuracy" in out


def test_nobody_holds_what_is_left_or_copied(running, tmp_path):
    lock = Lock(running)
    assert holder(running) is not None
    copy = shutil.copytree(running, tmp_path / "copy")
    lock.release()
    left = {"host": socket.gethostname(), "pid": 2**22 + 1, "started": 1}
    left["file"] = (running / "lock").stat().st_ino
    (running / "lock").write_text(json.dumps(left))
    assert [holder(path) for path in (running, copy, tmp_path)] == [None] * 3
    (running / "lock").write_text(json.dumps(left | {"host": "elsewhere"}))
    assert holder(running) == f"process {2**22 + 1} on elsewhere"


def test_report(running, tmp_path, capsys):
    code, out, _ = run(capsys, "report", running, f"--to={tmp_path / 'page'}")
    assert code == 0 and out == f"{tmp_path / 'page' / 'index.html'}\n"
    assert "learning_rate" in (tmp_path / "page" / "index.html").read_text()


def test_compare(here, running, capsys):
    asked = json.loads((running / "sweep.json").read_text())
    asked["seed"], asked["space"]["dropout"] = 7, "uniform(0.0, 0.9)"
    (running / "sweep.json").write_text(json.dumps(asked))
    code, out, _ = run(capsys, "compare", "a", "running")
    table, _, otherwise = out.partition("\nasked otherwise\n")
    rows = {line.split()[0]: line.split()[1:] for line in table.splitlines()}
    loaded = jp.load("a")
    best, test = loaded.best_score, loaded.test_metrics["accuracy"]
    assert code == 0 and rows["a"][:5] == [
        *("accuracy", f"{best:.4g}", f"{test:.4g}", "5", "11")
    ]
    assert rows["running"][-1] == "-"  # It has not said how long it took.
    assert re.search(r"^seed +0 +7 *$", otherwise, re.M)
    assert re.search(
        r"^dropout +uniform\(0.0, 0.5\) +uniform\(0.0, 0.9", otherwise, re.M
    )
    assert "learning_rate" not in otherwise
    code, out, _ = run(capsys, "compare", "a", "a")
    assert code == 0 and out.endswith("asked alike\n")


def test_compare_counts_all_parts_of_a_sweep(here, capsys):
    parts = shutil.copytree(here / "a", here / "parts")
    asked = json.loads((parts / "sweep.json").read_text())
    asked["outcome"]["stats"] |= {"lane_steps": 1, "lane_epochs": 1}
    (parts / "sweep.json").write_text(json.dumps(asked))
    _, out, _ = run(capsys, "compare", "a", "parts")
    whole, part = (line.split()[1:] for line in out.splitlines()[1:3])
    assert part == [*whole[:-1], "-"] and whole[-1] != "-"


def test_export(here, running, capsys):
    kinds = [("csv", "x/a.csv"), ("parquet", "x/a.parquet"), ("tensorboard", "x/tb")]
    url = f"sqlite:///{here}/study.db"
    flags = [f"--{kind}={path}" for kind, path in kinds]
    code, out, _ = run(
        capsys, "export", "a", *flags, f"--optuna={url}", "--study=s", "--readings"
    )
    assert code == 0 and all(f"{kind}: {path}\n" in out for kind, path in kinds)
    table = pd.read_csv("x/a.csv")
    assert len(table) == 6 == len(pd.read_parquet("x/a.parquet"))
    assert len(list(pathlib.Path("x/tb").iterdir())) == 5
    optuna = pytest.importorskip("optuna")
    assert len(optuna.load_study(study_name="s", storage=url).trials) == 5
    code, _, err = run(capsys, "export", "a")
    assert code == 2 and "at least one of --csv, --parquet, --optuna, --tens" in err


@pytest.mark.parametrize("command", ["status", "report", "compare", "verify"])
def test_a_directory_without_a_sweep(here, capsys, command):
    code, out, err = run(capsys, command, "nix")
    assert (code, out) == (1, "") and err.startswith("error: directory is 'nix', which")
    assert err.count("\n") == 1
    assert run(capsys, "compare")[0] == 2


def test_verify(here, capsys):
    code, out, _ = run(capsys, "verify", "a", "--k=2", "--workers=1")
    assert code == 0 and len(re.findall(r" 0 +0 +ok: to the bit\n", out)) == 2
    path = module(here, "other", "from task import task, space\ntask.batch_size = 16")
    code, _, err = run(capsys, "verify", "a", f"--module={path}")
    assert code == 1 and err.startswith("error: task is not the one of the sweep:")
    (here / "a" / NOTE).rename(here / "a" / "gone")
    code, _, err = run(capsys, "verify", "a")
    (here / "a" / "gone").rename(here / "a" / NOTE)
    assert code == 2 and err.endswith("from which module it was run; give --module\n")


def test_verify_tells_when_scores_differ(here, running, capsys):
    journal = running / "journal.jsonl"
    lines = [
        json.loads(line) for line in (here / "a/journal.jsonl").read_text().splitlines()
    ]
    for line in lines:
        line["accuracy"] = line["score"] = line["accuracy"] + 0.001
        del line["crc"]
    journal.write_text("".join(encode(line) + "\n" for line in lines))
    code, out, _ = run(capsys, "verify", running, "--k=1", "--workers=1")
    assert code == 1 and "0.001" in out and "NOT OK: to the bit" in out


def test_devices(capsys):
    code, out, _ = run(capsys, "devices")
    assert code == 0 and re.search(
        r"^\d+ workers by default, one a (core|device)", out, re.M
    )
    assert "packed: " in out and "GiB" in out


def test_flags_cover_what_a_sweep_takes():
    parameters = set(inspect.signature(jp.sweep).parameters)
    ours = set(Flags().options()) | {"directory"}
    others = {"task", "space", "scheduler", "on_record", "checkpoint_seconds"}
    assert ours == parameters - others


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(capsys, command):
    code, out, _ = run(capsys, command, "--help")
    assert code == 0
    assert f"python -m jaxpack {command}" in out.partition("\n")[2]
    assert COMMANDS[command].__doc__.splitlines()[0] in out


def test_the_overview_has_all_commands(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0 and all(f"\n  {name} " in out for name in COMMANDS)
    code, again, _ = run(capsys)
    assert code == 2 and again == out
    # Every word that the README says behind the program's name is a command.
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"python -m jaxpack (\w+)", readme)) <= {*COMMANDS}


@pytest.mark.parametrize(("number", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_ends_it_with_how_to_go_on(here, capsys, monkeypatch, number, code):
    read, signals = driver.Driver._read, [signal.Signals[number]]

    def read_and_kill(*args):
        if signals:
            signal.raise_signal(signals.pop())
        return read(*args)

    with monkeypatch.context() as patch:
        patch.setattr(driver.Driver, "_read", read_and_kill)
        args = [f"--directory={number}", "--overwrite"]
        found, _, err = run(capsys, "sweep", "task.py", *QUICK, *args)
    assert found == code and err.startswith(f"ended by {number}; to go on:\n  python")
    again = err.splitlines()[-1].split()
    assert again[:4] == ["python", "-m", "jaxpack", "sweep"]
    assert "--overwrite" not in again and not jp.load(number).ended
    assert run(capsys, *again[3:])[0] == 0
    scores = [jp.load(name).to_pandas()["score"] for name in (number, "a")]
    assert scores[0].equals(scores[1])


def test_the_process_exits_with_the_code(here):
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "jaxpack", "sweep", "nix.py"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=here)
    assert done.returncode == 2 and done.stderr.startswith("error: module is 'nix.py'")
