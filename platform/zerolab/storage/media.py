"""Content of media in the checkpoint storage: ``media/<owner>/<SHA-256>`` below its root.

Each trial has a separate folder, so equal content is stored once per trial. Sharing it between
trials would need a count of references, and the removal of one trial could then delete a file that
another trial is about to report.
"""

import contextlib
import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Self

from zerolab.contract.media import DIGEST
from zerolab.contract.spec import RunSpec
from zerolab.contract.storage import StorageAddress
from zerolab.errors import ConfigError, NotFoundError, StorageError
from zerolab.registry import PARTS
from zerolab.storage.backends import DirectoryBackend
from zerolab.storage.objects import ObjectStore, TransferProgress

__all__ = ["MEDIA_FOLDER", "MediaStore"]

MEDIA_FOLDER = "media"
_PART = ".part"


class MediaStore:
    """Media of one trial in a storage.

    Args:
        address: Address of the checkpoint storage.
        owner: Folder of the trial, such as ``trial-3``.
    """

    def __init__(self, address: StorageAddress, owner: str) -> None:
        self.address = address
        self._owner = owner

    @classmethod
    def of_run(cls, spec: RunSpec) -> Self:
        """Return the store of a run."""
        address = StorageAddress(root=spec.checkpoint_dir, options=spec.storage_options)
        return cls(address, spec.storage_owner or f"trial-{spec.trial_id}")

    def put(self, source: Path, digest: str) -> None:
        """Move a file into the storage; it appears there complete or not at all.

        Raises:
            StorageError: If the storage cannot take it.
        """
        if self.address.is_remote:
            progress = TransferProgress(f"media {digest[:12]}: uploading", source.stat().st_size)
            self._objects.upload(source, self._name(digest), progress)
            source.unlink()
            return
        with self._guarded("cannot be written"):
            target = self._root / self._owner / _checked(digest)
            target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            try:
                source.replace(target)
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
                _move_between_disks(source, target)

    def put_content(self, content: bytes, digest: str, directory: Path) -> None:
        """Store content that was received.

        Args:
            content: The content.
            digest: Its SHA-256.
            directory: For a temporary file, at best on the disk of the storage.

        Raises:
            ConfigError: If ``digest`` is not the SHA-256 of the content.
            StorageError: If the storage cannot take it.
        """
        if hashlib.sha256(content).hexdigest() != digest:
            problem = f"digest: must be the SHA-256 of the content, got {digest[:70]}"
            raise ConfigError("media", [problem])
        with tempfile.NamedTemporaryFile(dir=directory, prefix="media-", delete=False) as file:
            file.write(content)
        try:
            self.put(Path(file.name), digest)
        finally:
            Path(file.name).unlink(missing_ok=True)

    def pieces(self, digest: str, size: int) -> Iterator[bytes]:
        """Read a file piece by piece.

        Raises:
            NotFoundError: If it is not in the storage, at the first piece.
            StorageError: If the storage cannot be read.
        """
        try:
            if self.address.is_remote:
                yield from self._objects.pieces(self._name(digest), 0, size)
            else:
                with self._guarded("cannot be read"):
                    backend = DirectoryBackend(self._root)
                    yield from backend.pieces(self._owner, _checked(digest), 0, size)
        except NotFoundError:
            msg = f"media {digest[:12]}: not in {self.address.root}; its run uploads it soon, or "
            raise NotFoundError(f"{msg}could not store it (see the trial's log)") from None

    def remove(self, digests: Sequence[str]) -> None:
        """Remove some files; missing ones are ignored.

        Raises:
            StorageError: If the storage cannot be changed.
        """
        if self.address.is_remote:
            self._objects.remove([self._name(digest) for digest in digests])
            return
        with self._guarded("cannot be deleted from"):
            for digest in digests:
                (self._root / self._owner / _checked(digest)).unlink(missing_ok=True)

    def remove_all(self) -> None:
        """Remove the files of the trial.

        Raises:
            StorageError: If the storage cannot be changed.
        """
        if self.address.is_remote:
            self._objects.remove_folder(f"{MEDIA_FOLDER}/{self._owner}")
            return
        with self._guarded("cannot be deleted from"), contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self._root / self._owner)

    @cached_property
    def _objects(self) -> ObjectStore:
        objects: ObjectStore = PARTS["bucket"].BucketBackend(self.address).objects
        return objects

    @cached_property
    def _root(self) -> Path:
        return Path(self.address.root.removeprefix("file://")).absolute() / MEDIA_FOLDER

    def _name(self, digest: str) -> str:
        return f"{MEDIA_FOLDER}/{self._owner}/{_checked(digest)}"

    @contextlib.contextmanager
    def _guarded(self, doing: str) -> Iterator[None]:
        """Convert an OSError into a StorageError."""
        try:
            yield
        except OSError as error:
            detail = error.strerror or str(error) or type(error).__name__
            raise StorageError(f"media in {self.address.root}: {doing}: {detail}") from error


def _move_between_disks(source: Path, target: Path) -> None:
    part = target.with_name(f"{target.name}.{os.getpid()}{_PART}")
    try:
        shutil.copyfile(source, part)
        part.replace(target)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    source.unlink()


def _checked(digest: str) -> str:
    if not DIGEST.fullmatch(digest):
        raise ConfigError("media", [f"digest: must be a SHA-256, got {digest[:70]!r}"])
    return digest
