"""One writer a directory: a lock that says who holds it, and outlives nobody."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Not a POSIX system.
    fcntl = None

FILE = "lock"
_log = logging.getLogger("jaxpack")


class Lock:
    """Holds a directory's lock until released, or until the process ends.

    The kernel frees the lock of a process that dies, however it dies. The file says
    who holds it, for messages, and for another host, whose kernel may not know.

    Args:
      directory: An existing directory.

    Raises:
      ValueError: If another process writes to the directory, or may do so on another
        host.
      OSError: If the file cannot be written.
    """

    def __init__(self, directory: Path):
        self.path = directory / FILE
        self._file, free = _open(self.path)
        try:
            owner = _read(self._file)
            self._check(free, owner)
            if owner:
                _log.warning("taking over %s from %s, which is gone", *self._of(owner))
            _write(self._file, {**_myself(), "file": os.fstat(self._file).st_ino})
        except BaseException:
            os.close(self._file)
            raise

    def release(self) -> None:
        """Lets others write; again does nothing."""
        if self._file >= 0:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, 0)
            if fcntl is not None:  # A process forked from this one has it open, too.
                with contextlib.suppress(OSError):
                    fcntl.flock(self._file, fcntl.LOCK_UN)
            os.close(self._file)
            self._file = -1

    def _check(self, free: bool | None, owner: dict[str, Any]) -> None:
        """Raises ValueError if the lock is in use."""
        directory, who = self._of(owner)
        if free is False:
            raise ValueError(
                f"directory {directory} is being written by {who}; wait for it to end, "
                "or name another directory"
            )
        # A copy of the directory has a file of its own, which nobody holds.
        if not owner or owner.get("file") != os.fstat(self._file).st_ino:
            return
        if owner.get("host") != socket.gethostname():
            raise ValueError(
                f"directory {directory} was last written by {who}, which cannot be "
                f"asked from this host; if it has ended, delete {str(self.path)!r} and "
                "call again"
            )
        if free is None and _running(owner):
            raise ValueError(f"directory {directory} is being written by {who}")

    def _of(self, owner: dict[str, Any]) -> tuple[str, str]:
        who = "another process"
        if owner:
            who = _name(owner)
        return repr(str(self.path.parent)), who


def _open(path: Path) -> tuple[int, bool | None]:
    """Opens the lock file, and says whether it was free, as `_try_lock` does.

    Whoever held it may have deleted it or moved it away after it was opened here;
    then another may hold the one that has its name now.
    """
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            free = _try_lock(file)
            if free is False or os.path.samestat(os.fstat(file), os.stat(path)):
                return file, free
        except FileNotFoundError:
            pass
        os.close(file)


def holder(directory: Path) -> str | None:
    """Who writes to a directory, as far as can be told from here; None if nobody.

    On another host, its process may have died since.
    """
    try:
        file = os.open(directory / FILE, os.O_RDONLY)
    except OSError:
        return None
    try:
        owner, number = _read(file), os.fstat(file).st_ino
    finally:
        os.close(file)
    # A copy of the directory has a file of its own, which nobody holds.
    if not owner or owner.get("file") != number:
        return None
    if owner.get("host") == socket.gethostname() and not _running(owner):
        return None
    return _name(owner)


def _name(owner: dict[str, Any]) -> str:
    return f"process {owner.get('pid')} on {owner.get('host')}"


def _try_lock(file: int) -> bool | None:
    """Whether the lock was free; None where the file system knows no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _read(file: int) -> dict[str, Any]:
    try:
        owner = json.loads(os.pread(file, 4096, 0) or b"{}")
    except ValueError:  # Its writer died over it.
        owner = {}
    return owner if isinstance(owner, dict) else {}


def _write(file: int, owner: dict[str, Any]) -> None:
    os.ftruncate(file, 0)
    os.pwrite(file, json.dumps(owner).encode(), 0)


def _myself() -> dict[str, Any]:
    pid = os.getpid()
    return {"host": socket.gethostname(), "pid": pid, "started": _started(pid)}


def _running(owner: dict[str, Any]) -> bool:
    """Whether the process is alive: its number alone may have gone to another."""
    pid, started = owner.get("pid"), owner.get("started")
    if not isinstance(pid, int):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # Somebody else's.
        return True
    return started is None or started == _started(pid)


def _started(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if not to be known."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[19])
    except (OSError, ValueError, IndexError):
        return None
