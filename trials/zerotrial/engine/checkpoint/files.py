"""Files of a checkpoint: written whole or not at all, fsynced, hashed.

A checkpoint grows in a directory ``<tag>.tmp-<host>-<process>-<random>`` beside its place. Only
when every file and the manifest are on the disk is the directory renamed to ``<tag>``, and only
then does ``latest`` name it. So a process that dies at any byte leaves the last good checkpoint.
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from zerolab.errors import EngineError, NotFoundError
from zerotrial.engine.module.compilation import strip_compiled

__all__ = [
    "LATEST",
    "MANIFEST",
    "CheckpointError",
    "CheckpointNotFoundError",
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
"""Version of the layout; a reader refuses versions it does not know."""

_TEMPORARY = re.compile(r"^(?P<tag>.+)\.tmp-(?P<host>[^/]+)-(?P<pid>\d+)-[0-9a-f]{8}$")
_EXCHANGE = 2  # RENAME_EXCHANGE of linux/fs.h
_AT_FDCWD = -100


class CheckpointError(EngineError):
    """A checkpoint cannot be written or read; the text names the file."""


class CheckpointNotFoundError(CheckpointError, NotFoundError):
    """There is no checkpoint where one was asked for."""


class NothingSavedError(CheckpointNotFoundError):
    """Nothing says which checkpoint is the latest: none has been saved there."""


@dataclass(frozen=True)
class FileRecord:
    """What the manifest knows of one file."""

    size: int
    """Bytes."""

    blake2b: str
    """Hexadecimal digest of 16 bytes."""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of; the last file that is written."""

    tag: str
    stage: int
    """ZeRO stage that saved it; for people, loading does not depend on it."""

    world_size: int
    """Ranks that saved it."""

    files: Mapping[str, FileRecord]
    """By name inside the directory."""

    shapes: Mapping[str, list[int]]
    """Every trainable parameter's shape, by name."""

    excluded: list[str] = field(default_factory=list)
    """Frozen parameters that were left out on purpose."""

    layout: Mapping[str, int] = field(default_factory=dict)
    """Ranks along each axis of the mesh; nothing, of data alone."""

    tied: Mapping[str, list[str]] = field(default_factory=dict)
    """Of each parameter that has more than one name: the first, to the others."""

    def was_saved_by(self, size: int, layout: Mapping[str, int]) -> bool:
        """Whether these ranks are those that saved it, each with the part that it had.

        Args:
            size: Ranks that load it.
            layout: Of them.
        """
        return self.world_size == size and dict(self.layout or layout) == layout

    def to_text(self) -> str:
        """Serialize; the text carries its own digest."""
        body = {"format": FORMAT, **asdict(self)}
        return json.dumps({**body, "digest": _digest(body)}, indent=1) + "\n"

    @classmethod
    def read(cls, directory: Path) -> "Manifest":
        """Read and check a manifest.

        Args:
            directory: Of the checkpoint.

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
    """Refuse tags that are no plain folder name.

    Raises:
        CheckpointError: If it is.
    """
    plain = tag and tag not in {".", "..", LATEST} and not set(tag) & set("/\\\0\n")
    if not plain or _TEMPORARY.match(tag):
        msg = f"tag: must be a folder name other than {LATEST!r}, got {tag!r}"
        raise CheckpointError(msg)
    return tag


def write_file(path: Path, content: bytes) -> FileRecord:
    """Write and fsync one new file.

    Raises:
        CheckpointError: If it cannot be written, e.g. because the disk is full.
    """
    with ThreadPoolExecutor(1) as beside:
        digest = beside.submit(hashlib.blake2b, content, digest_size=16)
        try:
            with path.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            msg = f"{path}: could not write {len(content):,} bytes: {error.strerror or error}"
            raise CheckpointError(msg) from error
        return FileRecord(len(content), digest.result().hexdigest())


def hash_file(path: Path) -> FileRecord:
    """Read a file through.

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
    """Make the directory in which a checkpoint grows; remove those of dead processes.

    Raises:
        CheckpointError: If ``directory`` cannot be made or written to.
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
        found = _TEMPORARY.match(path.name)
        if found is None or found["host"] != host or _alive(int(found["pid"])):
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
    """Move a finished directory to its name, in place of what may be there.

    An older checkpoint of the same tag is swapped out in one system call where Linux and the file
    system can; elsewhere a crash between two renames may lose the older one, never the newer.

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
    """Swap two directories atomically; False where that is not possible."""
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
        msg = f"{path}: missing, so no checkpoint to load; pass tag= to load one that is there"
        raise NothingSavedError(msg) from None
    except (OSError, ValueError) as error:
        msg = f"{path}: cannot be read: {error}"
        raise CheckpointError(msg) from error
    # The end of line tells a whole name from a cut one (global_step1 of global_step12).
    if not text.endswith("\n") or not text.strip():
        msg = f"{path}: damaged (must be a tag and an end of line, got {text!r})"
        raise CheckpointError(msg)
    return check_tag(text.strip())
