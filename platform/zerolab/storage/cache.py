"""Checkpoints from an object store that this machine has at hand: fetched once, kept a while."""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["Cache"]

ENV_CACHE_GB = "ZEROLAB_CHECKPOINT_CACHE_GB"
"""Gigabytes of checkpoints from object stores that a machine keeps at hand; 20 when unset."""

_USE = "use"
"""Shared by those who read; alone by who removes."""
_FETCH = "fetch"
"""Held by who downloads: files are only added meanwhile."""


class Cache:
    """One directory for each checkpoint; processes share it, and none removes what another reads.

    Args:
        root: Holds the directories, and their locks.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    @contextmanager
    def entry(self, name: str, fetch: Callable[[Path], None]) -> Iterator[Path]:
        """Give the directory of a checkpoint until the block ends.

        Args:
            name: Its uuid.
            fetch: Brings the files that are missing into a directory; one process at a time.
        """
        path = self._root / name
        # Ranks wait for each other while they read: no reader may keep another one from fetching.
        with self._locked(name, _USE, fcntl.LOCK_SH):
            with self._locked(name, _FETCH, fcntl.LOCK_EX):
                path.mkdir(exist_ok=True, mode=0o700)
                fetch(path)
            os.utime(path)
            self._make_room(name)
            yield path

    def adopt(self, name: str, source: Path) -> None:
        """Keep a directory that holds a checkpoint's files already, unless one is there."""
        with self._locked(name, _USE, fcntl.LOCK_EX | fcntl.LOCK_NB) as held:
            path = self._root / name
            if held and not path.exists():
                source.rename(path)
        self._make_room("")

    def forget(self, name: str) -> None:
        """Remove a checkpoint's files, unless someone reads them."""
        with self._locked(name, _USE, fcntl.LOCK_EX | fcntl.LOCK_NB) as held:
            if held:
                shutil.rmtree(self._root / name, ignore_errors=True)
                for kind in (_FETCH, _USE):
                    self._lock_file(name, kind).unlink(missing_ok=True)

    def _make_room(self, needed: str) -> None:
        """Throw out what was not used for longest, until the rest fits."""
        kept = [path for path in self._root.iterdir() if path.is_dir() and path.name[0] != "."]
        sizes = {path: _size(path) for path in kept}
        total = sum(sizes.values())
        for path in sorted(kept, key=_last_used):
            if total <= _most_bytes():
                return
            if path.name != needed:
                self.forget(path.name)
                total -= 0 if path.exists() else sizes[path]

    @contextmanager
    def _locked(self, name: str, kind: str, how: int) -> Iterator[bool]:
        """Hold a lock of a checkpoint; False when it is not to be had at once."""
        path = self._lock_file(name, kind)
        self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
        while True:
            with path.open("ab") as file:
                try:
                    fcntl.flock(file, how)
                except BlockingIOError:
                    yield False
                    return
                if not os.fstat(file.fileno()).st_nlink:
                    continue  # another process has removed it meanwhile
                yield True
                return

    def _lock_file(self, name: str, kind: str) -> Path:
        return self._root / f".{kind}.{name}"


def _most_bytes() -> float:
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
