"""Creation and checks of tokens and cookies.

The owner's token, the join token of agents and two random keys are stored. Tokens of runs and
searcher processes are signed with the first key, so they stay valid when the owner's token is
renewed. Cookies are signed with the second key and the owner's token, so a new token logs all
browsers out.
"""

import hashlib
import hmac
import secrets
import threading
import time

import msgspec

from zerolab.files import create_private, write_json
from zerolab.paths import Home
from zeroserver.access.principal import NOBODY, OWNER, Principal
from zeroserver.errors import StoreError

__all__ = ["TokenStore"]

_MAX_RUN_DIGITS = 18


class _Stored(msgspec.Struct):
    """Content of ``keys.json``."""

    runs: str
    """Key of the tokens of runs and searcher processes."""
    sessions: str
    """Key of the cookies of browsers."""
    ended: dict[str, int] = msgspec.field(default_factory=dict)
    """Revoked sessions, each with its expiry time."""


class TokenStore:
    """Tokens and cookies of this installation, and the callers that they identify.

    Args:
        home: Directory with the token and the keys; missing ones are created.
        session_s: Lifetime of a browser session, in seconds.
        login_code_s: Lifetime of a one-time link, in seconds.
    """

    def __init__(self, home: Home, session_s: float, login_code_s: float) -> None:
        self._home = home
        self.token = home.ensure_token()
        self.session_s = session_s
        self._login_code_s = login_code_s
        self.agent_token = home.ensure_agent_token()
        self.generation = 0
        """Number of renewals of the owner's token and the agents' token."""
        self._codes: dict[str, tuple[float, str]] = {}
        self._changing = threading.Lock()
        self._stored = _load(home)
        mark = hashlib.sha256(f"cookie {self._stored.runs}".encode()).hexdigest()
        self.cookie = f"zerolab_{mark[:12]}"
        """Name of the cookie: unique for this installation, since browsers ignore ports."""

    def run_token(self, run_id: int) -> str:
        """Return the token of a run, valid only for the routes of this run."""
        return f"run.{run_id}.{_sign(self._stored.runs, str(run_id))}"

    def search_token(self, experiment_id: int) -> str:
        """Return the token of a searcher process, valid for its experiment's search routes."""
        return f"search.{experiment_id}.{_sign(self._stored.runs, f'search {experiment_id}')}"

    def login_code(self, session: str = "") -> str:
        """Return a code that opens the page once.

        Args:
            session: Browser session that requests it; its logout revokes the code and the session
                opened with it. Empty for the owner's token.
        """
        now = time.monotonic()
        with self._changing:
            self._codes = {code: entry for code, entry in self._codes.items() if entry[0] > now}
            code = secrets.token_urlsafe(24)
            self._codes[code] = (now + self._login_code_s, session)
        return code

    def redeem(self, code: str) -> str | None:
        """Exchange a login code for the value of a cookie; None if the code is invalid."""
        expires_at, parent = self._codes.pop(code, (0.0, ""))
        if expires_at < time.monotonic():
            return None
        session = f"{int(time.time() + self.session_s)}.{secrets.token_hex(8)}"
        session += f".{parent}" if parent else ""
        return f"{session}.{_sign(self._session_key, session)}"

    def identify(self, bearer: str | None, cookie: str | None) -> Principal:
        """Return the caller of a token or cookie; ``nobody`` if it is invalid."""
        if bearer is not None:
            return self._bearer(bearer)
        if cookie is not None:
            return self._browser(cookie)
        return NOBODY

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
                code: entry for code, entry in self._codes.items() if entry[1] != session
            }
            self._save(msgspec.structs.replace(self._stored, ended=ended))

    def end_all_sessions(self) -> None:
        """Revoke all browser sessions and all unused login links.

        Raises:
            StoreError: If the file cannot be written.
        """
        with self._changing:
            self._codes = {}
            fresh = _Stored(self._stored.runs, secrets.token_hex(32))
            self._save(fresh)

    def renew_token(self) -> str:
        """Replace the owner's token and return the new one; log all browsers out.

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
        if not (number.isascii() and number.isdecimal() and len(number) <= _MAX_RUN_DIGITS):
            return NOBODY
        if kind == "run" and _signed(self._stored.runs, number, signature):
            return Principal("run", run_id=int(number))
        if kind == "search" and _signed(self._stored.runs, f"search {number}", signature):
            return Principal("search", experiment_id=int(number))
        return NOBODY

    def _browser(self, cookie: str) -> Principal:
        session, _, signature = cookie.rpartition(".")
        expiry, _, names = session.partition(".")
        name, _, parent = names.partition(".")
        unexpired = expiry.isdecimal() and len(expiry) < 15 and int(expiry) > time.time()
        signed = _signed(self._session_key, session, signature)
        if unexpired and signed and not self._stored.ended.keys() & {name, parent}:
            return Principal("browser", session=name, parent=parent)
        return NOBODY


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


def _sign(key: str, text: str) -> str:
    return hmac.digest(key.encode(), text.encode(), "sha256").hex()


def _signed(key: str, text: str, signature: str) -> bool:
    return hmac.compare_digest(_sign(key, text).encode(), signature.encode())
