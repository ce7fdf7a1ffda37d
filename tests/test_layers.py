"""Imports inside the package point only downwards through its layers."""

from __future__ import annotations

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1] / "jaxpack"

# The first part of a module's name under `jaxpack`, from the bottom layer to the top.
LAYERS = (
    {"types", "compat", "checks"},
    {"trees", "jaxprs", "timeline", "policies", "data", "models", "combine"}
    | {"space", "dimensions", "fixed", "schedulers", "forecast", "widths"}
    | {"nn", "nnx", "conv", "pool", "threefry", "rewrite"}
    | {"optimizers", "schedules", "metrics"},
    {"task", "step", "probe", "detect"},
    {"engines"},
    {"executables", "planner", "plans", "groups", "memory", "tune"}
    | {"pack", "bundle", "worker"}
    | {"store", "checkpoints", "interrupt", "journal", "lock", "records", "weights"},
    {"ledger", "resume", "driver", "sweep", "train", "explain", "progress"}
    | {"report", "load", "exports", "predict", "export", "verify"},
    {"cli"},
    {"__main__"},
)
LAYER = {name: layer for layer, names in enumerate(LAYERS) for name in names}

# Imports within a layer; a package's modules may also import each other.
SIDEWAYS = {
    ("space", "dimensions"),
    ("fixed", "dimensions"),
    ("fixed", "space"),
    ("policies", "dimensions"),
    ("policies", "space"),
    ("models", "conv"),
    ("models", "nn"),
    ("rewrite", "conv"),
    ("rewrite", "pool"),
    ("rewrite", "threefry"),
    ("optimizers", "nn"),
    ("nnx", "nn"),
    ("step", "task"),
    ("probe", "step"),
    ("probe", "task"),
    ("detect", "probe"),
    ("detect", "step"),
    ("detect", "task"),
    ("pack", "executables"),
    ("bundle", "executables"),
    ("bundle", "pack"),
    ("tune", "bundle"),
    ("tune", "executables"),
    ("tune", "pack"),
    ("forecast", "schedulers"),
    ("widths", "forecast"),
    ("memory", "bundle"),
    ("memory", "executables"),
    ("planner", "groups"),
    ("planner", "memory"),
    ("planner", "plans"),
    ("planner", "tune"),
    ("worker", "bundle"),
    ("worker", "executables"),
    ("records", "journal"),
    ("records", "store"),
    ("worker", "pack"),
    ("train", "ledger"),
    ("predict", "train"),
    ("export", "predict"),
    ("store", "checkpoints"),
    ("store", "journal"),
    ("store", "lock"),
    ("resume", "ledger"),
    ("driver", "ledger"),
    ("driver", "progress"),
    ("driver", "resume"),
    ("driver", "train"),
    ("sweep", "driver"),
    ("sweep", "ledger"),
    ("sweep", "progress"),
    ("sweep", "resume"),
    ("report", "progress"),
    ("sweep", "explain"),
    ("sweep", "report"),
    ("load", "report"),
    ("load", "sweep"),
    ("exports", "load"),
    ("exports", "report"),
    ("exports", "sweep"),
    ("explain", "ledger"),
    ("explain", "train"),
    ("verify", "ledger"),
    ("verify", "resume"),
    ("verify", "sweep"),
    ("verify", "train"),
}

HOST_ONLY = {"dimensions", "space", "fixed", "schedulers", "policies", "combine"} | {
    "forecast",
    "widths",
}
ACCELERATOR = {"jax", "jaxlib", "flax", "optax", "chex", "orbax"}

MODULES = sorted(
    path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
    for path in ROOT.rglob("*.py")
    if path != ROOT / "__init__.py"
)


