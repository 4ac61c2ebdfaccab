"""Background removal of checkpoints that survives a restart of the server.

A chore is stored in the transaction that marks the files as deleted, executed after the commit, and
then deleted. After a crash the next start finds the unfinished chores. A failed chore is retried
later: an unreachable bucket blocks neither directories nor the server.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from sqlalchemy import delete, select

from zerolab.contract.storage import StorageAddress
from zerolab.errors import ZerolabError
from zeroserver.errors import StoreError
from zeroserver.store.database import Database, Transaction
from zeroserver.store.schema import chores

if TYPE_CHECKING:  # imports fsspec only when needed
    from zerolab.storage.store import CheckpointStore

__all__ = ["Chore", "Janitor"]

logger = logging.getLogger(__name__)

_RETRY_S = 300.0
_CLOSE_S = 5.0
_CLOSE_DIRECTORIES_S = 30.0
"""Maximum wait at shutdown; remaining chores are executed after the next start."""
_MAX_OPEN = 8
"""Maximum number of open storages; each has connections."""


class Chore(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Removal of a checkpoint, or a part of it, from a storage."""

    storage: StorageAddress
    name: str = ""
    """Uuid of the checkpoint."""
    files: list[str] = []
    """Files of the checkpoint; empty for all."""
    owner: str = ""
    """Owner of the unfinished checkpoints to remove, instead of a checkpoint's name."""
    media: bool = False
    """Remove the owner's media instead: those of ``files``, which are digests, or all."""

    def __str__(self) -> str:
        """Describe the chore without credentials."""
        if self.media:
            return f"media of {self.owner} in {self.storage.root}"
        if self.owner:
            return f"unfinished checkpoints of {self.owner} in {self.storage.root}"
        files = f"{len(self.files)} files of " if self.files else ""
        return f"{files}{self.storage.at(self.name)}"


class Janitor:
    """Background removal with two threads: one for directories, one for object stores."""

    def __init__(self) -> None:
        self._database: Database | None = None
        self._workers = {
            remote: _Worker("buckets" if remote else "directories", self._forget)
            for remote in (False, True)
        }

    def start(self, database: Database) -> None:
        """Start with the unfinished chores of an earlier server."""
        self._database = database
        with database.read() as connection:
            pending = connection.execute(select(chores).order_by(chores.c.id)).all()
        for row in pending:
            self._put(row.id, msgspec.json.decode(row.chore, type=Chore))
        for worker in self._workers.values():
            worker.start()

    def discard(self, transaction: Transaction, *requested: Chore) -> None:
        """Queue removals after the commit; nothing may refer to the files any more."""
        ((last,),) = transaction.raw("SELECT coalesce(max(id), 0) FROM chores")
        rows = [(msgspec.json.encode(chore).decode(),) for chore in requested]
        transaction.many("INSERT INTO chores (chore) VALUES (?)", rows)
        numbers = transaction.raw("SELECT id FROM chores WHERE id > ? ORDER BY id", (last,))
        for (number,), chore in zip(numbers, requested, strict=True):
            transaction.then.append(partial(self._put, number, chore))

    def close(self) -> None:
        """Stop; chores of object stores, and of directories after 30 s, wait for the next start."""
        for worker in self._workers.values():
            worker.close()

    def _put(self, number: int, chore: Chore) -> None:
        self._workers[chore.storage.is_remote].chores.put((number, chore))

    def _forget(self, number: int) -> None:
        assert self._database is not None
        statement = delete(chores).where(chores.c.id == number)
        try:
            self._database.write_now(lambda transaction: transaction.connection.execute(statement))
            self._database.deleted = True  # the chore may have contained credentials
        except StoreError as error:  # the next start repeats it, which is harmless
            logger.info(
                "removal %d is finished, but not marked as finished; it is repeated later: %s",
                number,
                error,
            )


class _Worker:
    """Queue of chores with a worker thread."""

    def __init__(self, name: str, forget: Callable[[int], None]) -> None:
        self.chores: queue.SimpleQueue[tuple[int, Chore] | None] = queue.SimpleQueue()
        self._forget = forget
        self._remote = name == "buckets"
        self._closing = threading.Event()
        self._later: list[tuple[float, int, Chore]] = []
        self._stores: dict[bytes, CheckpointStore] = {}
        self._thread = threading.Thread(target=self._work, name=f"janitor {name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        if self._thread.is_alive():
            if self._remote:
                self._closing.set()
            self.chores.put(None)
            self._thread.join(_CLOSE_S if self._remote else _CLOSE_DIRECTORIES_S)
            self._closing.set()

    def _work(self) -> None:
        while True:
            try:
                item = self.chores.get(timeout=_RETRY_S / 10 if self._later else None)
            except queue.Empty:
                self._retry_due()
                continue
            if item is None or self._closing.is_set():
                return
            self._try(*item)

    def _retry_due(self) -> None:
        now = time.monotonic()
        due = [entry for entry in self._later if entry[0] <= now]
        self._later = [entry for entry in self._later if entry[0] > now]
        for _, number, chore in due:
            self._try(number, chore)

    def _try(self, number: int, chore: Chore) -> None:
        try:
            self._do(chore)
        except (ZerolabError, OSError) as error:
            logger.warning("%s cannot be removed: %s; retrying later", chore, error)
            self._later.append((time.monotonic() + _RETRY_S, number, chore))
        except Exception:  # top level of the thread; the next start retries
            logger.exception("%s could not be removed", chore)
        else:
            self._forget(number)

    def _do(self, chore: Chore) -> None:
        if chore.media:
            from zerolab.storage.media import MediaStore

            media = MediaStore(chore.storage, chore.owner)
            media.remove(chore.files) if chore.files else media.remove_all()
            return
        store = self._store(chore.storage)
        if chore.owner:
            store.sweep(chore.owner)
        elif chore.files:
            store.remove_files(chore.name, chore.files)
        else:
            store.delete(chore.name)

    def _store(self, address: StorageAddress) -> "CheckpointStore":
        from zerolab.storage.store import CheckpointStore

        key = msgspec.json.encode(address)
        if key not in self._stores:
            while len(self._stores) >= _MAX_OPEN:
                del self._stores[next(iter(self._stores))]
            self._stores[key] = CheckpointStore(address, owner="server")
        return self._stores[key]
