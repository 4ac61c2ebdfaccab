"""Submitted model directories: stored under their hash, checked whole, never unpacked here."""

import hashlib
from collections.abc import Callable
from pathlib import Path

from zerolab.errors import NotFoundError
from zerolab.files import write_atomic

__all__ = ["archive_path", "reader", "store_archive"]


def store_archive(directory: Path, content: bytes) -> str:
    """Keep an archive; return its SHA-256, which is its name."""
    digest = hashlib.sha256(content).hexdigest()
    path = directory / f"{digest}.tar.gz"
    if not path.exists():
        write_atomic(path, content)
    return digest


def archive_path(directory: Path, digest: str | None) -> Path:
    """Return the file of an archive.

    Raises:
        NotFoundError: If the experiment came without one, or the file is gone.
    """
    path = directory / f"{digest}.tar.gz"
    if digest is None or not path.is_file():
        msg = "this experiment has no model directory on the server"
        raise NotFoundError(msg)
    return path


def reader(content: bytes) -> Callable[[str], bytes | None]:
    """Return a function that reads one file of an archive.

    Raises:
        ConfigError: If the archive is damaged, too large or dishonest.
    """
    # The client's HTTP library comes with it, which a server that only starts can do without.
    from zerolab.client.archive import read_member

    read_member(content, "")  # walks the whole archive, and so checks all of it
    return lambda path: read_member(content, path)
