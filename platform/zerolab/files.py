"""Small files shared by processes: written atomically, private if needed."""

import errno
import fcntl
import os
import tempfile
import warnings
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

__all__ = [
    "append_private",
    "create_private",
    "lock_file",
    "read_json",
    "sync",
    "write_atomic",
    "write_json",
]


def write_atomic(path: Path, content: bytes, *, mode: int = 0o600) -> None:
    """Replace a file in one step: a reader sees the old content or the new, never a part.

    The new content is on the disk before it replaces the old one, and so is the name when this
    returns. A loss of power leaves the old or the new content.

    Args:
        path: File to write; its directory must exist.
        content: The complete new content.
        mode: Permissions of the new file.
    """
    # Content, then fsync, then rename: a file system may otherwise write the new name before the
    # data and leave an empty file after a loss of power. The directory is synced because a rename
    # is only then durable. The temporary file is beside the target: a rename works within one disk.
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        Path(name).replace(path)
        sync(path.parent)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Flush a file's content, or a directory's names, to the disk."""
    if not (path.is_file() or path.is_dir()):
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def create_private(path: Path, content: bytes) -> bool:
    """Create a file that only its owner can read, unless it exists.

    Returns:
        Whether this call created it; of two processes exactly one does.
    """
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.link(name, path)
        sync(path.parent)
    except FileExistsError:
        return False
    finally:
        Path(name).unlink()
    return True


_NO_LOCKS = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK})
"""Errors of file systems without locks; ENOLCK comes from NFS without a lock daemon."""


def lock_file(path: Path, *, wait: bool = False) -> AbstractContextManager[object]:
    """Lock a file until the returned context ends; create it if it is missing.

    On a file system without locks an existing lock file counts as locked, with a warning.

    Args:
        path: The file; only its owner can read a new one.
        wait: Wait until the other process has released it.

    Raises:
        BlockingIOError: If another process holds the lock and ``wait`` is false.
        OSError: If the file cannot be opened.

    Example::

        with lock_file(home / "server.lock"):
            ...  # one process at a time
    """
    try:
        file: BinaryIO = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
        is_new = True
    except FileExistsError:
        file, is_new = append_private(path), False
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise BlockingIOError(f"another process holds {path}") from error
    except OSError as error:
        file.close()
        if error.errno not in _NO_LOCKS:
            raise
        if is_new:
            path.unlink()  # its existence would count as locked
        return _lock_by_existence(path, wait=wait)
    except BaseException:  # such as Ctrl-C during a wait
        file.close()
        raise
    return file


def _lock_by_existence(path: Path, *, wait: bool) -> AbstractContextManager[object]:
    import filelock  # 10 ms, and only file systems without flock need it

    text = f"{path}: its file system has no flock; remove the file if no process uses it"
    warnings.warn(text, stacklevel=3)
    try:
        return filelock.SoftFileLock(path, mode=0o600).acquire(timeout=-1 if wait else 0)
    except filelock.Timeout as error:
        raise BlockingIOError(f"another process holds {path}") from error


def append_private(path: Path) -> BinaryIO:
    """Open a file for appending; a new one is readable only by its owner."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    return os.fdopen(os.open(path, flags, 0o600), "ab")


def write_json(path: Path, content: Any) -> None:
    """Write ``content`` as JSON, atomically, readable only by its owner."""
    write_atomic(path, msgspec.json.encode(content))


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a JSON object; None if the file is missing, or not (yet) such an object."""
    try:
        content = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError):
        return None
    return content if isinstance(content, dict) else None
