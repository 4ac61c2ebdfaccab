"""Who may do what: tokens, the page's cookie, Host names, sizes and headers; closed by default.

One ASGI layer stands before every route, so that a new route cannot be forgotten. It knows three
kinds of callers: the owner (the token of the installation, or a browser that came through a
one-time link), a run (a token made from the owner's for that run alone), and nobody.
"""

import hashlib
import hmac
import re
import secrets
import time
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from zerolab.errors import ConfigError, ForbiddenError
from zeroserver.errors import TooLargeError, UnauthorizedError, error_response
from zeroserver.settings import Settings

__all__ = ["COOKIE", "OPEN_PATHS", "Guard", "Keys"]

COOKIE = "zerolab_session"

OPEN_PATHS = frozenset({"/", "/healthz", "/login"})
"""Served to anyone, besides the files of the page; nothing of an experiment is in them."""

_OPEN_PREFIX = "/assets/"
_RUN_PATH = re.compile(r"/api/v1/runs/(\d{1,18})/")
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")

_FOREVER = "private, max-age=31536000, immutable"

_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "font-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'self'; "
        "frame-ancestors 'none'"
    ),
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


@dataclass
class Keys:
    """Makes and checks tokens; all but the owner's are derived from it, so none is stored."""

    token: str
    session_s: float
    login_code_s: float
    _codes: dict[str, float] = field(default_factory=dict)

    def run_token(self, run_id: int) -> str:
        """Return the token of one run: good for its own routes, nothing else."""
        return f"run.{run_id}.{self._sign(f'run {run_id}')}"

    def login_code(self) -> str:
        """Return a code that opens the page once."""
        now = time.monotonic()
        self._codes = {code: end for code, end in self._codes.items() if end > now}
        code = secrets.token_urlsafe(24)
        self._codes[code] = now + self.login_code_s
        return code

    def redeem(self, code: str) -> str | None:
        """Exchange a login code for the value of a session cookie; None if it is not valid."""
        end = self._codes.pop(code, None)
        if end is None or end < time.monotonic():
            return None
        until = int(time.time() + self.session_s)
        return f"{until}.{self._sign(f'session {until}')}"

    def caller(self, bearer: str | None, cookie: str | None) -> str | None:
        """Return ``owner``, ``session``, ``run 7``, or None for nobody."""
        if bearer is not None:
            if hmac.compare_digest(bearer.encode(), self.token.encode()):
                return "owner"
            kind, _, rest = bearer.partition(".")
            number, _, signature = rest.partition(".")
            name = f"run {number}"
            if kind == "run" and self._signed(name, signature):
                return name
            return None
        if cookie is not None:
            until, _, signature = cookie.partition(".")
            fresh = until.isdecimal() and len(until) < 15 and int(until) > time.time()
            if fresh and self._signed(f"session {until}", signature):
                return "session"
        return None

    def _sign(self, text: str) -> str:
        return hmac.new(self.token.encode(), text.encode(), hashlib.sha256).hexdigest()

    def _signed(self, text: str, signature: str) -> bool:
        return hmac.compare_digest(self._sign(text).encode(), signature.encode())


class Guard:
    """The layer before all routes."""

    def __init__(self, app: ASGIApp, keys: Keys, settings: Settings) -> None:
        self._app = app
        self._keys = keys
        self._limits = settings.limits
        names = {*_LOOPBACK, settings.host, *settings.host_names}
        if settings.allow_remote and settings.host in {"0.0.0.0", "::"}:  # noqa: S104 - compared
            names.discard(settings.host)
        self._hosts = {name.lower() for name in names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request pass, or answer it with the error."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        guarded_send = _with_headers(send, scope["path"])
        try:
            self._check(scope, headers)
        except (ConfigError, ForbiddenError, TooLargeError) as error:
            await error_response(error)(scope, receive, guarded_send)
            return
        await self._app(scope, _limited(receive, self._limit(scope)), guarded_send)

    def _limit(self, scope: Scope) -> int:
        large = scope["path"] in {"/api/v1/experiments", "/api/v1/import"}
        return self._limits.body_bytes if large else self._limits.small_body_bytes

    def _check(self, scope: Scope, headers: Headers) -> None:
        self._check_host(headers)
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self._limit(scope):
            msg = f"body: must have at most {self._limit(scope)} bytes, got {length[:20]}"
            raise TooLargeError(msg)
        path, method = scope["path"], scope["method"]
        if b"%00" in scope["query_string"] or "\0" in path:
            raise ConfigError("request", ["a NUL character is in no name"])
        if path in OPEN_PATHS or path.startswith(_OPEN_PREFIX):
            return
        caller = self._keys.caller(_bearer(headers), _cookie(headers))
        if caller is None:
            msg = "a valid token is needed: send it as `Authorization: Bearer TOKEN`"
            raise UnauthorizedError(msg)
        if caller == "session" and method not in _SAFE:
            self._check_origin(headers)
        if caller.startswith("run "):
            match = _RUN_PATH.match(path)
            if match is None or match[1] != caller.removeprefix("run "):
                msg = f"the token of {caller} is good for the routes of that run only"
                raise ForbiddenError(msg)

    def _check_host(self, headers: Headers) -> None:
        host = headers.get("host", "").lower()
        name = re.sub(r":\d+$", "", host)
        if name not in self._hosts:
            msg = (
                f"this server does not answer to the name {name[:100]!r}; "
                "start it with --host-name NAME if it should"
            )
            raise ForbiddenError(msg)

    @staticmethod
    def _check_origin(headers: Headers) -> None:
        origin = headers.get("origin", "")
        if origin.partition("://")[2].lower() != headers.get("host", "").lower():
            msg = "a change from the page must come from the page: the Origin header is another"
            raise ForbiddenError(msg)


def _bearer(headers: Headers) -> str | None:
    kind, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else None


def _cookie(headers: Headers) -> str | None:
    try:
        cookies = SimpleCookie(headers.get("cookie", ""))
    except CookieError:
        return None
    return cookies[COOKIE].value if COOKIE in cookies else None


def _with_headers(send: Send, path: str) -> Send:
    # Files of the page are named by their content; everything else is the state of this moment.
    asset = path.startswith(_OPEN_PREFIX)

    async def wrapped(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers.setdefault(name, value)
            good = asset and message["status"] < 400
            headers.setdefault("Cache-Control", _FOREVER if good else "no-store")
        await send(message)

    return wrapped


def _limited(receive: Receive, limit: int) -> Receive:
    """Stop reading a body that does not say its length and does not end."""
    read = 0

    async def wrapped() -> Message:
        nonlocal read
        message = await receive()
        read += len(message.get("body", b""))
        if read > limit:
            msg = f"body: must have at most {limit} bytes"
            raise TooLargeError(msg)
        return message

    return wrapped
