"""The user's module: what is trained, and what is tried."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxpack.cli.errors import UsageError
from jaxpack.schedulers import Scheduler
from jaxpack.task import Task

NOTE = "module.json"
"""The file in a sweep's directory that says from which module it was run."""

_TO_BEGIN = "`python -m jaxpack init` writes one to begin with"


@dataclasses.dataclass(frozen=True)
class Experiment:
    """What a module defines.

    Attributes:
      name: The module's name without its package.
      task: What is trained.
      space: The hparams to try.
      scheduler: The scheduler, or None.
    """

    name: str
    task: Task
    space: Any
    scheduler: Scheduler | None = None


def load(module: str, folder: Path | None = None) -> Experiment:
    """Imports a module and takes `task`, `space` and, if any, `scheduler` from it.

    Args:
      module: The path of a Python file, whose folder is searched for what it
        imports, or a dotted name, for which `folder` is.
      folder: Where the module's path or name counts from; the current folder if None.

    Raises:
      UsageError: If there is no such module, or it lacks one of them.
      Exception: Whatever the module itself raises.
    """
    folder = folder or Path.cwd()
    find = _from_file if _is_file(module) else _by_name
    loaded = find(module, folder)
    name = loaded.__name__.rpartition(".")[2].removeprefix("_")
    task, space = (_take(loaded, module, what) for what in ("task", "space"))
    return Experiment(name, task, space, getattr(loaded, "scheduler", None))


def note(directory: Path | None, module: str) -> None:
    """Writes into a sweep's directory which module it has been run from."""
    if directory is not None and directory.is_dir():
        noted = {"module": module, "folder": str(Path.cwd())}
        (directory / NOTE).write_text(json.dumps(noted) + "\n", encoding="utf-8")


def noted(directory: Path) -> Experiment:
    """Loads the module that a sweep has been run from.

    Raises:
      UsageError: If that is not known, or the module is there no more.
      Exception: Whatever the module itself raises.
    """
    path = directory / NOTE
    if not path.is_file():
        raise UsageError(
            f"directory {str(directory)!r} does not say from which module it was run; "
            "give --module"
        )
    noted = json.loads(path.read_text(encoding="utf-8"))
    try:
        return load(noted["module"], Path(noted["folder"]))
    except UsageError as error:
        raise UsageError(
            f"{error} (in {noted['folder']!r}, where the sweep was run); if it has "
            "been moved, give --module"
        ) from None


def _is_file(module: str) -> bool:
    return module.endswith(".py") or "/" in module or "\\" in module


def _from_file(module: str, folder: Path) -> ModuleType:
    path = folder / module
    if path.is_dir():
        raise UsageError(f"module is {module!r}, a folder; expected a Python file")
    if not path.is_file():
        there = path.with_name(f"{path.name}.py").is_file()
        hint = f"did you mean {module}.py?" if there else _TO_BEGIN
        raise UsageError(f"module is {module!r}, and there is no such file; {hint}")
    _search_first(path.resolve().parent)
    # A name of its own: not that of another module, such as jax.py.
    spec = importlib.util.spec_from_file_location(f"_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UsageError(f"module is {module!r}; expected a file that ends in .py")
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded  # Dataclasses look themselves up there.
    spec.loader.exec_module(loaded)
    return loaded


def _by_name(module: str, folder: Path) -> ModuleType:
    _search_first(folder)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise  # Something that the module imports.
        file = f"{module}.py"
        hint = f"; for the file: {file}" if Path(file).is_file() else ""
        raise UsageError(
            f"module is {module!r}, and there is no such module{hint}"
        ) from None


def _search_first(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _take(loaded: ModuleType, module: str, what: str) -> Any:
    if hasattr(loaded, what):
        return getattr(loaded, what)
    names = [name for name in vars(loaded) if not name.startswith("_")]
    alike = [name for name in names if name.lower() == what]
    near = alike or difflib.get_close_matches(what, names, 1)
    hint = f" (it has `{near[0]}`)" if near else ""
    made = {"task": "jaxpack.Task(...)", "space": "jaxpack.Space(...)"}[what]
    raise UsageError(f"module {module!r} has no `{what}`{hint}; write {what} = {made}")
