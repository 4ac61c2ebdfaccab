"""Files of a checkpoint: atomic, fsynced, hashed.

A checkpoint is written to a directory ``<tag>.tmp-<host>-<process>-<random>`` next to its final
path. The directory is renamed to ``<tag>`` when every file and the manifest are on disk. Only then
is ``latest`` updated. So a process that dies at any byte leaves the last good checkpoint.
"""

import ctypes
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from zerolab.errors import EngineError, NotFoundError, StorageError, ZerolabError
from zerotrial.engine.comm.ranks import GroupRanks
from zerotrial.engine.module.compilation import strip_compiled

__all__ = [
    "LATEST",
    "MANIFEST",
    "CheckpointError",
    "CheckpointNotFoundError",
    "CheckpointRanks",
    "FileRecord",
    "Manifest",
    "NothingSavedError",
    "check_tag",
    "create_temporary",
    "hash_file",
    "publish_directory",
    "read_latest",
    "replace_text",
    "write_file",
]

MANIFEST = "manifest.json"


LATEST = "latest"


FORMAT = 1


"""Version of the layout; readers refuse unknown versions."""


_TEMPORARY = re.compile(r"^(?P<tag>.+)\.tmp-(?P<host>[^/]+)-(?P<pid>\d+)-[0-9a-f]{8}$")


_EXCHANGE = 2  # RENAME_EXCHANGE of linux/fs.h


_AT_FDCWD = -100


_SLICE_BYTES = 2**22
"""Bytes that are hashed and then written, while the processor's cache has them."""


class CheckpointError(EngineError):
    """Error in writing or reading a checkpoint; the text contains the file."""


class CheckpointNotFoundError(CheckpointError, NotFoundError):
    """Error of a missing checkpoint."""


class NothingSavedError(CheckpointNotFoundError):
    """Error of a missing ``latest``: nothing has been saved."""


@dataclass(frozen=True)
class FileRecord:
    """Size and hash of one file in the manifest."""

    size: int
    """Size in bytes."""

    blake2b: str
    """Hexadecimal digest of 16 bytes."""


@dataclass(frozen=True)
class Manifest:
    """Content of a checkpoint; its last file."""

    tag: str
    stage: int
    """ZeRO stage that saved it; informational, loading does not depend on it."""

    world_size: int
    """Number of ranks that saved it."""

    files: Mapping[str, FileRecord]
    """Files by name inside the directory."""

    shapes: Mapping[str, list[int]]
    """Shape of every trainable parameter, by name."""

    excluded: list[str] = field(default_factory=list)
    """Frozen parameters that were excluded."""

    layout: Mapping[str, int] = field(default_factory=dict)
    """Number of ranks along each axis of the mesh; empty for data parallelism only."""

    tied: Mapping[str, list[str]] = field(default_factory=dict)
    """First name of each parameter with several names, to its other names."""

    def was_saved_by(self, size: int, layout: Mapping[str, int]) -> bool:
        """Return whether the same ranks saved it, each with the same part.

        Args:
            size: Number of ranks that load it.
            layout: Mesh layout of these ranks.
        """
        return self.world_size == size and dict(self.layout or layout) == layout

    def to_text(self) -> str:
        """Return the manifest as text that contains its digest."""
        body = {"format": FORMAT, **asdict(self)}
        return json.dumps({**body, "digest": _digest(body)}, indent=1) + "\n"

    @classmethod
    def read(cls, directory: Path) -> "Manifest":
        """Read and check a manifest.

        Raises:
            CheckpointError: If the file is missing, damaged, or of an unknown version.
        """
        path = directory / MANIFEST
        try:
            body: dict[str, Any] = json.loads(path.read_bytes())
            digest = body.pop("digest")
            version = body.pop("format")
        except FileNotFoundError:
            msg = f"{path}: missing, so {directory} is no complete checkpoint"
            raise CheckpointError(msg) from None
        except (ValueError, KeyError, AttributeError, TypeError):
            msg = f"{path}: damaged (not the JSON that was written)"
            raise CheckpointError(msg) from None
        if version != FORMAT:
            msg = f"{path}: format must be {FORMAT}, got {version}; it needs another version"
            raise CheckpointError(msg)
        if digest != _digest({"format": version, **body}):
            msg = f"{path}: damaged (its digest does not match)"
            raise CheckpointError(msg)
        files = {name: FileRecord(**record) for name, record in body.pop("files").items()}
        # Earlier versions kept the names of compiled modules.
        body["shapes"] = {strip_compiled(name): v for name, v in body["shapes"].items()}
        body["excluded"] = [strip_compiled(name) for name in body.get("excluded", [])]
        body["tied"] = {
            strip_compiled(first): [strip_compiled(name) for name in names]
            for first, names in body.get("tied", {}).items()
        }
        return cls(**body, files=files)


def _digest(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True).encode()
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def check_tag(tag: str) -> str:
    """Raise unless a tag is a plain folder name.

    Raises:
        CheckpointError: If it is not.
    """
    plain = tag and tag not in {".", "..", LATEST} and not set(tag) & set("/\\\0\n")
    if not plain or _TEMPORARY.match(tag):
        msg = f"tag: must be a folder name other than {LATEST!r}, got {tag!r}"
        raise CheckpointError(msg)
    return tag


