"""Creation and removal of share links; the directory in memory follows the commit."""

import time
from collections.abc import Sequence

import msgspec
from sqlalchemy import delete, func, select

from zerolab.errors import ConflictError, NotFoundError
from zeroserver.orchestrator.service import Service
from zeroserver.store.rows import ExperimentRow, ShareRow
from zeroserver.store.schema import shares
from zeroserver.store.user_directory import digest_of

__all__ = ["NewShare", "ShareService"]

_MAX_SHARES = 500
"""Maximum number of links of a user, all of which are in memory."""
_KEPT_S = 30 * 86400.0
"""Time for which expired links are listed."""


class NewShare(msgspec.Struct, frozen=True):
    """Content of a new link."""

    owner_id: int
    name: str
    experiment_ids: Sequence[int]
    path: str
    expires_at: float


class ShareService(Service):
    """Creates and removes share links."""

    def create(self, content: NewShare, token: str) -> int:
        """Store the hash of a link's token, and return the link's id.

        Raises:
            NotFoundError: If there is no such experiment.
            ConflictError: If the user has too many links.
        """
        for experiment_id in content.experiment_ids:
            self.work.find(ExperimentRow, experiment_id)
        self._remove_old()
        count = select(func.count()).select_from(shares)
        of_user = count.where(shares.c.owner_id == content.owner_id)
        if (self.work.connection.scalar(of_user) or 0) >= _MAX_SHARES:
            msg = f"there are {_MAX_SHARES} share links; revoke one with `zerolab share revoke`"
            raise ConflictError(msg)
        row = {
            "owner_id": content.owner_id,
            "name": content.name,
            "digest": digest_of(token),
            "experiment_ids": msgspec.json.encode(content.experiment_ids).decode(),
            "path": content.path,
            "created_at": time.time(),
            "expires_at": content.expires_at,
        }
        insert = shares.insert().values(row).returning(shares)
        share = ShareRow(*self.work.connection.execute(insert).one())
        self.work.then.append(lambda: self.work.orchestrator.shares.put(share))
        return share.id

    def revoke(self, share_id: int) -> None:
        """Delete a link; it is invalid at once.

        Raises:
            NotFoundError: If there is no such link.
        """
        if not self._remove(share_id):
            msg = f"there is no share link {share_id}; `zerolab share list` lists them"
            raise NotFoundError(msg)

    def _remove_old(self) -> None:
        old = shares.c.expires_at < time.time() - _KEPT_S
        for share_id in self.work.connection.scalars(select(shares.c.id).where(old)).all():
            self._remove(share_id)

    def _remove(self, share_id: int) -> bool:
        query = delete(shares).where(shares.c.id == share_id)
        self.work.then.append(lambda: self.work.orchestrator.shares.remove(share_id))
        return self.work.connection.execute(query).rowcount > 0
