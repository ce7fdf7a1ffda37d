"""The project's files agree with each other, and a bare install imports everything."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

import pytest

import jaxpack

ROOT = pathlib.Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
    "project"
]
EXTRAS = PROJECT["optional-dependencies"]

# Where the name to import is not that of the distribution.
DISTRIBUTION = {
    "PIL": "pillow",
    "google": "protobuf",
    "orbax": "orbax-checkpoint",
    "sklearn": "scikit-learn",
    "skimage": "scikit-image",
    "tensorflow_datasets": "tensorflow-datasets",
    # Part of every jax, which declares it.
    "jaxlib": "jax",
}


def names(requirements: list[str]) -> set[str]:
    """Returns the names of the distributions required, without extras or versions."""
    return {re.split(r"[\[<>=!~; ]", requirement)[0] for requirement in requirements}


# What only one kind of export needs.
EXPORTS = ("optuna", "parquet", "tensorboard")
EXPORTED = {name for extra in EXPORTS for name in names(EXTRAS[extra])}


def imported(source: str) -> set[str]:
    """Returns the top-level packages that a module imports, wherever it does so."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found - set(sys.stdlib_module_names) - {"jaxpack", "__future__"}


def run_python(code: str) -> str:
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_metadata():
    assert PROJECT["name"] == "jaxpack"
    assert PROJECT["license"] == "Apache-2.0"
    assert PROJECT["scripts"] == {"jaxpack": "jaxpack.cli:main"}
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")
    minor = int(PROJECT["requires-python"].removeprefix(">=3."))
    assert (3, minor) <= sys.version_info
    assert f"(3, {minor})" in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_installed_version():
    try:
        installed = importlib.metadata.version("jaxpack")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("jaxpack is not installed here")
    assert installed == PROJECT["version"]
    assert getattr(jaxpack, "__version__", installed) == installed


def test_extras_contain_each_other():
    assert set(EXTRAS) == {"cuda12", "data", "experiments", "dev", *EXPORTS}
    assert "jaxpack[data]" in EXTRAS["experiments"]
    assert {"jaxpack[experiments]", f"jaxpack[{','.join(EXPORTS)}]"} <= set(
        EXTRAS["dev"]
    )
    core = names(PROJECT["dependencies"])
    for extra, requirements in EXTRAS.items():
        assert not (names(requirements) - {"jax"}) & core, extra


def test_core_requires_what_the_package_imports():
    core = names(PROJECT["dependencies"])
    for path in (ROOT / "jaxpack").rglob("*.py"):
        packages = imported(path.read_text(encoding="utf-8"))
        more = EXPORTED if path.parent.name == "exports" else set()
        assert {DISTRIBUTION.get(p, p) for p in packages} <= core | more, path


def test_extras_require_what_experiments_and_tests_import():
    known = names(PROJECT["dependencies"]) | names(EXTRAS["experiments"])
    known |= names(EXTRAS["data"])
    # The tests' other files, and what jax and pytest bring.
    for folder, more in (
        ("experiments", {"IPython"}),  # Notebooks bring it.
        ("tests", names(EXTRAS["dev"]) | EXPORTED | {"ml_dtypes"}),
    ):
        local = {path.stem for path in (ROOT / folder).glob("*.py")} | {"experiments"}
        for path in (ROOT / folder).rglob("*.py"):
            packages = imported(path.read_text(encoding="utf-8")) - local
            assert {DISTRIBUTION.get(p, p) for p in packages} <= known | more, path


def test_constraints_pin_every_requirement():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {re.split("==", line)[0] for line in lines if not line.startswith("#")}
    required = names(PROJECT["dependencies"]).union(*map(names, EXTRAS.values()))
    normal = {name.replace("_", "-").lower() for name in required}
    assert normal - {"jaxpack"} <= pinned


def test_every_module_imports_without_the_extras():
    output = run_python("""
import importlib, pkgutil, sys
for name in ("mlxtend", "sklearn", "skimage"):
    sys.modules[name] = None
import jaxpack, jaxpack.data
count = 0
for module in pkgutil.walk_packages(jaxpack.__path__, "jaxpack."):
    importlib.import_module(module.name)
    count += 1
for name in ("digits", "mnist5k", "photos"):
    try:
        jaxpack.data.load(name)
    except ImportError as error:
        assert 'pip install "jaxpack[data]"' in str(error), error
    else:
        raise AssertionError(name)
print(count)
""")
    assert int(output) > 5


def test_import_starts_no_device_and_no_tensorflow():
    run_python("""
import sys, jaxpack, jaxpack.data
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
assert "tensorflow" not in sys.modules
""")


def test_continuous_integration_calls_make():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    text = script.read_text(encoding="utf-8")
    assert "set -euo pipefail" in text
    assert text.index("make check") < text.index("make test")


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
def test_make_help_names_every_target():
    done = subprocess.run(
        ["make", "--no-print-directory"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    targets = {
        "install",
        "sweep",
        "test",
        "check",
        "bench",
        "experiments",
        "clean",
        "bench-gpu",
    }
    listed = {line.split()[0] for line in done.stdout.splitlines() if line[:2] == "  "}
    assert targets <= listed


def test_the_table_of_faults_names_tests_that_there_are():
    defined: dict[str, set[str]] = {}
    for path in (ROOT / "tests").glob("test_*.py"):
        found = re.findall(r"^def (test_\w+)", path.read_text("utf-8"), re.MULTILINE)
        defined[path.name] = set(found)
    every = set().union(*defined.values())
    text = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    named = re.findall(r"`(?:(test_\w+\.py)::)?(test_\w+)(\.\.\.|\.py)?`", text)
    assert len(named) > 60
    for file, name, rest in named:
        known = defined[file] if file else every
        if rest == ".py":
            assert f"{name}.py" in defined
        elif rest:
            assert any(test.startswith(name) for test in known), name
        else:
            assert name in known, name