def write_file(path: Path, *parts: bytes | memoryview) -> FileRecord:
    """Write and fsync one new file that consists of parts, and hash it on the way.

    Raises:
        CheckpointError: If it cannot be written, e.g. because the disk is full.
    """
    digest = hashlib.blake2b(digest_size=16)
    size = sum(len(part) for part in parts)
    try:
        with path.open("xb", buffering=0) as file:
            for part in parts:
                for start in range(0, len(part), _SLICE_BYTES):
                    piece = memoryview(part)[start : start + _SLICE_BYTES]
                    digest.update(piece)
                    while piece:
                        piece = piece[file.write(piece) :]
            os.fsync(file.fileno())
    except OSError as error:
        msg = f"{path}: could not write {size:,} bytes: {error.strerror or error}"
        raise CheckpointError(msg) from error
    return FileRecord(size, digest.hexdigest())


def hash_file(path: Path) -> FileRecord:
    """Return size and hash of a file.

    Raises:
        CheckpointError: If it is missing or cannot be read.
    """
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
            return FileRecord(os.fstat(file.fileno()).st_size, digest.hexdigest())
    except FileNotFoundError:
        msg = f"{path}: missing; the manifest of the checkpoint lists it"
        raise CheckpointError(msg) from None
    except OSError as error:
        msg = f"{path}: cannot be read: {error.strerror or error}"
        raise CheckpointError(msg) from error


def create_temporary(directory: Path, tag: str) -> Path:
    """Create a temporary directory for a checkpoint; remove those of dead processes.

    Raises:
        CheckpointError: If ``directory`` cannot be created or written to.
    """
    host, pid = socket.gethostname(), os.getpid()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(directory, host)
        path = directory / f"{tag}.tmp-{host}-{pid}-{secrets.token_hex(4)}"
        path.mkdir()
    except OSError as error:
        msg = f"{directory}: cannot hold a checkpoint: {error.strerror or error}"
        raise CheckpointError(msg) from error
    return path


def _remove_leftovers(directory: Path, host: str) -> None:
    for path in directory.iterdir():
        match = _TEMPORARY.match(path.name)
        if match is None or match["host"] != host or _alive(int(match["pid"])):
            continue
        shutil.rmtree(path, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def publish_directory(temporary: Path, final: Path) -> None:
    """Move a finished directory to its final name, replacing an existing one.

    An older checkpoint of the same tag is exchanged in one system call if Linux and the file system
    support it. Otherwise a crash between two renames may lose the older one, never the newer.

    Raises:
        CheckpointError: If the move fails.
    """
    try:
        _fsync_directory(temporary)
        if not final.exists():
            temporary.rename(final)
        elif _exchange(temporary, final):
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            old = temporary.with_name(f"{temporary.name}.old")
            final.rename(old)
            temporary.rename(final)
            shutil.rmtree(old, ignore_errors=True)
        _fsync_directory(final.parent)
    except OSError as error:
        msg = f"{final}: could not be published: {error.strerror or error}"
        raise CheckpointError(msg) from error


def _exchange(first: Path, second: Path) -> bool:
    """Swap two directories atomically; return False if it is not supported."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    if call(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP}:
        return False
    raise OSError(code, os.strerror(code), str(second))


def replace_text(path: Path, text: str) -> None:
    """Write a small file atomically.

    Raises:
        CheckpointError: If it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        write_file(temporary, text.encode())
        temporary.replace(path)
        _fsync_directory(path.parent)
    except OSError as error:
        msg = f"{path}: could not be written: {error.strerror or error}"
        raise CheckpointError(msg) from error
    finally:
        temporary.unlink(missing_ok=True)


def _fsync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_latest(directory: Path) -> str:
    """Return the tag that ``latest`` names.

    Raises:
        NothingSavedError: If the directory or the file is missing.
        CheckpointError: If the file is damaged.
    """
    path = directory / LATEST
    if not directory.is_dir():
        msg = f"{directory}: no such directory, so no checkpoint to load"
        raise NothingSavedError(msg)
    try:
        text = path.read_text()
    except FileNotFoundError:
        msg = f"{path}: missing, so no checkpoint to load; pass tag= to load an existing checkpoint"
        raise NothingSavedError(msg) from None
    except (OSError, ValueError) as error:
        msg = f"{path}: cannot be read: {error}"
        raise CheckpointError(msg) from error
    # The end of line distinguishes a complete name from a truncated one (global_step1 of
    # global_step12).
    if not text.endswith("\n") or not text.strip():
        msg = f"{path}: damaged (must be a tag and an end of line, got {text!r})"
        raise CheckpointError(msg)
    return check_tag(text.strip())


class CheckpointRanks(GroupRanks):
    """Data-parallel ranks, which save and load together.

    Args:
        group: Process group; None for one process.
    """

    def _for_peers(self, kind: type[ZerolabError] | None, text: str) -> Exception:
        error = CheckpointError(text)
        if kind is StorageError:
            error.__cause__ = StorageError(text)
        return error
