"""The notebooks are in step with their scripts, and run from end to end."""

from __future__ import annotations

import pathlib

import jupytext
import nbclient
import nbformat
import pytest

ROOT = pathlib.Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "experiments" / "notebooks").glob("*.ipynb"))
NAMES = [path.stem for path in NOTEBOOKS]


def cells(notebook):
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def test_there_are_both():
    assert NAMES == ["quickstart", "repeat_the_paper"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_the_script_has_the_same_cells(path):
    notebook = nbformat.read(path, nbformat.NO_CONVERT)
    script = jupytext.read(path.with_suffix(".py"))
    make = f"jupytext --sync {path.relative_to(ROOT).with_suffix('.py')}"
    assert cells(notebook) == cells(script), f"bring them in step with: {make}"
    for each in (notebook, script):
        assert each.metadata["jupytext"]["formats"] == "ipynb,py:percent"
    # Outputs would make every difference unreadable.
    assert not any(cell.get("outputs") for cell in notebook.cells)
    nbformat.validate(notebook)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=[pytest.mark.slow] * (path.stem != "quickstart"))
        for path in NOTEBOOKS
    ],
    ids=NAMES,
)
def test_it_runs(path, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXPACK_SMOKE", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(path, nbformat.NO_CONVERT)
    where = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=300, resources=where).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    text = "".join(output.get("text", "") for output in outputs)
    shown = [output.data.keys() for output in outputs if "data" in output]
    assert any("image/png" in kinds for kinds in shown)
    if path.stem == "quickstart":
        assert "the same table, three times" in text
        assert any("text/html" in kinds for kinds in shown)
        assert (tmp_path / "runs/quickstart/report/index.html").exists()
        assert (tmp_path / "runs/best/weights.npz").exists()
    else:
        assert "the same scores and promotions: True" in text
        written = {file.stem for file in tmp_path.rglob("*.json")}
        expected = {"pairwise", "pack_size", "shared_input", "switching"}
        assert written == expected | {"policies", "hyperband"}
