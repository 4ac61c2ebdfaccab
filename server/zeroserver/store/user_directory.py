"""Users, API tokens and share links in memory.

Only this server changes its database, so a directory in memory identifies callers without a query.
Every change replaces its entry after the commit and before the response: a revoked token is invalid
for the next request.
"""

import hashlib
import secrets
import time
from operator import attrgetter

import msgspec
from msgspec.structs import replace
from sqlalchemy import Connection, select

from zeroserver.store.rows import ShareRow, TokenRow, UserRow, read_rows
from zeroserver.store.schema import shares, tokens, users

__all__ = [
    "ADMIN",
    "SHARE_PREFIX",
    "Share",
    "ShareDirectory",
    "UserDirectory",
    "digest_of",
    "new_share_token",
    "new_token",
]

_PREFIX = "zlu_"
"""Prefix of API tokens, by which scanners of leaked secrets recognize them."""

SHARE_PREFIX = "zls_"
"""Prefix of the tokens of share links, by which scanners of leaked secrets recognize them."""

ADMIN = UserRow(1, "admin", "admin", 1, 0.0, None)
"""The first user: always an active administrator, who has the token of the installation."""


def new_token() -> str:
    """Return a new random API token."""
    return _PREFIX + secrets.token_urlsafe(32)


def new_share_token() -> str:
    """Return a new random token of a share link."""
    return SHARE_PREFIX + secrets.token_urlsafe(32)


def digest_of(token: str) -> str:
    """Return the stored form of an API token.

    A fast hash is enough: the token has 256 random bits.
    """
    return hashlib.sha256(token.encode()).hexdigest()


class UserDirectory:
    """Users and API tokens of the installation; entries are replaced, never modified."""

    def __init__(self) -> None:
        self._users: dict[int, UserRow] = {ADMIN.id: ADMIN}
        self._tokens: dict[int, TokenRow] = {}
        self._ids: dict[str, int] = {}
        """Id of each token by its digest."""
        self.used: dict[int, float] = {}
        """Time of the last use of tokens, in seconds since 1970, until it is stored."""
        self.revision = 0
        """Number of changes after which event streams must identify their readers again."""

    def load(self, connection: Connection) -> None:
        """Read all users and tokens; called once, at startup."""
        for user in read_rows(connection, UserRow, select(users)):
            self.put_user(user)
        for token in read_rows(connection, TokenRow, select(tokens)):
            self.put_token(token)

    def put_user(self, user: UserRow) -> None:
        """Add or replace a user."""
        self._users = {**self._users, user.id: user}
        self.revision += 1

    def note_change(self) -> None:
        """End the event streams, whose readers may see other projects from now on."""
        self.revision += 1

    def put_token(self, token: TokenRow) -> None:
        """Add a token."""
        self._tokens = {**self._tokens, token.id: token}
        self._ids[token.digest] = token.id

    def remove_token(self, token_id: int) -> None:
        """Remove a token; it is invalid from now on."""
        token = self._tokens.get(token_id)
        if token is not None:
            self._tokens = {key: row for key, row in self._tokens.items() if key != token_id}
            self._ids.pop(token.digest, None)
            self.used.pop(token_id, None)
            self.revision += 1

    def stored_use(self, token_id: int, moment: float) -> None:
        """Note that a last use is stored in the database."""
        token = self._tokens.get(token_id)
        if token is not None:
            self.put_token(replace(token, last_used_at=moment))
        if self.used.get(token_id) == moment:
            self.used.pop(token_id)

    def users(self) -> list[UserRow]:
        """Return all users, sorted by name."""
        return sorted(self._users.values(), key=attrgetter("name"))

    def tokens_of(self, user_id: int) -> list[TokenRow]:
        """Return the tokens of a user with their last use, oldest first."""
        return [
            replace(token, last_used_at=self.used.get(token.id, token.last_used_at))
            for _, token in sorted(self._tokens.items())
            if token.user_id == user_id
        ]

    def user(self, user_id: int) -> UserRow | None:
        """Return a user; None if there is none with this id."""
        return self._users.get(user_id)

    def find(self, name: str) -> UserRow | None:
        """Return the user with a name; None if there is none."""
        return next((user for user in self._users.values() if user.name == name), None)

    def name_of(self, user_id: int) -> str:
        """Return the name of a user."""
        return self._users[user_id].name

    def shown_owner(self, user_id: int) -> str | None:
        """Return the name of an owner; None while the installation has a single user."""
        return self._users[user_id].name if self.shared else None

    @property
    def shared(self) -> bool:
        """Whether the installation has several users."""
        return len(self._users) > 1

    def token(self, token_id: int) -> TokenRow | None:
        """Return a token that is not revoked and has not expired; None otherwise."""
        token = self._tokens.get(token_id)
        if token is None or (token.expires_at is not None and token.expires_at <= time.time()):
            return None
        return token

    def expiry_of(self, token_id: int) -> float | None:
        """Return the end of a token's validity; None if it has none or there is no such token."""
        token = self._tokens.get(token_id)
        return None if token is None else token.expires_at

    def find_token(self, text: str) -> TokenRow | None:
        """Return the valid token with this text, and record its use; None if there is none."""
        token_id = self._ids.get(digest_of(text)) if text.startswith(_PREFIX) else None
        token = None if token_id is None else self.token(token_id)
        if token is not None:
            self.used[token.id] = time.time()
        return token


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
