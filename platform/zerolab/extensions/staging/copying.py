"""Staged copy of a data source on this node: copied once, verified, shared, atomic.

```
TO/                           the copy; appears when it is complete
.zerolab-stage/NAME.part/     copied files; next to TO, on the same file system
.zerolab-stage/NAME.half/     files being copied
.zerolab-stage/NAME.json      manifest: sizes, stamps and modification times of the copies
.zerolab-stage/NAME.copying   exclusive lock of the one process per node that checks and copies
.zerolab-stage/NAME.used      shared lock of the runs that read the copy
```
"""

import contextlib
import errno
import fcntl
import os
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from zerolab.contract.names import file_name_problem
from zerolab.errors import StorageError, is_storage_failure
from zerolab.extensions.staging.source import DataRefusedError, Source, SourceFile
from zerolab.files import write_json
from zerolab.formatting import size_text
from zerolab.linux import sync_file_system
from zerolab.storage.objects import TransferProgress

__all__ = ["StagedCopy", "StoppedError", "Watch"]

KEY = "data.stage.to"

_POLL_S = 0.2
_AT_ONCE = 4
"""Number of files copied concurrently."""


class StoppedError(Exception):
    """The run was preempted while its data was copied."""


@dataclass(frozen=True)
class Watch:
    """Callbacks of a copy: progress, and the request to stop."""

    say: Callable[[str], None]
    """Receives lines for the log."""
    show: Callable[[str], None]
    """Receives the current activity in a few words."""
    stopped: Callable[[], bool]
    """Return whether to stop."""
    every_s: float = 10.0
    """Seconds between two progress lines."""


class _Copied(msgspec.Struct, frozen=True):
    size: int
    stamp: str
    mtime_ns: int
    """Modification time of the copy, in nanoseconds."""


class _Manifest(msgspec.Struct, frozen=True):
    source: str
    files: dict[str, _Copied]


