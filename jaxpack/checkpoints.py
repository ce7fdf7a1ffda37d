"""Checkpoints: numbered Orbax directories, of which the newest complete one counts.

They are written by a thread of their own, one at a time. Orbax writes beside and
renames, so that a directory with a number for a name is complete; the one before is
deleted only then. What Orbax does not find out (changed bytes, another shape or dtype)
the checksums and the comparison with the expected state do.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpack import trees
from jaxpack.types import LaneState, PyTree

_log = logging.getLogger("jaxpack")


class Background:
    """Runs one function at a time in a thread of its own."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def busy(self) -> bool:
        """Whether a function runs."""
        return self._thread is not None and self._thread.is_alive()

    def run(self, function: Callable[[], None]) -> None:
        """Starts a function, once the one before has ended.

        Raises:
          BaseException: What the one before has raised.
        """
        self.wait()
        self._thread = threading.Thread(
            target=self._run, args=(function,), name="jaxpack-checkpoint", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Waits for the function that runs, if any.

        Raises:
          BaseException: What it has raised.
        """
        if self._thread is not None:
            self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            self._error = error


class Checkpoints:
    """The checkpoints in one directory.

    Args:
      directory: The directory, made when it is first written to.

    Attributes:
      count: Checkpoints written.
      seconds: Time spent writing them.
      size_bytes: Size of the newest on disk.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self.count, self.seconds, self.size_bytes = 0, 0.0, 0

    def save(self, tree: Mapping[str, Any]) -> None:
        """Writes a checkpoint, then deletes those before.

        Args:
          tree: Nested dicts of numpy arrays.

        Raises:
          Exception: If it cannot be written; those before are still there.
        """
        start = time.perf_counter()
        self.directory.mkdir(exist_ok=True)
        complete = self._complete()
        number = int(complete[-1].name) + 1 if complete else 0
        new = self.directory.resolve() / f"{number:06d}"
        write(new, tree)
        for path in self.directory.iterdir():  # What was cut off, too.
            if path.is_dir() and path.name != new.name:  # No file is of our making.
                shutil.rmtree(path)
        files = [path for path in new.rglob("*") if path.is_file()]
        self.size_bytes = sum(path.stat().st_size for path in files)
        self.count += 1
        self.seconds += time.perf_counter() - start

    def load(self) -> Mapping[str, Any]:
        """The newest checkpoint that can be read; empty if there is none.

        Those that cannot be are named in the log.
        """
        for path in reversed(self._complete()):
            try:
                with _checkpointer() as checkpointer:
                    return checkpointer.restore(path.resolve())
            except Exception as error:  # Orbax passes on what its parts raise.
                reason = str(error).strip().split("\n")[0]
                _log.warning("checkpoint %r cannot be read: %s", str(path), reason)
        return {}

    def clear(self) -> None:
        """Deletes all checkpoints."""
        shutil.rmtree(self.directory, ignore_errors=True)
        self.size_bytes = 0

    def _complete(self) -> list[Path]:
        if not self.directory.is_dir():
            return []
        paths = [path for path in self.directory.iterdir() if path.name.isdigit()]
        return sorted(paths, key=lambda path: int(path.name))


def write(path: Path, tree: Mapping[str, Any]) -> None:
    """Writes nested dicts of arrays to a new Orbax directory, all or nothing."""
    import orbax.checkpoint as ocp  # Takes long, and only directories need it.

    with _checkpointer() as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(tree))


def _checkpointer() -> Any:
    import orbax.checkpoint as ocp

    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler())


