"""One directory a sweep: what was asked, what came of it, and how far its trials are.

| name | what |
|---|---|
| `sweep.json` | what was asked, the plan, versions, and at the end how it went |
| `journal.jsonl` | a line for every reading of every trial: the truth |
| `checkpoints/` | the newest state of every trial that may train on |
| `best/` | the weights of the best trials |
| `lock` | who writes to the directory |
| `module.json` | where the command line took the task from |

Nothing else in it names another place, so that it may be moved.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxpack import checkpoints
from jaxpack.checkpoints import Background, Checkpoints
from jaxpack.journal import Journal, plain, sync
from jaxpack.lock import Lock
from jaxpack.types import LaneState

ASKED = "sweep.json"
JOURNAL = "journal.jsonl"
CHECKPOINTS = "checkpoints"
BEST = "best"
_log = logging.getLogger("jaxpack")


class Usage(NamedTuple):
    """What a sweep's checkpoints have cost.

    Attributes:
      count: Checkpoints written.
      seconds: Time spent writing them, beside the training.
      size_bytes: What the newest take up on disk.
    """

    count: int = 0
    seconds: float = 0.0
    size_bytes: int = 0


class Store:
    """A sweep's directory while the sweep runs.

    Args:
      directory: The directory, made if need be.
      overwrite: Moves a sweep that is already there aside, to a name with the time.

    Attributes:
      asked: What `sweep.json` says; empty for a new sweep.

    Raises:
      ValueError: If the directory is a file, in use, or damaged.
      OSError: If it cannot be written.
    """

    def __init__(self, directory: str | os.PathLike, overwrite: bool = False):
        self.directory = Path(directory)
        if self.directory.exists() and not self.directory.is_dir():
            raise ValueError(f"directory is {str(self.directory)!r}, which is a file")
        self.asked: dict[str, Any] = {}
        self._journal: Journal | None = None
        self._states = Checkpoints(self.directory / CHECKPOINTS)
        self._best = Checkpoints(self.directory / BEST)
        self._best_on_disk: frozenset[tuple[int, int]] = frozenset()
        self._writer = Background()
        self._lock = self._enter()
        try:
            if overwrite and _held(self.directory):
                _move_aside(self.directory)  # With its lock, so that nobody enters.
                self._lock.release()
                self._lock = self._enter()
            self.asked = read_asked(self.directory)
            if self.asked:
                self._open_journal()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        # Who interrupts does not want to wait.
        self.close(wait=kind is None or not issubclass(kind, KeyboardInterrupt))

    @property
    def records(self) -> list[dict[str, Any]]:
        """What the journal said when it was opened."""
        return [] if self._journal is None else self._journal.records

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._writer.busy

    @property
    def usage(self) -> Usage:
        """What checkpoints have cost so far."""
        both = self._states, self._best
        return Usage(*(sum(getattr(x, f) for x in both) for f in Usage._fields))

    @property
    def _id(self) -> str:
        """What tells the sweep from others; old ones have nothing."""
        return self.asked.get("id", "")

    def write(self, **asked: Any) -> None:
        """Puts things into `sweep.json`; None takes them out."""
        merged = {**(self.asked or {"id": uuid.uuid4().hex}), **asked}
        self.asked = {key: value for key, value in merged.items() if value is not None}
        with self._explained():
            _write_json(self.directory / ASKED, self.asked)
        if self._journal is None:
            self._open_journal()

    def append(self, record: Mapping[str, Any]) -> None:
        """Adds a line to the journal, and to the disk."""
        assert self._journal is not None, "sweep.json comes first"
        with self._explained():
            self._journal.append(record)

    def save(
        self, states: Mapping[int, LaneState], best: Mapping[int, LaneState]
    ) -> None:
        """Starts to write a checkpoint, once the one before is complete.

        Args:
          states: The newest state of every trial that may train on.
          best: The best trials' states at their best readings.
        """
        states, best = dict(states), dict(best)
        with self._explained():
            self._writer.run(lambda: self._save(states, best))

    def wait(self) -> None:
        """Waits until the checkpoint that is being written is complete."""
        with self._explained():
            self._writer.wait()

    def load(self, expected: Mapping[int, LaneState]) -> dict[int, LaneState]:
        """The newest states on disk, of the trials in `expected` (their avals)."""
        found, wrong = checkpoints.unstack(self._states.load(), expected, self._id)
        for trial_id, reason in wrong.items():
            _log.warning(
                "the checkpoint of trial %d is of no use: %s; the trial starts again",
                trial_id,
                reason,
            )
        return found

    def load_best(self, expected: Mapping[int, LaneState]) -> dict[int, LaneState]:
        """The best trials' states on disk, of the trials in `expected`."""
        found, wrong = checkpoints.unstack(self._best.load(), expected, self._id)
        for trial_id, reason in wrong.items():
            _log.warning("the weights of trial %d are of no use: %s", trial_id, reason)
        self._best_on_disk = frozenset((i, int(s.step)) for i, s in found.items())
        return found

    def finish(self) -> None:
        """Deletes the states that nobody goes on from any more."""
        with self._explained():
            self._states.clear()

    def close(self, *, wait: bool = True) -> None:
        """Lets others write to the directory, once nothing is written any more.

        Args:
          wait: Whether to return only then, if a checkpoint is being written.
        """
        if not wait and self.busy:
            # The lock is let go of once nothing is written any more.
            threading.Thread(target=self.close, daemon=True).start()
            return
        with contextlib.suppress(Exception):  # Another error is on its way.
            self._writer.wait()
        if self._journal is not None:
            self._journal.close()
        if not (self.directory / ASKED).exists():
            self._lock.path.unlink(missing_ok=True)
        self._lock.release()

    def _save(
        self, states: Mapping[int, LaneState], best: Mapping[int, LaneState]
    ) -> None:
        kept = frozenset((i, int(state.step)) for i, state in best.items())
        try:
            # The best first: until they are on disk, the states before may be needed.
            if kept and kept != self._best_on_disk:
                self._best.save(checkpoints.apart(best, self._id))
                self._best_on_disk = kept
            if states:
                self._states.save(checkpoints.stack(states, self._id))
        except Exception as error:  # Orbax may say in other words what the disk says.
            raise OSError(getattr(error, "errno", None), str(error)) from error

    def _enter(self) -> Lock:
        with self._explained():
            self.directory.mkdir(parents=True, exist_ok=True)
            return Lock(self.directory)

    def _open_journal(self) -> None:
        with self._explained():
            self._journal = Journal(self.directory / JOURNAL)

    @contextlib.contextmanager
    def _explained(self) -> Generator[None]:
        """Says with an error of the disk what it means for the sweep."""
        try:
            yield
        except OSError as error:
            raise OSError(
                error.errno,
                f"directory {str(self.directory)!r} cannot be written: {error}; what "
                "is there is whole: once it can be, the same call goes on from it",
            ) from error


