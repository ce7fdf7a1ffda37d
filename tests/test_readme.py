"""The README's example runs as it stands, and its paths exist."""

from __future__ import annotations

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


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


@pytest.mark.parametrize("name", sorted({*re.findall(r"`([\w/]+(?:\.py|/))`", README)}))
def test_what_the_layout_names_exists(name):
    assert (ROOT / name).exists() or (ROOT / "jaxpack" / name).exists()