def stack(states: Mapping[int, LaneState], sweep: str = "") -> dict[str, Any]:
    """States as a checkpoint: those of one form are stacked.

    Args:
      states: The state of each trial, on the host.
      sweep: What tells the sweep from others.

    Returns:
      A dict for each form: `trial_id` `[n]` int32, `crc` `[n]` uint32, and `state`,
      the states' leaves by name, each `[n, ...]`.
    """
    forms: dict[Any, dict[int, LaneState]] = {}
    for trial_id, state in states.items():
        shapes = tuple((leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(state))
        form = jax.tree.structure(state), shapes
        forms.setdefault(form, {})[trial_id] = state
    return {
        str(number): {
            "trial_id": np.array(list(alike), np.int32),
            "crc": np.array([checksum(i, alike[i], sweep) for i in alike], np.uint32),
            "state": trees.named(jax.tree.map(_stacked, *map(_sized, alike.values()))),
        }
        for number, alike in enumerate(forms.values())
    }


def apart(states: Mapping[int, LaneState], sweep: str = "") -> dict[str, Any]:
    """States as a checkpoint, each by itself, as people expect to find weights.

    Args:
      states: The state of each trial, on the host.
      sweep: What tells the sweep from others.

    Returns:
      By trial, a dict of `trial_id` `[]` int32, `crc` `[]` uint32, and `state`, the
      state's leaves by name.
    """
    return {
        str(trial_id): {
            "trial_id": np.asarray(trial_id, np.int32),
            "crc": np.asarray(checksum(trial_id, state, sweep), np.uint32),
            "state": trees.named(jax.tree.map(np.asarray, _sized(state))),
        }
        for trial_id, state in states.items()
    }


def unstack(
    checkpoint: Mapping[str, Any], expected: Mapping[int, LaneState], sweep: str = ""
) -> tuple[dict[int, LaneState], dict[int, str]]:
    """The states in a checkpoint that are whole and of the form they should be.

    Args:
      checkpoint: What `stack` or `apart` has made.
      expected: Shapes and dtypes of each trial's state.
      sweep: The sweep that the states have to be of.

    Returns:
      The states by trial, and for each of the others what is wrong with it.
    """
    states, wrong = {}, {}
    for part in checkpoint.values():
        if np.ndim(part["trial_id"]) == 0:
            part = jax.tree.map(lambda leaf: leaf[None], part)
        for lane, trial_id in enumerate(map(int, part["trial_id"])):
            if trial_id not in expected:
                continue
            try:
                state = _lane(part["state"], lane, expected[trial_id])
                if checksum(trial_id, state, sweep) != part["crc"][lane]:
                    raise ValueError("its checksum is wrong")
                states[trial_id] = state
            except (ValueError, LookupError) as error:
                wrong[trial_id] = str(error)
    return states, wrong


def checksum(trial_id: int, state: PyTree, sweep: str = "") -> int:
    """A checksum of a trial's state, by CRC-32: of another trial or sweep, another."""
    crc = zlib.crc32(f"{sweep}{trial_id}".encode())
    for leaf in jax.tree.leaves(state):
        crc = zlib.crc32(
            np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data, crc
        )
    return crc


def _stacked(*leaves: np.ndarray) -> np.ndarray:
    return np.stack(leaves)


def _lane(stacked: Mapping[str, Any], lane: int, expected: LaneState) -> LaneState:
    """One lane's state, checked against the shapes and dtypes expected.

    Raises:
      ValueError: If it has another form.
    """
    sized = _sized(expected)
    stacked = trees.unnamed(stacked, sized)
    for (path, aval), leaf in zip(
        jax.tree.leaves_with_path(sized), jax.tree.leaves(stacked), strict=True
    ):
        if (leaf.shape[1:], leaf.dtype) != (aval.shape, aval.dtype):
            raise ValueError(
                f"{'.'.join(trees.names(path))} is {leaf.dtype}{list(leaf.shape[1:])}, "
                f"expected {aval.dtype}{list(aval.shape)}"
            )

    def one(aval: Any, leaf: np.ndarray | None) -> np.ndarray:
        if leaf is None:
            return np.zeros(aval.shape, aval.dtype)
        return np.array(leaf[lane])  # Copied: a view would keep all lanes in memory.

    return jax.tree.map(one, expected, stacked)


def _sized(state: PyTree) -> PyTree:
    """A state without the leaves that hold nothing, which Orbax does not take."""
    return jax.tree.map(lambda leaf: leaf if leaf.size else None, state)