def read_asked(directory: Path) -> dict[str, Any]:
    """What `sweep.json` says, or nothing for a new directory.

    Raises:
      ValueError: If it is damaged, or gone. What is left of another sweep must not
        be taken for this one's.
    """
    path = directory / ASKED
    remedy = "name another directory, or restore the file"
    if not path.exists():
        if left := _held(directory):
            raise ValueError(f"{str(left)!r} has no {ASKED} beside it; {remedy}")
        return {}
    try:
        asked = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is damaged: {error}; {remedy}") from error
    if not isinstance(asked, dict):
        raise ValueError(f"{str(path)!r} holds no sweep; {remedy}")
    return asked


def _held(directory: Path) -> Path | None:
    """A file or folder of a sweep that is in the directory; None if there is none."""
    names = (ASKED, JOURNAL, CHECKPOINTS, BEST)
    return next((p for p in (directory / n for n in names) if p.exists()), None)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replaces a file, all or nothing."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(json.dumps(plain(content), indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync(path.parent)


def _move_aside(directory: Path) -> None:
    directory = directory.resolve()  # "." has no name to put a time behind.
    stamp = time.strftime("%Y%m%d-%H%M%S")
    aside = directory.with_name(f"{directory.name}.{stamp}")
    count = 0
    while aside.exists():
        count += 1
        aside = directory.with_name(f"{directory.name}.{stamp}-{count}")
    os.replace(directory, aside)
