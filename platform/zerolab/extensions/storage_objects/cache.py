"""Local cache of checkpoints from an object store, shared by the processes of a machine."""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["CheckpointCache"]

ENV_CACHE_GB = "ZEROLAB_CHECKPOINT_CACHE_GB"
"""Size of the local checkpoint cache in gigabytes; 20 when unset."""

_USE = "use"
"""Lock of an entry: shared while it is read, exclusive while it is removed."""
_FETCH = "fetch"
"""Lock of an entry, exclusive during a download, which only adds files."""


class CheckpointCache:
    """Cache with one directory per checkpoint; entries that are being read are not evicted.

    Args:
        root: Directory of the entries and their lock files.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    @contextmanager
    def entry(self, name: str, fetch: Callable[[Path], None]) -> Iterator[Path]:
        """Yield the directory of a cached checkpoint, locked until the block ends.

        Args:
            name: The checkpoint's uuid.
            fetch: Downloads the missing files into a directory; runs in one process at a time.
        """
        path = self._root / name
        # Ranks wait for each other while they read: a reader must not block another rank's fetch.
        with self._locked(name, _USE, fcntl.LOCK_SH):
            with self._locked(name, _FETCH, fcntl.LOCK_EX):
                path.mkdir(exist_ok=True, mode=0o700)
                fetch(path)
            os.utime(path)
            self._evict(name)
            yield path

    def adopt(self, name: str, source: Path) -> None:
        """Move a directory with a checkpoint's files into the cache, unless it has an entry."""
        with self._locked(name, _USE, fcntl.LOCK_EX | fcntl.LOCK_NB) as locked:
            path = self._root / name
            if locked and not path.exists():
                source.rename(path)
        self._evict("")

    def forget(self, name: str) -> None:
        """Remove a checkpoint's files, unless a process is reading them."""
        with self._locked(name, _USE, fcntl.LOCK_EX | fcntl.LOCK_NB) as locked:
            if locked:
                shutil.rmtree(self._root / name, ignore_errors=True)
                for kind in (_FETCH, _USE):
                    self._lock_file(name, kind).unlink(missing_ok=True)

    def _evict(self, in_use: str) -> None:
        """Evict the least recently used entries until the cache is within its limit."""
        # Directories without a lock file are someone else's.
        entries = [
            path for path in self._root.iterdir() if self._lock_file(path.name, _USE).exists()
        ]
        sizes = {path: _size(path) for path in entries}
        total = sum(sizes.values())
        for path in sorted(entries, key=_last_used):
            if total <= _cache_limit_bytes():
                return
            if path.name != in_use:
                self.forget(path.name)
                total -= 0 if path.exists() else sizes[path]

    @contextmanager
    def _locked(self, name: str, kind: str, operation: int) -> Iterator[bool]:
        """Hold a lock of a checkpoint; yield False if a non-blocking lock is taken."""
        path = self._lock_file(name, kind)
        self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
        while True:
            with path.open("ab") as file:
                try:
                    fcntl.flock(file, operation)
                except BlockingIOError:
                    yield False
                    return
                if not os.fstat(file.fileno()).st_nlink:
                    continue  # another process removed the lock file in between
                yield True
                return

    def _lock_file(self, name: str, kind: str) -> Path:
        return self._root / f".{kind}.{name}"


def _cache_limit_bytes() -> float:
    try:
        return float(os.environ.get(ENV_CACHE_GB, "20")) * 1e9
    except ValueError:
        return 20e9


def _last_used(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _size(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.lstat().st_size
        except FileNotFoundError:
            continue
    return total
