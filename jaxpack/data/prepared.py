"""The sets that TFDS has prepared on this machine, found without importing TFDS."""

from __future__ import annotations

import difflib
import hashlib
import os
import pathlib
from typing import NamedTuple

DOWNLOADABLE = ("mnist", "fashion_mnist", "cifar10", "cifar100")
"""The sets that are downloaded and prepared where they are not found."""


class Prepared(NamedTuple):
    """A prepared set.

    Attributes:
      name: `name` or `name/config`.
      version: Such as `3.0.1`.
      path: Its directory.
    """

    name: str
    version: str
    path: pathlib.Path


def default_data_dir() -> pathlib.Path:
    """Returns the directory in which TFDS keeps its sets unless told otherwise."""
    path = os.environ.get("TFDS_DATA_DIR") or os.path.join("~", "tensorflow_datasets")
    return pathlib.Path(path).expanduser()


def list_prepared(root: pathlib.Path) -> list[Prepared]:
    """Lists the sets in a data directory of TFDS.

    Args:
      root: The directory, with sets in `name/version` or `name/config/version`.

    Returns:
      The sets, by name and then by version, the oldest first.
    """
    paths = [
        file.parent
        for pattern in ("*/*/features.json", "*/*/*/features.json")
        for file in root.glob(pattern)
        # TFDS writes it last.
        if (file.parent / "dataset_info.json").exists()
    ]
    sets = [
        Prepared(path.parent.relative_to(root).as_posix(), path.name, path)
        for path in paths
        # Those being prepared have longer names.
        if all(part.isdecimal() for part in path.name.split("."))
    ]
    return sorted(sets, key=lambda s: (s.name, [*map(int, s.version.split("."))]))


def find_prepared(name: str, root: pathlib.Path) -> Prepared | None:
    """Finds the newest prepared set of a name.

    Args:
      name: `name`, `name/config`, `name:version` or `name/config:version`.
      root: TFDS's data directory.

    Returns:
      The set, or None.

    Raises:
      ValueError: If it has several configs and the name says none, or it is there but
        not as array_record.
    """
    wanted, _, version = name.partition(":")
    sets = [s for s in list_prepared(root) if version in ("", s.version)]
    matching = [s for s in sets if s.name == wanted] or [
        s for s in sets if s.name.startswith(f"{wanted}/")
    ]
    if len(names := {s.name for s in matching}) > 1:
        raise ValueError(
            f"tfds:{name} has several configs in {root}; choose one of: "
            + ", ".join(f"tfds:{name}" for name in sorted(names))
        )
    readable = [s for s in matching if any(s.path.glob("*.array_record*"))]
    if matching and not readable:
        raise ValueError(
            f"tfds:{name} is prepared in {matching[-1].path}, but not as array_record, "
            "the one format that is read without TensorFlow; "
            + (
                "give another directory as data_dir"
                if wanted in DOWNLOADABLE
                else _how_to_prepare(wanted)
            )
        )
    return readable[-1] if readable else None


def unknown_message(name: str, root: pathlib.Path) -> str:
    """Says that there is no set of a name, what there is, and how to get it."""
    there = [f"tfds:{s.name}:{s.version}" for s in list_prepared(root)]
    known = [f"tfds:{name}" for name in DOWNLOADABLE]
    near = difflib.get_close_matches(f"tfds:{name}", [*known, *there], 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return (
        f"tfds:{name} is not among the sets that are downloaded, which are "
        f"{', '.join(known)}, nor among those prepared in {root}, which are "
        f"{', '.join(there) or 'none'}{hint}; for any other, {_how_to_prepare(name)}"
    )


def _how_to_prepare(name: str) -> str:
    return (
        f"prepare it with tfds.builder({name!r}, data_dir=DIR, "
        'file_format="array_record").download_and_prepare(), where TensorFlow is '
        "installed if need be, and load it with data_dir=DIR"
    )


def content_hash(found: Prepared) -> str:
    """Returns the SHA-256 of a set's examples and of what they are, in hex."""
    digest = hashlib.sha256()
    files = [found.path / "features.json", *found.path.glob("*.array_record*")]
    for path in sorted(files):
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        digest.update(f"{path.name} {content} ".encode())
    return digest.hexdigest()
