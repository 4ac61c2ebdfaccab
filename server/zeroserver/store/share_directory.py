"""Share links in memory, so that a request with one is identified without a query."""

import secrets
import time

import msgspec
from sqlalchemy import Connection, select

from zeroserver.store.rows import ShareRow, read_rows
from zeroserver.store.schema import shares
from zeroserver.store.user_directory import UserDirectory, digest_of

__all__ = ["SHARE_PREFIX", "Share", "ShareDirectory", "new_share_token"]

SHARE_PREFIX = "zls_"
"""Prefix of the tokens of share links, by which scanners of leaked secrets recognize them."""


def new_share_token() -> str:
    """Return a new random token of a share link."""
    return SHARE_PREFIX + secrets.token_urlsafe(32)


class Share(msgspec.Struct, frozen=True):
    """Share link.

    Args:
        row: Its row.
        experiment_ids: Experiments that it shows.
    """

    row: ShareRow
    experiment_ids: frozenset[int]

    @classmethod
    def of(cls, row: ShareRow) -> "Share":
        """Parse a row."""
        return cls(row, frozenset(msgspec.json.decode(row.experiment_ids, type=list[int])))


class ShareDirectory:
    """Share links of the installation; entries are replaced, never modified.

    Args:
        users: Users; links of inactive ones are invalid.
    """

    def __init__(self, users: UserDirectory) -> None:
        self._users = users
        self._shares: dict[int, Share] = {}
        self._ids: dict[str, int] = {}
        """Id of each link by the digest of its token."""

    def load(self, connection: Connection) -> None:
        """Read all links; called once, at startup."""
        for row in read_rows(connection, ShareRow, select(shares)):
            self.put(row)

    def put(self, row: ShareRow) -> None:
        """Add a link, after its transaction."""
        self._shares = {**self._shares, row.id: Share.of(row)}
        self._ids[row.digest] = row.id

    def remove(self, share_id: int) -> None:
        """Remove a link; it is invalid from now on."""
        share = self._shares.get(share_id)
        if share is not None:
            self._shares = {key: item for key, item in self._shares.items() if key != share_id}
            self._ids.pop(share.row.digest, None)
            self._users.revision += 1

    def valid(self, share_id: int) -> Share | None:
        """Return a link that has not expired and whose owner is active; None otherwise."""
        share = self._shares.get(share_id)
        if share is None or share.row.expires_at <= time.time():
            return None
        owner = self._users.user(share.row.owner_id)
        return share if owner is not None and owner.active else None

    def find(self, token: str) -> Share | None:
        """Return the valid link with this token; None if there is none."""
        if not token.startswith(SHARE_PREFIX):
            return None
        share_id = self._ids.get(digest_of(token))
        return None if share_id is None else self.valid(share_id)
