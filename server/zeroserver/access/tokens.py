"""Creation and checks of tokens and cookies.

The token of the installation, the join token of agents and two random keys are stored in files, API
tokens of users as hashes in the database. Tokens of runs and searcher processes are signed with the
first key, so they stay valid when the token of the installation is renewed. Cookies are signed with
the second key and the token of the installation, so a new token logs all browsers out. A cookie
names the user and the API token of its login link, and is invalid without either.
"""

import hashlib
import hmac
import secrets
import threading
import time
from typing import Literal

import msgspec

from zerolab.files import create_private, write_json
from zerolab.paths import Home
from zeroserver.access.principal import NOBODY, OWNER, Principal
from zeroserver.errors import StoreError
from zeroserver.store.user_directory import ADMIN, SHARE_PREFIX, ShareDirectory, UserDirectory

__all__ = ["TokenStore", "is_number"]

_MAX_DIGITS = 18
_TASK_CODE_S = 60.0


class _Stored(msgspec.Struct):
    """Content of ``keys.json``."""

    runs: str
    """Key of the tokens of runs and searcher processes."""
    sessions: str
    """Key of the cookies of browsers."""
    ended: dict[str, int] = msgspec.field(default_factory=dict)
    """Revoked sessions, each with its expiry time."""
    epochs: dict[int, int] = msgspec.field(default_factory=dict)
    """Number of times that all sessions of a user were revoked."""


class _Session(msgspec.Struct, frozen=True):
    """Content of a cookie."""

    expires_at: int
    name: str
    parent: str
    user_id: int
    epoch: int
    token_id: int

    @classmethod
    def read(cls, text: str) -> "_Session | None":
        """Parse the signed part of a cookie; None if it has another form."""
        expiry, _, names = text.partition(".")
        name, *rest = names.split(".")
        if len(rest) < 4:  # of an earlier version, when everybody was the administrator
            rest = [rest[0] if rest else "", str(ADMIN.id), "0", "0"]
        numbers = (expiry, *rest[1:])
        if len(rest) != 4 or not all(map(is_number, numbers)):
            return None
        return cls(int(expiry), name, rest[0], *map(int, rest[1:]))

    def __str__(self) -> str:
        parts = (self.expires_at, self.name, self.parent, self.user_id, self.epoch, self.token_id)
        return ".".join(map(str, parts))


class _Code(msgspec.Struct, frozen=True):
    """Login code that was not used yet."""

    expires_at: float
    creator: Principal
    epoch: int