def imports(source: str) -> set[str]:
    """Returns the full names of what a module imports, wherever it does so."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            if module == "jaxpack":
                found |= {f"jaxpack.{alias.name}" for alias in node.names}
            else:
                found.add(module)
    return found


def violations(module: str, source: str) -> list[str]:
    """Returns the imports that a module may not have, with the reason."""
    own = module.split(".")[0]
    if own not in LAYER:
        return [f"{module} is in no layer: add it to LAYERS"]
    wrong = []
    for name in sorted(imports(source)):
        first, _, rest = name.partition(".")
        target = rest.split(".")[0]
        if not first:
            wrong.append(f"{module} imports {name}: write the absolute name")
        elif first != "jaxpack":
            if own in HOST_ONLY and first in ACCELERATOR:
                wrong.append(f"{module} imports {name}, but runs on the host only")
        elif target not in LAYER:
            wrong.append(f"{module} imports {name}, which is no module of a layer")
        elif target == own or (own, target) in SIDEWAYS:
            continue
        elif LAYER[target] >= LAYER[own]:
            wrong.append(f"{module} (L{LAYER[own]}) imports L{LAYER[target]} {name}")
    return wrong


def uses_outside_annotations(source: str, name: str) -> list[int]:
    """Returns the lines where `name` is used other than in an annotation."""
    tree = ast.parse(source)
    annotations = set()
    for node in ast.walk(tree):
        for field in ("annotation", "returns"):
            if (annotation := getattr(node, field, None)) is not None:
                annotations |= set(ast.walk(annotation))
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and node.id == name and node not in annotations
    ]


def table() -> str:
    """Returns the layers from top to bottom in Markdown, as `jaxpack/README.md` has.

    What a module is for is the first line of its docstring.
    """
    lines = ["| layer | module | what it is | beside lower layers, imports |"]
    lines.append("|---|---|---|---|")
    for name in sorted(LAYER, key=lambda name: (-LAYER[name], name)):
        path = ROOT / name / "__init__.py"
        path = path if path.exists() else ROOT / f"{name}.py"
        if not path.exists():
            continue
        doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        beside = ", ".join(f"`{b}`" for a, b in sorted(SIDEWAYS) if a == name)
        first = doc.splitlines()[0].replace("|", "\\|")
        lines.append(f"| {LAYER[name]} | `{name}` | {first} | {beside} |")
    return "\n".join(lines)


def test_the_map_has_every_module():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert table() in text, "renew it with: python tests/test_layers.py"


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_downwards(module):
    path = ROOT / (module.replace(".", "/") + ".py")
    assert violations(module, path.read_text(encoding="utf-8")) == []


def test_every_layer_is_checked():
    assert {"types", "data.dataset", "schedulers.hyperband"} <= set(MODULES)


def test_types_use_jax_in_annotations_only():
    source = (ROOT / "types.py").read_text(encoding="utf-8")
    assert uses_outside_annotations(source, "jax") == []


@pytest.mark.parametrize(
    ("module", "source", "allowed"),
    [
        ("step", "from jaxpack.types import HParams", True),
        ("step", "from jaxpack import nn, trees", True),
        ("step", "import jaxpack.nn", True),
        ("detect", "from jaxpack import step", True),
        ("step", "from jaxpack import detect", False),
        ("step", "from jaxpack.engines.packed import advance", False),
        ("step", "from jaxpack.engines import packed", False),
        ("step", "from jaxpack import trees, worker", False),
        ("step", "def f():\n    from jaxpack import sweep", False),
        ("step", "import jaxpack as jp", False),
        ("step", "from jaxpack import Dataset", False),
        ("step", "from . import trees", False),
        ("models.lenet", "from jaxpack.models.mlp import MLP", True),
        ("models.lenet", "from jaxpack.conv import conv_general_dilated", True),
        ("trees", "from jaxpack.conv import conv_general_dilated", False),
        ("types", "from jaxpack.trees import stack", False),
        ("novelty", "", False),
        ("space", "import numpy", True),
        ("space", "import jax.numpy as jnp", False),
        ("schedulers.hyperband", "from jax import lax", False),
    ],
)
def test_the_check_itself(module, source, allowed):
    assert (violations(module, source) == []) == allowed


def test_the_check_of_annotations_itself():
    assert (
        uses_outside_annotations("def f(x: jax.Array) -> jax.Array: ...", "jax") == []
    )
    assert uses_outside_annotations("y: jax.Array = 0\nx = jax.numpy", "jax") == [2]


if __name__ == "__main__":
    old = (ROOT / "README.md").read_text(encoding="utf-8")
    start = old.index("| layer |")
    (ROOT / "README.md").write_text(
        old[:start] + table() + old[old.index("\n\n", start) :], encoding="utf-8"
    )
