"""Checkpoints in an object store."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from zerolab.contract.storage import StorageAddress
from zerolab.errors import NotFoundError
from zerolab.extensions.storage_objects.cache import CheckpointCache
from zerolab.storage.backends import DESCRIPTION_FILE, PARTIAL, StoredCheckpoint
from zerolab.storage.objects import ObjectStore

__all__ = ["BucketBackend", "CheckpointCache"]


class BucketBackend:
    """Checkpoints in an object store: ``<root>/<uuid>/...``, complete with ``checkpoint.json``.

    During an upload, an object ``.partial.<owner>.<uuid>`` records its owner.

    Args:
        address: Address of the storage.
    """

    def __init__(self, address: StorageAddress) -> None:
        # Imported lazily: it needs pydantic, which a script with a directory does not.
        from zerolab.storage.registry import open_objects

        self.objects: ObjectStore = open_objects(address)
        self._location = address.root

    def announce(self, owner: str, name: str) -> None:
        """Record the owner of a checkpoint before its files are uploaded."""
        self.objects.write(_marker(owner, name), b"upload in progress")

    def complete(self, owner: str, stored: StoredCheckpoint) -> None:
        """Publish an uploaded checkpoint by writing ``checkpoint.json``."""
        self.objects.write(f"{stored.uuid}/{DESCRIPTION_FILE}", stored.to_json())
        self.objects.remove([_marker(owner, stored.uuid)])

    def description(self, name: str) -> bytes:
        """Return the content of ``checkpoint.json``; raise NotFoundError if it is missing."""
        try:
            return self.objects.read(f"{name}/{DESCRIPTION_FILE}")
        except NotFoundError:
            msg = f"checkpoint {name}: not found in {self._location}"
            raise NotFoundError(msg) from None

    def names(self) -> list[str]:
        """Return the names of all entries, whether checkpoints or not."""
        return self.objects.children()

    def check(self, stored: StoredCheckpoint) -> None:
        """Do nothing: a download checks every file."""

    def delete(self, name: str, trash: Path) -> None:
        """Remove a checkpoint, ``checkpoint.json`` first so that it is never seen incomplete."""
        self.objects.remove([f"{name}/{DESCRIPTION_FILE}"])
        self.objects.remove_folder(name)

    def remove_files(self, stored: StoredCheckpoint, names: Sequence[str]) -> None:
        """Remove files of a checkpoint that ``stored`` no longer lists."""
        self.objects.write(f"{stored.uuid}/{DESCRIPTION_FILE}", stored.to_json())
        self.objects.remove([f"{stored.uuid}/{name}" for name in names])

    def pieces(self, name: str, file: str, first: int, end: int) -> Iterator[bytes]:
        """Read bytes ``first`` to ``end`` of a file, piece by piece."""
        return self.objects.pieces(f"{name}/{file}", first, end)

    def sweep(self, owner: str) -> None:
        """Remove the unfinished checkpoints of an owner."""
        prefix = f"{PARTIAL}.{owner}."
        names = self.objects.children()
        for marker in (name for name in names if name.startswith(prefix)):
            self.abandon(owner, marker.removeprefix(prefix))

    def abandon(self, owner: str, name: str) -> None:
        """Remove the files of an upload that was not completed."""
        try:
            self.description(name)
        except NotFoundError:
            self.objects.remove_folder(name)
        self.objects.remove([_marker(owner, name)])


def _marker(owner: str, name: str) -> str:
    return f"{PARTIAL}.{owner}.{name}"