class TokenStore:
    """Tokens and cookies of this installation, and the callers that they identify.

    Args:
        home: Directory with the token and the keys; missing ones are created.
        users: Users and their API tokens.
        shares: Share links.
        session_s: Lifetime of a browser session, in seconds.
        login_code_s: Lifetime of a one-time link, in seconds.
    """

    def __init__(
        self,
        home: Home,
        users: UserDirectory,
        shares: ShareDirectory,
        session_s: float,
        login_code_s: float,
    ) -> None:
        self._home = home
        self._users = users
        self._shares = shares
        self.token = home.ensure_token()
        self.session_s = session_s
        self._login_code_s = login_code_s
        self.agent_token = home.ensure_agent_token()
        self.generation = 0
        """Number of renewals of the installation's token and the agents' token."""
        self._codes: dict[str, _Code] = {}
        self._changing = threading.Lock()
        self._stored = _load(home)
        mark = hashlib.sha256(f"cookie {self._stored.runs}".encode()).hexdigest()
        self.cookie = f"zerolab_{mark[:12]}"
        """Name of the cookie: unique for this installation, since browsers ignore ports."""
        self.share_cookie = f"{self.cookie}_share"
        """Name of the cookie with the token of a share link."""
        self.task_cookie = f"{self.cookie}_task"
        """Name of the cookie of a task's host."""
        self._task_codes: dict[str, tuple[float, int, str]] = {}
        """Unused codes, each with its expiry time, its task and the cookie that it gives."""

    def run_token(self, run_id: int) -> str:
        """Return the token of a run, valid only for the routes of this run."""
        return f"run.{run_id}.{_sign(self._stored.runs, str(run_id))}"

    def search_token(self, experiment_id: int) -> str:
        """Return the token of a searcher process, valid for its experiment's search routes."""
        return f"search.{experiment_id}.{_sign(self._stored.runs, f'search {experiment_id}')}"

    def login_code(self, creator: Principal = OWNER) -> str:
        """Return a code that opens the page once, as the same user.

        Args:
            creator: User who requests it. The logout of a browser session revokes its code and the
                session opened with it; so does the end of a user's API token.
        """
        now = time.monotonic()
        with self._changing:
            self._codes = {
                code: entry for code, entry in self._codes.items() if entry.expires_at > now
            }
            code = secrets.token_urlsafe(24)
            epoch = self._epoch(creator.user_id)
            self._codes[code] = _Code(now + self._login_code_s, creator, epoch)
        return code

    def redeem(self, code: str) -> str | None:
        """Exchange a login code for the value of a cookie; None if the code is invalid."""
        entry = self._codes.pop(code, None)
        if entry is None or entry.expires_at < time.monotonic():
            return None
        return self._open_session(entry.creator, entry.epoch)

    def session_of(self, user_id: int) -> str:
        """Return the value of a cookie for a user who has signed in with a password."""
        return self._open_session(Principal("user", user_id=user_id), self._epoch(user_id))

    def task_code(self, task_id: int, creator: Principal) -> str:
        """Return a code that opens a task's host once, within a minute, as the same user.

        Args:
            task_id: The task.
            creator: User who opens it; the session ends with that user's session or token.
        """
        now = time.monotonic()
        session = str(self._new_session(creator, self._epoch(creator.user_id), creator.session))
        cookie = f"{session}.{_sign(self._session_key, f'task {task_id} {session}')}"
        with self._changing:
            codes = self._task_codes.items()
            self._task_codes = {code: entry for code, entry in codes if entry[0] > now}
            code = secrets.token_urlsafe(24)
            self._task_codes[code] = (now + _TASK_CODE_S, task_id, cookie)
        return code

    def redeem_task(self, task_id: int, code: str) -> str | None:
        """Exchange a code for the value of a task's cookie; None if the code is invalid."""
        expires_at, task, cookie = self._task_codes.pop(code, (0.0, 0, ""))
        return cookie if task == task_id and expires_at > time.monotonic() else None

    def identify_task(self, task_id: int, cookie: str | None) -> Principal:
        """Return the caller of a task's cookie; ``nobody`` if it is invalid or of another task."""
        return NOBODY if cookie is None else self._browser(cookie, f"task {task_id} ")

    def _open_session(self, creator: Principal, epoch: int) -> str:
        session = str(self._new_session(creator, epoch, secrets.token_hex(8)))
        return f"{session}.{_sign(self._session_key, session)}"

    def _new_session(self, creator: Principal, epoch: int, name: str) -> _Session:
        return _Session(
            int(time.time() + self.session_s),
            name or secrets.token_hex(8),
            creator.session,
            creator.user_id,
            epoch,
            creator.token_id,
        )

    def identify(self, bearer: str | None, cookie: str | None) -> Principal:
        """Return the caller of a token or cookie; ``nobody`` if it is invalid."""
        if bearer is not None:
            return self.identify_share(bearer) or self._bearer(bearer)
        if cookie is not None:
            return self._browser(cookie)
        return NOBODY

    def identify_share(self, token: str) -> Principal | None:
        """Return the caller with a share link; ``nobody`` if it is invalid, None for no such link.

        Args:
            token: Token of the link, or any other text.
        """
        if not token.startswith(SHARE_PREFIX):
            return None
        share = self._shares.find(token)
        if share is None:
            return NOBODY
        return Principal(
            "share",
            share_id=share.row.id,
            sharer_id=share.row.owner_id,
            experiment_ids=share.experiment_ids,
        )

    def is_revoked(self, principal: Principal) -> bool:
        """Check whether the token or link of a caller was revoked or has expired since."""
        if principal.kind == "share":
            return self._shares.valid(principal.share_id) is None
        return bool(principal.token_id) and self._users.token(principal.token_id) is None

    def end_session(self, session: str) -> None:
        """Revoke a browser session and the sessions opened with its links.

        Raises:
            StoreError: If the file cannot be written.
        """
        with self._changing:
            now = time.time()
            ended = {name: end for name, end in self._stored.ended.items() if end > now}
            ended[session] = int(now + self.session_s)
            self._codes = {
                code: entry
                for code, entry in self._codes.items()
                if entry.creator.session != session
            }
            self._save(msgspec.structs.replace(self._stored, ended=ended))
            self._users.revision += 1

    def end_sessions_of(self, user_id: int) -> None:
        """Revoke all browser sessions and all unused login links of a user.

        Raises:
            StoreError: If the file cannot be written.
        """
        with self._changing:
            epochs = {**self._stored.epochs, user_id: self._epoch(user_id) + 1}
            self._save(msgspec.structs.replace(self._stored, epochs=epochs))
            self._users.revision += 1
            self._codes = {
                code: entry
                for code, entry in self._codes.items()
                if entry.creator.user_id != user_id
            }

    def _epoch(self, user_id: int) -> int:
        return self._stored.epochs.get(user_id, 0)

    def renew_token(self) -> str:
        """Replace the token of the installation and return the new one; log all browsers out.

        Raises:
            StoreError: If the file cannot be written.
        """
        with self._changing:
            self._codes = {}
            try:
                self.token = self._home.replace_token()
            except OSError as error:
                raise StoreError.of_file(error, self._home.token_file) from error
            self.generation += 1
            self._users.revision += 1
            return self.token

    def renew_agent_token(self) -> str:
        """Replace the join token of agents and return the new one.

        Raises:
            StoreError: If the file cannot be written.
        """
        with self._changing:
            try:
                self.agent_token = self._home.replace_agent_token()
            except OSError as error:
                raise StoreError.of_file(error, self._home.agent_token_file) from error
            self.generation += 1
            return self.agent_token

    @property
    def _session_key(self) -> str:
        return f"{self._stored.sessions} {self.token}"

    def _save(self, stored: _Stored) -> None:
        try:
            write_json(self._home.keys_file, stored)
        except OSError as error:
            raise StoreError.of_file(error, self._home.keys_file) from error
        self._stored = stored

    def _bearer(self, bearer: str) -> Principal:
        if hmac.compare_digest(bearer.encode(), self.token.encode()):
            return OWNER
        if hmac.compare_digest(bearer.encode(), self.agent_token.encode()):
            return Principal("agent")
        kind, _, remainder = bearer.partition(".")
        number, _, signature = remainder.partition(".")
        if not is_number(number):
            token = self._users.find_token(bearer)
            return NOBODY if token is None else self._user("user", token.user_id, token.id)
        if kind == "run" and _signed(self._stored.runs, number, signature):
            return Principal("run", run_id=int(number))
        if kind == "search" and _signed(self._stored.runs, f"search {number}", signature):
            return Principal("search", experiment_id=int(number))
        return NOBODY

    def _browser(self, cookie: str, purpose: str = "") -> Principal:
        text, _, signature = cookie.rpartition(".")
        session = _Session.read(text)
        if session is None or session.expires_at <= time.time():
            return NOBODY
        if not _signed(self._session_key, purpose + text, signature):
            return NOBODY
        if self._stored.ended.keys() & {session.name, session.parent}:
            return NOBODY
        if session.epoch != self._epoch(session.user_id):
            return NOBODY
        if session.token_id and self._users.token(session.token_id) is None:
            return NOBODY
        return self._user(
            "browser", session.user_id, session.token_id, session.name, session.parent
        )

    def _user(
        self,
        kind: Literal["user", "browser"],
        user_id: int,
        token_id: int,
        session: str = "",
        parent: str = "",
    ) -> Principal:
        """Return a caller who is a user; ``nobody`` if the user is not active."""
        user = self._users.user(user_id)
        if user is None or not user.active:
            return NOBODY
        return Principal(
            kind,
            session=session,
            parent=parent,
            user_id=user_id,
            user=user.name,
            role=user.role,
            token_id=token_id,
        )


def _load(home: Home) -> _Stored:
    """Read the keys; create random ones if the file is missing or damaged."""
    try:
        return msgspec.json.decode(home.keys_file.read_bytes(), type=_Stored)
    except FileNotFoundError:
        pass
    except msgspec.DecodeError:  # damaged: new keys, so browsers must log in again
        home.keys_file.unlink()
    fresh = _Stored(secrets.token_hex(32), secrets.token_hex(32))
    create_private(home.keys_file, msgspec.json.encode(fresh))
    return msgspec.json.decode(home.keys_file.read_bytes(), type=_Stored)


def is_number(text: str) -> bool:
    """Check whether a part of a token or a path is a whole number that the database can store."""
    return text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS


def _sign(key: str, text: str) -> str:
    return hmac.digest(key.encode(), text.encode(), "sha256").hex()


def _signed(key: str, text: str, signature: str) -> bool:
    return hmac.compare_digest(_sign(key, text).encode(), signature.encode())
