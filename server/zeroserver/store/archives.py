"""Archives of submitted model directories, stored under their SHA-256.

The server checks an archive completely but never unpacks it here.
"""

import hashlib
import logging
import re
from pathlib import Path

import msgspec
from sqlalchemy import select

from zerolab.errors import NotFoundError
from zerolab.files import write_atomic
from zeroserver.errors import StoreError
from zeroserver.store.database import Database
from zeroserver.store.schema import experiments

__all__ = [
    "ArchiveFiles",
    "ArchiveGoneError",
    "archive_path",
    "has_archive",
    "reader",
    "remove_archive",
    "store_archive",
    "sweep_archives",
    "unpack_archive",
]

logger = logging.getLogger(__name__)

_ARCHIVE = re.compile(r"(?P<partial>\.)?(?P<digest>[0-9a-f]{64})\.tar\.gz(?(partial)\..+)")
"""Name of an archive, or of a temporary file that a killed server left."""


class ArchiveGoneError(NotFoundError):
    """Error: an archive that a submission needs was removed concurrently."""


def store_archive(directory: Path, content: bytes) -> str:
    """Store an archive; return its SHA-256, which is its name.

    Raises:
        StoreError: If it cannot be written, for example because the disk is full.
    """
    digest = hashlib.sha256(content).hexdigest()
    if not has_archive(directory, digest):
        try:
            write_atomic(_path(directory, digest), content)
        except OSError as error:
            raise StoreError.of_file(error, directory) from error
    return digest


def sweep_archives(database: Database, directory: Path) -> None:
    """Remove unused archives; call it only at startup, before submissions.

    Other files are kept, since the directory may be a link to a shared one.
    """
    with database.read() as connection:
        used = set(connection.scalars(select(experiments.c.archive)))
    for file in directory.iterdir():
        name = _ARCHIVE.fullmatch(file.name)
        if name is not None and (name["partial"] or name["digest"] not in used):
            file.unlink(missing_ok=True)


def has_archive(directory: Path, digest: str) -> bool:
    """Check whether an archive exists."""
    return _path(directory, digest).is_file()


def remove_archive(directory: Path, digest: str) -> None:
    """Remove an archive that no experiment uses; log failures."""
    try:
        _path(directory, digest).unlink(missing_ok=True)
    except OSError as error:
        logger.warning("archive %s could not be removed: %s", digest, error)


def _path(directory: Path, digest: str) -> Path:
    return directory / f"{digest}.tar.gz"


def archive_path(directory: Path, digest: str | None) -> Path:
    """Return the file of an archive.

    Raises:
        NotFoundError: If the experiment was submitted without one, or the file is missing.
    """
    if digest is None or not has_archive(directory, digest):
        msg = "this experiment has no model directory on the server"
        raise NotFoundError(msg)
    return _path(directory, digest)


def unpack_archive(path: Path, into: Path) -> None:
    """Unpack an archive into an empty directory.

    Raises:
        ConfigError: If the archive is damaged, too large or has unsafe members.
    """
    # Imported here, since it loads the client's HTTP library, which startup does not need.
    from zerolab.client.archive import unpack

    unpack(path.read_bytes(), into)


class ArchiveFiles(msgspec.Struct, frozen=True):
    """Files of a validated archive."""

    content: bytes

    def read(self, path: str) -> bytes | None:
        """Read a file by its path inside the model directory; None if it is missing."""
        from zerolab.client.archive import read_member

        return read_member(self.content, path)

    def names(self) -> list[str]:
        """Return the paths of all files."""
        return list(self.sizes())

    def sizes(self) -> dict[str, int]:
        """Return the size of each file in bytes, by path."""
        from zerolab.client.archive import member_sizes

        return member_sizes(self.content)


def reader(content: bytes) -> ArchiveFiles:
    """Validate an archive; return a reader of its files.

    Raises:
        ConfigError: If the archive is damaged, too large or has unsafe members.
    """
    # Imported here, since it loads the client's HTTP library, which startup does not need.
    from zerolab.client.archive import read_member

    read_member(content, "")  # reads, and so validates, the whole archive
    return ArchiveFiles(content)
