"""The journal of a sweep: a line for every reading, on disk before it is acted upon.

A line is a JSON object whose last field is a checksum of the rest. Numbers that are
not finite, which JSON has no word for, are None; what they are stands beside them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_log = logging.getLogger("jaxpack")
_CHECKSUM = re.compile(r', "crc": "([0-9a-f]{8})"}$')
NOT_FINITE = "not_finite"


def encode(record: Mapping[str, Any]) -> str:
    """A record as a line, without its end.

    Examples:
      >>> encode({"score": float("inf")})
      '{"score": null, "not_finite": {"score": "inf"}, "crc": "ae908642"}'
      >>> decode(_)
      {'score': inf}
    """
    floats = {k: v for k, v in record.items() if isinstance(v, float)}
    odd = {name: repr(v) for name, v in floats.items() if not math.isfinite(v)}
    more = {NOT_FINITE: odd} if odd else {}
    text = json.dumps({**plain(record), **more})
    return f'{text[:-1]}, "crc": "{zlib.crc32(text.encode()):08x}"}}'


def decode(line: str) -> dict[str, Any]:
    """The record of a line.

    Raises:
      ValueError: If the line is damaged.
    """
    found = _CHECKSUM.search(line)
    if found is None:
        raise ValueError("it does not end in a checksum")
    text = line[: found.start()] + "}"
    if zlib.crc32(text.encode()) != int(found[1], 16):
        raise ValueError("its checksum is wrong")
    record = json.loads(text)
    for name, value in record.pop(NOT_FINITE, {}).items():
        record[name] = float(value)
    return record


class Journal:
    """Appends records to a file, and reads those that are there.

    Args:
      path: The file, made if need be. What a writer that died left of its last line
        is dropped, and the log says so.

    Attributes:
      records: What was in the file.

    Raises:
      ValueError: If a line other than the last is damaged.
      OSError: If the file cannot be written.
    """

    def __init__(self, path: Path):
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            content = path.read_bytes()
            self.records, self._size = _parse(content, str(path))
            sync(path.parent)
            if self._size < len(content):
                os.ftruncate(self._file, self._size)
        except BaseException:
            os.close(self._file)
            raise

    def append(self, record: Mapping[str, Any]) -> None:
        """Adds a line, and waits until it is on disk.

        Raises:
          OSError: If it cannot be written; the file is then as it was before.
        """
        line = encode(record).encode() + b"\n"
        try:
            written = 0
            while written < len(line):
                written += os.write(self._file, line[written:])
            os.fsync(self._file)
        except BaseException:
            os.ftruncate(self._file, self._size)
            raise
        self._size += len(line)

    def close(self) -> None:
        """Closes the file; again does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a journal, which is left as it is.

    Raises:
      ValueError: If a line other than the last is damaged.
    """
    return _parse(path.read_bytes(), str(path))[0]


def _parse(content: bytes, name: str) -> tuple[list[dict[str, Any]], int]:
    """The records, and how many bytes of the file are whole lines."""
    records, lines, seen, size = [], content.split(b"\n"), set(), 0
    unfinished = lines.pop()
    for number, line in enumerate(lines, 1):
        try:
            record = decode(line.decode())
        except ValueError as error:
            if number < len(lines) or unfinished:
                raise ValueError(
                    f"line {number} of {name!r} is damaged: {error}; what follows it "
                    "cannot be trusted: restore the file, or begin anew with "
                    "overwrite=True, which moves the directory aside"
                ) from error
            _log.warning("the last line of %r is damaged, and dropped", name)
            break
        size += len(line) + 1
        if line in seen:
            _log.warning("line %d of %r repeats another, and is ignored", number, name)
            continue
        seen.add(line)
        records.append(record)
    if unfinished:
        _log.warning("the last line of %r is cut off, and dropped", name)
    return records, size


def sync(directory: Path) -> None:
    """Waits until the names in a directory are on disk, as its files may be.

    Where directories cannot be opened or synchronised, they need not be.
    """
    with contextlib.suppress(OSError):
        file = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)


def plain(value: Any) -> Any:
    """`value` as JSON can hold it: NaN and infinities become None.

    Examples:
      >>> plain({"score": float("nan"), "static": (("width", 64),)})
      {'score': None, 'static': [['width', 64]]}
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return repr(value)
