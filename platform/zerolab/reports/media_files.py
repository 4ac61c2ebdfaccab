"""Media of a run on their way to the storage: written to the run's directory, then uploaded.

The directory ``media`` of a run is the queue. A file appears there complete, by a rename, and is
named by the SHA-256 of its content. A thread moves the files into the checkpoint storage. The
agent moves those that are left when the run has ended. A run without a server keeps them there.
"""

import contextlib
import hashlib
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import msgspec

from zerolab.client.transport import Backoff
from zerolab.contract.media import DIGEST, MediaType
from zerolab.contract.run_folder import RunFolder
from zerolab.contract.spec import RunSpec, read_run_spec
from zerolab.errors import ZerolabError
from zerolab.storage.media import MediaStore

__all__ = ["MEDIA_DIR", "MediaFiles", "MediaItem", "MediaTarget", "MediaUploader", "deliver_media"]

logger = logging.getLogger(__name__)

MEDIA_DIR = "media"
"""Directory of the media in a run's directory."""
_PART = ".part"
_INTERVAL_S = 1.0
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
_PIECE = 1 << 20


class MediaTarget(Protocol):
    """Receiver of media, such as :class:`zerolab.storage.media.MediaStore`."""

    def put(self, source: Path, digest: str) -> None:
        """Move a file there."""


class MediaItem(msgspec.Struct, frozen=True):
    """One medium to report."""

    type: MediaType
    content: bytes | Path | None
    """The content, or a file to copy; None if the metadata is all there is."""
    suffix: str = ""
    metadata: dict[str, object] = {}

    @property
    def size(self) -> int:
        """Size of the content in bytes."""
        if isinstance(self.content, Path):
            return self.content.stat().st_size
        return len(self.content or b"")


class MediaFiles:
    """Writer of a run's media.

    Args:
        directory: Created with the first file.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._written: set[str] = set()
        """Digests of this process: the uploader may already have moved the file."""
        self._count = 0

    def write(self, item: MediaItem) -> str:
        """Write the content of an item unless this process has written it; return its digest.

        Raises:
            OSError: If the disk is full, or a file to copy cannot be read.
        """
        if item.content is None:
            return ""
        if isinstance(item.content, bytes):
            digest = hashlib.sha256(item.content).hexdigest()
            if digest in self._written:
                return digest
            part = self._part()
            with self._removed_on_error(part):
                part.write_bytes(item.content)
        else:
            part = self._part()
            with self._removed_on_error(part):
                digest = _copy(item.content, part)
        part.replace(self._directory / f"{digest}{item.suffix}")
        self._written.add(digest)
        return digest

    def _part(self) -> Path:
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._count += 1
        return self._directory / f"{os.getpid()}-{self._count}{_PART}"

    @staticmethod
    @contextlib.contextmanager
    def _removed_on_error(part: Path) -> Iterator[None]:
        try:
            yield
        except BaseException:
            part.unlink(missing_ok=True)
            raise


class MediaUploader(threading.Thread):
    """Thread that moves media into the storage during training; it never raises into it.

    Args:
        directory: Directory of the run's media.
        store: Storage of the trial.
        stale: Set when another run has taken over; nothing more is uploaded.
    """

    def __init__(self, directory: Path, store: MediaTarget, stale: threading.Event) -> None:
        super().__init__(name="zerolab-media", daemon=True)
        self._directory = directory
        self._store = store
        self._stale = stale
        self._wake = threading.Event()
        self._closing = False
        self._failing = False
        self._backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)

    def finish(self, timeout_s: float) -> bool:
        """Upload the remaining files; return whether all are stored within ``timeout_s``."""
        self._closing = True
        self._wake.set()
        self.join(timeout_s)
        return not self.is_alive() and not any(_complete_files(self._directory))

    def run(self) -> None:
        """Upload until nothing is left after :meth:`finish`, or the run is stale."""
        pause_s = _INTERVAL_S
        while not self._stale.is_set():
            self._wake.wait(pause_s)
            self._wake.clear()
            closing = self._closing  # read before the directory, so that all files are uploaded
            try:
                _upload(self._directory, self._store)
            except Exception as error:  # noqa: BLE001 - training must continue, whatever fails here
                pause_s = self._backoff.pause_s()
                self._log_failure(error)
                if closing:  # the agent tries again
                    return
                continue
            pause_s = _INTERVAL_S
            self._backoff.reset()
            if self._failing:
                self._failing = False
                logger.info("media are uploaded again")
            if closing:
                return

    def _log_failure(self, error: Exception) -> None:
        if self._failing:
            return
        self._failing = True
        logger.warning(
            "cannot upload media, retrying while training continues: %s",
            error,
            exc_info=None if isinstance(error, ZerolabError) else error,
        )


def deliver_media(run_dir: Path) -> int:
    """Move the media that an ended run has left into its storage; return their number.

    Safe to repeat.

    Args:
        run_dir: The run's directory, with its specification.

    Raises:
        StorageError: If the storage cannot take them.
    """
    directory = run_dir / MEDIA_DIR
    if not any(_complete_files(directory)):
        return 0
    spec: RunSpec = read_run_spec(RunFolder(run_dir).spec)
    return _upload(directory, MediaStore.of_run(spec))


def _upload(directory: Path, store: MediaTarget) -> int:
    count = 0
    for path in _complete_files(directory):
        store.put(path, path.name.partition(".")[0])
        count += 1
    return count


def _complete_files(directory: Path) -> Iterator[Path]:
    """Yield the files that are named by a digest; those being written have other names."""
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                if DIGEST.fullmatch(entry.name.partition(".")[0]):
                    yield Path(entry.path)
    except FileNotFoundError:
        return


def _copy(source: Path, target: Path) -> str:
    """Copy a file, which may change later; return the digest of the copy."""
    digest = hashlib.sha256()
    with source.open("rb") as read, target.open("wb") as write:
        while piece := read.read(_PIECE):
            digest.update(piece)
            write.write(piece)
    return digest.hexdigest()
