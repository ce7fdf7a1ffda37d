"""What the command line says when something goes wrong, and its exit codes."""

from __future__ import annotations

import contextlib
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Generator
from pathlib import Path
from types import TracebackType
from typing import Any

DONE, FAILED, WRONG_USE = 0, 1, 2
SIGNALLED = 128
"""Plus the signal's number: 130 after Ctrl-C, 143 after SIGTERM."""

_PACKAGE = Path(__file__).resolve().parents[1]
_OTHERS = tuple(
    Path(path).resolve()
    for key in ("stdlib", "platstdlib", "purelib", "platlib")
    if (path := sysconfig.get_path(key))
)
_ON_PURPOSE = (ValueError, ImportError, OSError, RuntimeError, AttributeError)


_FLAGS = {
    "overwrite=True": "--overwrite",
    'mode="min"': "--mode min",
    'mode="max"': "--mode max",
}
"""What errors speak of in Python, and what that is on the command line."""


class UsageError(ValueError):
    """The command was called wrongly."""


def tell(error: Exception) -> int:
    """Prints an error to stderr, and returns the exit code.

    What jaxpack has raised on purpose is a line, with the user's line if one led to
    it. Anything else keeps its traceback, which begins with the user's code.
    """
    frames = traceback.extract_tb(error.__traceback__)
    mine = [frame for frame in frames if _is_users(frame.filename)]
    of_the_disk = isinstance(error, OSError) and not mine
    if not (_raised_here(error, frames) or of_the_disk):
        # JAX's remark that it has left out frames of its own tells a user nothing.
        notes = getattr(error, "__notes__", [])
        notes[:] = [note for note in notes if "JAX_TRACEBACK_FILTERING" not in note]
        tb = _from_users(error.__traceback__)
        # A module that cannot be parsed has no line in it.
        error.__traceback__ = None if isinstance(error, SyntaxError) else tb
        traceback.print_exception(error)
        return FAILED
    where = f" ({mine[-1].filename}, line {mine[-1].lineno})" if mine else ""
    text = str(error)
    for argument, flag in _FLAGS.items():
        text = text.replace(argument, flag)
    print(f"error: {text}{where}", file=sys.stderr)
    return WRONG_USE if isinstance(error, UsageError) else FAILED


def _raised_here(error: Exception, frames: traceback.StackSummary) -> bool:
    """Whether the innermost line is a `raise` of jaxpack's."""
    if not isinstance(error, _ON_PURPOSE) or not frames:
        return False
    inside = Path(frames[-1].filename).resolve().is_relative_to(_PACKAGE)
    return inside and (frames[-1].line or "").startswith("raise")


@contextlib.contextmanager
def warnings_in_a_line() -> Generator[None]:
    """Shows warnings without the line of code that gave them, while it lasts."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        print(f"warning: {message}", file=sys.stderr)

    shown, warnings.showwarning = warnings.showwarning, show
    try:
        yield
    finally:
        warnings.showwarning = shown


def _from_users(tb: TracebackType | None) -> TracebackType | None:
    """The part from the user's code on; where there is none, from the library's on."""
    for wanted in (_is_users, _is_librarys):
        first = tb
        while first is not None and not wanted(first.tb_frame.f_code.co_filename):
            first = first.tb_next
        if first is not None:
            return first
    return tb


def _is_librarys(filename: str) -> bool:
    """Whether a file is of jaxpack, but not of its command line."""
    path = Path(filename).resolve()
    return path.is_relative_to(_PACKAGE) and not path.is_relative_to(_PACKAGE / "cli")


def _is_users(filename: str) -> bool:
    """Whether a file is of neither jaxpack nor anything that is installed."""
    if filename.startswith("<"):
        return False
    path = Path(filename).resolve()
    return not any(path.is_relative_to(root) for root in (_PACKAGE, *_OTHERS))
