"""Downloads and prepares the sets of `builders`, or says what to do instead."""

from __future__ import annotations

import contextlib
import io
import pathlib
from collections.abc import Generator
from typing import Any

from jaxpack.data.embedded import EMBEDDED
from jaxpack.data.prepared import DOWNLOADABLE, find_prepared, unknown_message

REACH_SECONDS = 10.0
"""Longest wait for the first sign of life of a server."""


def download_and_prepare(name: str, root: pathlib.Path) -> None:
    """Prepares a set as array_record; one that was not finished leaves no set.

    Args:
      name: One of `DOWNLOADABLE`, or with `:version`.
      root: TFDS's data directory, which gets it.

    Raises:
      ConnectionError: If a file cannot be downloaded.
      OSError: If a downloaded file is not the one that TFDS knows.
      ValueError: If there is no such set or version to download.
    """
    base, _, version = name.partition(":")
    if base not in DOWNLOADABLE:
        raise ValueError(unknown_message(name, root))
    import requests  # It takes a while, as does TFDS, and only here are they needed.
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core.download.download_manager import (
        NonMatchingChecksumError,
    )

    from jaxpack.data.builders import BUILDERS

    builder_class = BUILDERS[base]
    if version not in ("", str(builder_class.VERSION)):
        raise ValueError(
            f"tfds:{name} is not prepared in {root}, and of {base} only version "
            f"{builder_class.VERSION} is downloaded; leave the version out"
        )
    config = tfds.download.DownloadConfig(
        try_download_gcs=False, force_checksums_validation=True
    )
    url = builder_class.SOURCES[0].url
    try:
        with _silent_tfds(), _no_retries_unless_reached(url):
            builder = builder_class(data_dir=root, file_format="array_record")
            builder.download_and_prepare(
                file_format="array_record", download_config=config
            )
    except (requests.RequestException, tfds.download.DownloadError) as error:
        files = ", ".join(source.filename for source in builder_class.SOURCES)
        raise ConnectionError(
            f"cannot download tfds:{base} from {url}: {error}. Without a network, do "
            f"one of these: load it where there is one with data_dir=DIR, copy DIR "
            f"here and give it as data_dir; or get {files} and put them into "
            f"{root / 'downloads' / 'manual'}; or use an embedded dataset "
            f"({', '.join(EMBEDDED)})"
        ) from error
    except NonMatchingChecksumError as error:
        raise OSError(
            f"a file of tfds:{base} is not the one that TFDS knows, so it has been cut "
            f"short or replaced on its way, and is not used; try again. {error}"
        ) from error
    except OSError:
        # Another process may have prepared it meanwhile: then its place is taken.
        if find_prepared(name, root) is None:
            raise


@contextlib.contextmanager
def _silent_tfds() -> Generator[None]:
    """Silences TFDS's own progress, in whose place the builders show theirs."""
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core.utils import tqdm_utils

    active = getattr(tqdm_utils, "_active", True)
    tfds.disable_progress_bar()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        tfds.display_progress_bar(active)


@contextlib.contextmanager
def _no_retries_unless_reached(url: str) -> Generator[None]:
    """Spares the minutes of retries of downloads from a server that is not reached.

    The download is tried all the same, for its files may be here already.
    """
    import requests
    from tensorflow_datasets.core.download import downloader as downloader_module

    downloader: Any = downloader_module
    retries = downloader.MAX_RETRIES
    try:
        requests.head(url, timeout=REACH_SECONDS)
    except requests.RequestException:
        downloader.MAX_RETRIES = 0
    try:
        yield
    finally:
        downloader.MAX_RETRIES = retries
