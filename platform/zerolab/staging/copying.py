"""A copy of a source in a place of this node: made once, checked, shared, never half there.

```
TO/                           the copy; it appears when it is whole
.zerolab-stage/NAME.part/     files that have arrived; beside TO, on its file system
.zerolab-stage/NAME.half/     files on their way
.zerolab-stage/NAME.json      what was copied: sizes, stamps, times of the copies
.zerolab-stage/NAME.copying   locked by who looks and copies: one process of the node at a time
.zerolab-stage/NAME.used      locked, shared, by the runs that read the copy
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
from zerolab.files import write_json
from zerolab.formatting import size_text
from zerolab.linux import sync_file_system
from zerolab.staging.source import DataRefusedError, Source, SourceFile
from zerolab.storage.progress import TransferProgress

__all__ = ["Copy", "StoppedError", "Watch"]

KEY = "data.stage.to"

_POLL_S = 0.2
_AT_ONCE = 4
"""Files."""


class StoppedError(Exception):
    """The run was told to leave while its data was copied."""


@dataclass(frozen=True)
class Watch:
    """Who is told how a copy gets on, and who may end it."""

    say: Callable[[str], None]
    """Takes lines for the log."""
    show: Callable[[str], None]
    """Takes what is going on, in a few words."""
    stopped: Callable[[], bool]
    """Whether to give up."""
    every_s: float = 10.0
    """Seconds between two lines about how far it is."""


class _Copied(msgspec.Struct, frozen=True):
    size: int
    stamp: str
    mtime_ns: int
    """Of the copy."""


class _Manifest(msgspec.Struct, frozen=True):
    source: str
    files: dict[str, _Copied]


class Copy:
    """The copy at one place.

    Args:
        target: The directory that holds it; a single file lies in it under its own name.
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        self._folder = target.parent / ".zerolab-stage"

    def open_use(self) -> BinaryIO:
        """Open the file whose shared lock keeps a copy from being replaced.

        Raises:
            OSError: If the place cannot be written.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        return self._file("used").open("ab")

    def bring(self, place: str, source: Source, use: int, watch: Watch) -> None:
        """Have the copy there, whole and as the source is now, and ``use`` locked, shared.

        Args:
            place: Of the source, as the experiment says it.
            source: The same, opened.
            use: File descriptor from :meth:`open_use`.
            watch: Is told, and asked.

        Raises:
            DataRefusedError: If it cannot be done as the experiment says.
            StorageError: If the source or the disk fails, which may pass.
            StoppedError: If the watch said so; what has arrived is kept for the next time.
        """
        watch.show("looks at the data to stage")
        with self._alone(watch):
            files = source.listing()
            _check_names(files)
            number = "1 file" if len(files) == 1 else f"{len(files)} files"
            text = f"{number}, {size_text(sum(file.size for file in files.values()))}"
            if self._is_copy_of(place, files):
                fcntl.flock(use, fcntl.LOCK_SH)
                watch.say(f"data.stage: {self.target} holds a copy of {place} already ({text})")
                return
            self._take_over(use)
            try:
                self._fetch(place, source, files, watch)
            except OSError as error:
                raise _failure(self.target, error) from error
            fcntl.flock(use, fcntl.LOCK_SH)
            watch.say(f"data.stage: {place} is copied to {self.target} ({text})")

    def remove(self) -> None:
        """Remove the copy, unless a run reads it; errors are no matter."""
        with contextlib.suppress(OSError), self.open_use() as use:
            fcntl.flock(use, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._file("json").unlink(missing_ok=True)
            shutil.rmtree(self.target, ignore_errors=True)
            for kind in ("part", "half"):
                shutil.rmtree(self._file(kind), ignore_errors=True)

    def _file(self, kind: str) -> Path:
        return self._folder / f"{self.target.name}.{kind}"

    @contextlib.contextmanager
    def _alone(self, watch: Watch) -> Iterator[None]:
        """Be the only process of this node that looks at the copy and changes it."""
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

    def _is_copy_of(self, place: str, files: Mapping[str, SourceFile]) -> bool:
        try:
            kept = msgspec.json.decode(self._file("json").read_bytes(), type=_Manifest)
        except (OSError, msgspec.DecodeError):
            return False
        known = {name: (file.size, file.stamp) for name, file in kept.files.items()}
        if kept.source != place or known != {n: (f.size, f.stamp) for n, f in files.items()}:
            return False
        return all(_is_there(self.target / name, file) for name, file in kept.files.items())

    def _take_over(self, use: int) -> None:
        """Have what lies at the place out of the way; files that are still right are kept."""
        part, noted = self._file("part"), self._file("json").exists()
        try:
            fcntl.flock(use, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataRefusedError(
                f"{KEY}: {self.target} holds another copy, or one that has changed, and another "
                "trial reads it; wait until it has ended, or name another place"
            ) from None
        try:
            if not noted and self.target.exists():
                self.target.rmdir()  # of an empty directory nobody misses anything
            self._file("json").unlink(missing_ok=True)
            if noted and self.target.exists():
                shutil.rmtree(part, ignore_errors=True)
                self.target.rename(part)
            part.mkdir(exist_ok=True)
        except OSError as error:
            if error.errno in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}:
                raise DataRefusedError(
                    f"{KEY}: {self.target} holds something else than a staged copy; "
                    "name a directory that is not there yet"
                ) from None
            raise _failure(self.target, error) from error

    def _fetch(
        self, place: str, source: Source, files: Mapping[str, SourceFile], watch: Watch
    ) -> None:
        part, halves = self._file("part"), self._file("half")
        _remove_others(part, files)
        shutil.rmtree(halves, ignore_errors=True)
        halves.mkdir()
        missing = {name: file for name, file in files.items() if not _arrived(part / name, file)}
        total = sum(file.size for file in missing.values())
        self._check_room(total)
        watch.say(f"data.stage: copies {place} to {self.target}: {size_text(total)}")
        watch.show(f"stages data, {size_text(total)}")

        def tell(text: str) -> None:
            watch.say(text)
            watch.show(f"stages data, {text.rpartition(': ')[2]}")

        progress = TransferProgress("data.stage", total, every_s=watch.every_s, tell=tell)
        failed = threading.Event()

        def copy(number: int, name: str, file: SourceFile) -> None:
            target, half = part / name, halves / str(number)
            target.parent.mkdir(parents=True, exist_ok=True)
            with half.open("wb") as to, progress.file() as told:
                for piece in source.pieces(name, file.size):
                    if watch.stopped() or failed.is_set():
                        raise StoppedError
                    to.write(piece)
                    told(len(piece))
            if half.stat().st_size != file.size:
                raise StorageError(f"data.stage.from: {name} has changed while it was copied")
            if (mark := _mark(file)) is not None:
                os.utime(half, ns=(mark, mark))
            half.replace(target)

        def copy_or_end_all(number: int, name: str, file: SourceFile) -> None:
            try:
                copy(number, name, file)
            except BaseException:
                failed.set()
                raise

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            copied = [
                pool.submit(copy_or_end_all, number, name, file)
                for number, (name, file) in enumerate(missing.items())
            ]
        errors = [error for one in copied if (error := one.exception()) is not None]
        if errors:
            raise next((e for e in errors if not isinstance(e, StoppedError)), errors[0])
        if source.listing() != files:
            raise StorageError(f"data.stage.from: {place} has changed while it was copied")
        halves.rmdir()
        sync_file_system(part)
        kept = {
            name: _Copied(file.size, file.stamp, (part / name).stat().st_mtime_ns)
            for name, file in files.items()
        }
        # In this order: a manifest without a copy has it made again, a copy without one is foreign.
        write_json(self._file("json"), _Manifest(place, kept))
        part.rename(self.target)

    def _check_room(self, needed: int) -> None:
        disk = shutil.disk_usage(self._folder)
        if needed > disk.total:
            raise DataRefusedError(
                f"{KEY}: {size_text(needed)} do not fit on the disk of {self.target}, which has "
                f"{size_text(disk.total)}; name another place"
            )
        if needed > disk.free:
            raise StorageError(
                f"{KEY}: the disk of {self.target} is full: {size_text(disk.free)} are free, and "
                f"{size_text(needed)} are to be copied; free some space, or name another place"
            )


def _check_names(files: Mapping[str, SourceFile]) -> None:
    for name in files:
        if problem := file_name_problem(name):
            raise DataRefusedError(f"data.stage.from: the name of a file {problem}")


def _is_there(path: Path, file: _Copied) -> bool:
    try:
        found = path.stat()
    except OSError:
        return False
    return (found.st_size, found.st_mtime_ns) == (file.size, file.mtime_ns)


def _arrived(path: Path, file: SourceFile) -> bool:
    """Whether an earlier try has brought a file, as it is now."""
    mark = _mark(file)
    return mark is not None and _is_there(path, _Copied(file.size, "", mark))


def _mark(file: SourceFile) -> int | None:
    """The time of change that a copy is given, by which it is known again; None: by none.

    Object stores count whole seconds, in which a file may change twice: what is below a millisecond
    tells the contents apart.
    """
    if file.mtime_ns is None or file.stamp == str(file.mtime_ns):
        return file.mtime_ns
    return file.mtime_ns - file.mtime_ns % 1_000_000 + zlib.crc32(file.stamp.encode()) % 1_000_000


def _remove_others(part: Path, files: Mapping[str, SourceFile]) -> None:
    """Remove what the source does not have, or has in another form."""
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