class StagedCopy:
    """Staged copy in one target directory.

    Args:
        target: Directory of the copy; a source that is a single file keeps its name in it.
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        self._folder = target.parent / ".zerolab-stage"

    def open_use(self) -> BinaryIO:
        """Open the lock file whose shared lock keeps the copy from being replaced.

        Raises:
            OSError: If the directory cannot be written.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        return self._file("used").open("ab")

    def bring(self, address: str, source: Source, use: int, watch: Watch) -> None:
        """Make the copy complete and current, and lock ``use`` in shared mode.

        Args:
            address: Address of the source, as in the experiment.
            source: The opened source.
            use: File descriptor from :meth:`open_use`.
            watch: Callbacks for progress and stopping.

        Raises:
            DataRefusedError: If the experiment's settings make it impossible.
            StorageError: If the source or the disk fails, perhaps temporarily.
            StoppedError: If the watch requested it; copied files are kept for the next attempt.
        """
        watch.show("checks the data to stage")
        with self._exclusive(watch):
            files = source.listing()
            _check_names(files)
            number = "1 file" if len(files) == 1 else f"{len(files)} files"
            summary = f"{number}, {size_text(sum(file.size for file in files.values()))}"
            if self._is_copy_of(address, files):
                fcntl.flock(use, fcntl.LOCK_SH)
                watch.say(
                    f"data.stage: {self.target} holds a copy of {address} already ({summary})"
                )
                return
            self._clear_target(use)
            try:
                self._fetch(address, source, files, watch)
            except OSError as error:
                raise _failure(self.target, error) from error
            fcntl.flock(use, fcntl.LOCK_SH)
            watch.say(f"data.stage: {address} is copied to {self.target} ({summary})")

    def remove(self) -> None:
        """Remove the copy unless a run reads it; ignore errors."""
        with contextlib.suppress(OSError), self.open_use() as use:
            fcntl.flock(use, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._file("json").unlink(missing_ok=True)
            shutil.rmtree(self.target, ignore_errors=True)
            for kind in ("part", "half"):
                shutil.rmtree(self._file(kind), ignore_errors=True)

    def _file(self, kind: str) -> Path:
        return self._folder / f"{self.target.name}.{kind}"

    @contextlib.contextmanager
    def _exclusive(self, watch: Watch) -> Iterator[None]:
        """Lock the copy against the other processes of this node."""
        waits = False
        with self._file("copying").open("ab") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if not waits:
                        waits = True
                        watch.show("waits for data that another trial stages")
                        watch.say(
                            f"data.stage: another trial stages to {self.target}; waits for it"
                        )
                if watch.stopped():
                    raise StoppedError
                time.sleep(_POLL_S)
            yield

    def _is_copy_of(self, address: str, files: Mapping[str, SourceFile]) -> bool:
        try:
            manifest = msgspec.json.decode(self._file("json").read_bytes(), type=_Manifest)
        except (OSError, msgspec.DecodeError):
            return False
        copied = {name: (file.size, file.stamp) for name, file in manifest.files.items()}
        if manifest.source != address or copied != {n: (f.size, f.stamp) for n, f in files.items()}:
            return False
        return all(_is_unchanged(self.target / name, file) for name, file in manifest.files.items())

    def _clear_target(self, use: int) -> None:
        """Move what occupies the target out of the way; files that are still current are kept."""
        part, has_manifest = self._file("part"), self._file("json").exists()
        try:
            fcntl.flock(use, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataRefusedError(
                f"{KEY}: {self.target} holds another copy, or one that has changed, and another "
                "trial reads it; wait until it has ended, or use another directory"
            ) from None
        try:
            if not has_manifest and self.target.exists():
                self.target.rmdir()  # an empty directory may be replaced
            self._file("json").unlink(missing_ok=True)
            if has_manifest and self.target.exists():
                shutil.rmtree(part, ignore_errors=True)
                self.target.rename(part)
            part.mkdir(exist_ok=True)
        except OSError as error:
            if error.errno in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}:
                raise DataRefusedError(
                    f"{KEY}: {self.target} holds something else than a staged copy; "
                    "use a directory that does not exist yet"
                ) from None
            raise _failure(self.target, error) from error

    def _fetch(
        self, address: str, source: Source, files: Mapping[str, SourceFile], watch: Watch
    ) -> None:
        part, halves = self._file("part"), self._file("half")
        _remove_outdated(part, files)
        shutil.rmtree(halves, ignore_errors=True)
        halves.mkdir()
        missing = {name: file for name, file in files.items() if not _arrived(part / name, file)}
        total = sum(file.size for file in missing.values())
        self._check_room(total)
        watch.say(f"data.stage: copies {address} to {self.target}: {size_text(total)}")
        watch.show(f"stages data, {size_text(total)}")

        def tell(text: str) -> None:
            watch.say(text)
            watch.show(f"stages data, {text.rpartition(': ')[2]}")

        progress = TransferProgress("data.stage", total, every_s=watch.every_s, report=tell)
        failed = threading.Event()

        def copy(number: int, name: str, file: SourceFile) -> None:
            target, half = part / name, halves / str(number)
            target.parent.mkdir(parents=True, exist_ok=True)
            with half.open("wb") as to, progress.file() as count_bytes:
                for piece in source.pieces(name, file.size):
                    if watch.stopped() or failed.is_set():
                        raise StoppedError
                    to.write(piece)
                    count_bytes(len(piece))
            if half.stat().st_size != file.size:
                raise StorageError(f"data.stage.from: {name} has changed while it was copied")
            if (mark := _version_time(file)) is not None:
                os.utime(half, ns=(mark, mark))
            half.replace(target)

        def copy_or_stop_all(number: int, name: str, file: SourceFile) -> None:
            try:
                copy(number, name, file)
            except BaseException:
                failed.set()
                raise

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            copied = [
                pool.submit(copy_or_stop_all, number, name, file)
                for number, (name, file) in enumerate(missing.items())
            ]
        errors = [error for future in copied if (error := future.exception()) is not None]
        if errors:
            raise next((e for e in errors if not isinstance(e, StoppedError)), errors[0])
        if source.listing() != files:
            raise StorageError(f"data.stage.from: {address} has changed while it was copied")
        halves.rmdir()
        sync_file_system(part)
        copies = {
            name: _Copied(file.size, file.stamp, (part / name).stat().st_mtime_ns)
            for name, file in files.items()
        }
        # In this order: a manifest without a copy is copied again, a copy without one is foreign.
        write_json(self._file("json"), _Manifest(address, copies))
        part.rename(self.target)

    def _check_room(self, needed: int) -> None:
        disk = shutil.disk_usage(self._folder)
        if needed > disk.total:
            raise DataRefusedError(
                f"{KEY}: {size_text(needed)} do not fit on the disk of {self.target}, which has "
                f"{size_text(disk.total)}; use another directory"
            )
        if needed > disk.free:
            raise StorageError(
                f"{KEY}: the disk of {self.target} is full: {size_text(disk.free)} are free, but "
                f"{size_text(needed)} must be copied; free some space, or use another directory"
            )


def _check_names(files: Mapping[str, SourceFile]) -> None:
    for name in files:
        if problem := file_name_problem(name):
            raise DataRefusedError(f"data.stage.from: the name of a file {problem}")


def _is_unchanged(path: Path, file: _Copied) -> bool:
    try:
        status = path.stat()
    except OSError:
        return False
    return (status.st_size, status.st_mtime_ns) == (file.size, file.mtime_ns)


def _arrived(path: Path, file: SourceFile) -> bool:
    """Return whether an earlier attempt has copied the file in its current version."""
    mark = _version_time(file)
    return mark is not None and _is_unchanged(path, _Copied(file.size, "", mark))


def _version_time(file: SourceFile) -> int | None:
    """Return the modification time that identifies a copied version; None if unknown.

    Object stores count whole seconds, in which a file may change twice. So the part below a
    millisecond is derived from the stamp, which differs between the versions.
    """
    if file.mtime_ns is None or file.stamp == str(file.mtime_ns):
        return file.mtime_ns
    return file.mtime_ns - file.mtime_ns % 1_000_000 + zlib.crc32(file.stamp.encode()) % 1_000_000


def _remove_outdated(part: Path, files: Mapping[str, SourceFile]) -> None:
    """Remove files that the source does not have, or has in another version."""
    for path in sorted(part.rglob("*"), reverse=True):
        name = path.relative_to(part).as_posix()
        if path.is_dir() and not path.is_symlink():
            with contextlib.suppress(OSError):  # not empty
                path.rmdir()
        elif name not in files or not _arrived(path, files[name]):
            path.unlink()


def _failure(target: Path, error: OSError) -> Exception:
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return StorageError(f"{KEY}: the disk of {target} is full; free some space")
    text = f"{KEY}: {target} cannot be written: {error.strerror or error}"
    return StorageError(text) if is_storage_failure(error) else DataRefusedError(text)
