"""Access control of every request: tokens, cookies, Host names, sizes and headers.

One ASGI layer runs before every route. It identifies the caller
(:class:`zeroserver.access.principal.Principal`), compares it with the callers and the role that the
access table requires (:data:`zeroserver.access.routes.ACCESS`), checks the owner of the resource in
the path, and stores the caller in the request's scope.
"""

import base64
import binascii
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from http.cookies import CookieError, SimpleCookie
from time import perf_counter

from fastapi.routing import iter_route_contexts
from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from zerolab.errors import ConfigError, ForbiddenError, ZerolabError
from zeroserver.access.ownership import Ownership
from zeroserver.access.principal import NOBODY, Principal
from zeroserver.access.request_times import RequestTimes
from zeroserver.access.routes import ACCESS, ADMIN_TOKEN, PUBLIC, resources_of
from zeroserver.access.task_hosts import (
    PROXY,
    TASK,
    TaskHosts,
    is_navigation,
    sign_in_response,
)
from zeroserver.access.tokens import TokenStore
from zeroserver.errors import (
    ExpiredTokenError,
    TooLargeError,
    UnauthorizedError,
    error_response,
)
from zeroserver.protocols import protocol_of
from zeroserver.settings import Settings
from zeroserver.visibility import hiding

__all__ = ["Guard", "open_paths"]

_ASSETS = "/assets/"
_DOCS = "/docs/"
_OPEN_PREFIXES = (_ASSETS, _DOCS)


def open_paths() -> frozenset[str]:
    """Return the paths that need no token, besides the files of the page and the documentation."""
    paths = (name.partition(" ")[2] for name, access in ACCESS.items() if access == PUBLIC)
    return frozenset(paths) - {_ASSETS.rstrip("/")}


_API = "/api/v1"
_LARGE = ("/api/v1/external-runs/", "/api/v1/import", PROXY)
"""Prefixes of routes that receive whole runs or media, or pass requests on."""
_MAX_ACTION = 500
"""Maximum length of an action in the audit log, in characters."""

_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")

_DEFAULT_PORTS = {"http": ":80", "https": ":443"}

_MAX_CACHED_ROUTES = 4096
"""Maximum number of paths whose route is cached."""

_PORT = re.compile(r":\d+$")

_CACHE = b"cache-control"
_IMMUTABLE = (_CACHE, b"private, max-age=31536000, immutable")
_REVALIDATE = (_CACHE, b"private, no-cache")
_NO_STORE = (_CACHE, b"no-store")

_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "media-src 'self'; font-src 'self'; connect-src 'self'; base-uri 'none'; "
        "form-action 'self'; frame-ancestors 'none'"
    ),
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
_RAW_HEADERS = tuple((name.lower().encode(), value.encode()) for name, value in _HEADERS.items())
"""Encoded once, since every response has them."""
_NAMES = frozenset(name for name, _ in _RAW_HEADERS)

_Headers = Mapping[bytes, bytes]
"""First value of each header of a request, by lower-case name."""


class Guard:
    """ASGI middleware that checks each request before all routes.

    Args:
        app: The next layer.
        keys: Tokens of this installation.
        settings: Settings of the server.
        routes: Routes and included routers, in the order in which a request tries them.
        has_ended: Checks whether a run has ended; its token has expired then.
        ownership: Checks the owner of the resource in a path.
        record: Adds a change by a user to the audit log.
        times: Durations of the requests.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: TokenStore,
        settings: Settings,
        routes: Sequence[BaseRoute],
        *,
        has_ended: Callable[[int], Awaitable[bool]],
        ownership: Ownership,
        record: Callable[[Principal, str], Awaitable[None]],
        times: RequestTimes,
    ) -> None:
        self._app = app
        self._times = times
        self._keys = keys
        self._routes = routes
        self._route_cache: dict[tuple[str, str], tuple[str, dict[str, str]]] = {}
        self._has_ended = has_ended
        self._ownership = ownership
        self._record = record
        self._open_paths = open_paths()
        self._tasks = TaskHosts(settings.task_domain, keys)
        self._limits = settings.limits
        self._behind_https = settings.behind_https
        names = {*_LOOPBACK, settings.host, *settings.host_names}
        if settings.allow_remote and settings.host in {"0.0.0.0", "::"}:  # noqa: S104 - compared
            names.discard(settings.host)
        self._hosts = {name.lower() for name in names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request and pass it to the application, or respond with an error."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # only HTTP is supported; anything else would bypass the checks
            await send({"type": "websocket.close", "code": 1008})
            return
        if self._behind_https:
            scope["scheme"] = "https"
        headers: _Headers = dict(reversed(scope["headers"]))
        self._tasks.enter(scope, _text(headers, b"host"))
        guarded_send = _with_headers(send, scope["path"])
        try:
            opened = self._tasks.open_session(scope) if TASK in scope else None
            if opened is not None:
                await opened(scope, receive, guarded_send)
                return
            principal = self._check(scope, headers)
            hidden = self._ownership.hidden_from(principal)
            scope.setdefault("state", {})["is_current"] = lambda: (
                self._identify(scope, headers)[0] == principal
                and self._ownership.hidden_from(principal) == hidden
            )
        except ZerolabError as error:
            await _refuse(error, scope, receive, guarded_send)
            return
        if not hidden:
            await self._serve(scope, receive, guarded_send, principal)
            return
        with hiding(hidden):
            await self._serve(scope, receive, guarded_send, principal)

    async def _serve(
        self, scope: Scope, receive: Receive, guarded_send: Send, principal: Principal
    ) -> None:
        """Pass a request of a known caller to the application, or respond with an error."""
        start = perf_counter()
        try:
            if principal.kind == "run" and await self._has_ended(principal.run_id):
                msg = f"the token of {principal} has expired: the run has ended"
                raise ExpiredTokenError(msg)
            if principal.role is not None and not principal.is_admin:
                await self._check_resources(scope, principal)
            elif principal.kind == "share":
                await self._check_shown(scope, principal)
            scope.setdefault("state", {})["principal"] = principal
        except ZerolabError as error:
            await _refuse(error, scope, receive, guarded_send)
            return
        if scope["method"] not in _SAFE and self._is_audited(scope):
            guarded_send = self._recorded(scope, guarded_send)
        try:
            await self._app(scope, _limited(receive, self._limit(scope)), guarded_send)
        finally:
            if not scope["path"].startswith(PROXY):  # their durations are those of programs
                self._times.note(scope, start)

    def _is_audited(self, scope: Scope) -> bool:
        """Check whether a route makes changes for users, not for agents, runs or searchers."""
        access = ACCESS.get(self._find_route(scope)[0], ADMIN_TOKEN)
        return access.audited and (access == PUBLIC or access.callers <= {"user", "browser"})

    def _recorded(self, scope: Scope, send: Send) -> Send:
        """Wrap ``send`` to record a successful change of a user before its response."""

        async def wrapped(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] < 400:
                principal: Principal = scope["state"]["principal"]  # signing in sets another one
                if principal.role is not None:
                    path = scope["path"].removeprefix(_API)
                    await self._record(principal, f"{scope['method']} {path}"[:_MAX_ACTION])
            await send(message)

        return wrapped

    def _limit(self, scope: Scope) -> int:
        path = scope["path"]
        protocol = protocol_of(path)
        if protocol is not None and path.startswith(protocol.files):
            return protocol.max_file_bytes
        large = path == "/api/v1/experiments" or path.startswith(_LARGE)
        return self._limits.body_bytes if large else self._limits.small_body_bytes

    def _check(self, scope: Scope, headers: _Headers) -> Principal:
        self._check_host(scope, headers)
        length, limit = _text(headers, b"content-length", "0"), self._limit(scope)
        if not length.isdecimal() or int(length) > limit:
            msg = f"body: must have at most {limit} bytes, got {length[:20]}"
            raise TooLargeError(msg)
        path, method = scope["path"], scope["method"]
        if b"%00" in scope["query_string"] or "\0" in path:
            raise ConfigError("request", ["a NUL character is in no name"])
        principal, bearer = self._identify(scope, headers)
        if path in self._open_paths or path.startswith(_OPEN_PREFIXES):
            if method not in _SAFE:  # no other page may sign a browser in as somebody else
                self._check_origin(scope["scheme"], headers)
            return principal
        if principal == NOBODY:
            msg = "a valid token is needed: send it as `Authorization: Bearer TOKEN`"
            if bearer is not None and self._keys.identify_share(bearer) is not None:
                msg = "this share link has expired or was revoked; ask its sender for a new one"
            raise UnauthorizedError(msg)
        # Other pages may open WebSockets, with cookies, and read from them.
        if principal.must_show_origin() and (method not in _SAFE or b"upgrade" in headers):
            self._check_origin(scope["scheme"], headers)
        if principal.kind != "user" or not principal.is_admin:
            self._check_route(scope, principal)
        return principal

    def _identify(self, scope: Scope, headers: _Headers) -> tuple[Principal, str | None]:
        """Return the caller and the token; on the host of a task only its cookie counts."""
        if TASK in scope:
            cookie = _cookie(headers, self._keys.task_cookie)
            return self._keys.identify_task(scope[TASK], cookie), None
        bearer = _bearer(headers)
        if bearer is None and protocol_of(scope["path"]) is not None:
            bearer = _password(headers)
        cookie = _cookie(headers, self._keys.cookie) if bearer is None else None
        principal = self._keys.identify(bearer, cookie)
        if principal == NOBODY and bearer is None:  # a signed-in user keeps the own session
            share = _cookie(headers, self._keys.share_cookie)
            if share is not None:
                principal = self._keys.identify_share(share) or NOBODY
            bearer = share
        return principal, bearer

    def _check_route(self, scope: Scope, principal: Principal) -> None:
        """Raise ForbiddenError if the access table does not permit the caller for the route."""
        name, parameters = self._find_route(scope)
        if not name and principal.role is not None:
            return  # there is no such route: 404 or 405
        access = ACCESS.get(name, ADMIN_TOKEN)
        if principal.may_call(access, parameters):
            return
        is_user = principal.kind in access.callers and principal.role is not None
        if is_user and not principal.has_role(access.role):
            msg = (
                f"user {principal.user} has the role {principal.role}, but this needs the role "
                f"{access.role}; ask an administrator"
            )
        elif principal.kind == "share":
            msg = "a share link does not permit this; sign in as a user"
        elif principal.kind == "browser":
            msg = "a browser session may not use this route; use a token"
        else:
            msg = f"the token of {principal} is not valid for this route"
        raise ForbiddenError(msg)

    async def _check_resources(self, scope: Scope, principal: Principal) -> None:
        """Check the resources in the path.

        Raises:
            NotFoundError: If one is in a project that the caller must not see.
            ForbiddenError: If one belongs to another user.
        """
        name, parameters = self._find_route(scope)
        access = ACCESS.get(name, ADMIN_TOKEN)
        for kind, parameter in resources_of(name).items():
            await self._ownership.require_visible(kind, parameters[parameter])
        if access.owned is not None:
            key = parameters[access.parameter]
            await self._ownership.require(principal, access.owned, key)

    async def _check_shown(self, scope: Scope, principal: Principal) -> None:
        """Raise ForbiddenError if a share link does not show the resource in the path."""
        name, parameters = self._find_route(scope)
        access = ACCESS.get(name, ADMIN_TOKEN)
        if access.shown is not None:
            key = parameters[access.parameter]
            await self._ownership.require_shown(principal, access.shown, key)

    def _find_route(self, scope: Scope) -> tuple[str, dict[str, str]]:
        """Return method and path of the route of a request, and its parameters."""
        cache_key = (scope["method"].replace("HEAD", "GET"), scope["path"])
        if cache_key in self._route_cache:
            return self._route_cache[cache_key]
        for context in iter_route_contexts(self._routes):
            route = context.original_route
            match, child_scope = route.matches(scope)
            if match is Match.FULL:
                if len(self._route_cache) >= _MAX_CACHED_ROUTES:
                    self._route_cache.clear()
                name = f"{cache_key[0]} {getattr(route, 'path', '')}"
                self._route_cache[cache_key] = name, child_scope.get("path_params", {})
                return self._route_cache[cache_key]
        return "", {}

    def _check_host(self, scope: Scope, headers: _Headers) -> None:
        if len(headers) < len(scope["headers"]):  # a header is repeated
            hosts = sum(name == b"host" for name, _ in scope["headers"])
            if hosts > 1:
                msg = f"Host: must be named once, got {hosts} of them"
                raise ZerolabError(msg)
        name = _PORT.sub("", _text(headers, b"host").lower())
        if TASK not in scope and name not in self._hosts:
            msg = (
                f"this server does not answer to the name {name[:100]!r}; "
                "start it with --host-name NAME if it should"
            )
            raise ForbiddenError(msg)

    @staticmethod
    def _check_origin(scheme: str, headers: _Headers) -> None:
        expected = f"{scheme}://{_text(headers, b'host')}"
        origin = _text(headers, b"origin")
        if headers.get(b"sec-fetch-site") == b"same-origin":
            # The browser has compared the schemes, which a proxy may hide from the server.
            expected = f"{origin.partition('://')[0]}://{_text(headers, b'host')}"
        if _without_default_port(origin) != _without_default_port(expected):
            msg = (
                f"Origin: must be {expected[:200]}, the address of the page, got {origin[:200]!r}; "
                "a proxy in front of the server must pass Host on and set X-Forwarded-Proto; "
                "start the server with --behind-https if it cannot"
            )
            raise ForbiddenError(msg)


async def _refuse(error: ZerolabError, scope: Scope, receive: Receive, send: Send) -> None:
    """Respond with an error, or with the way to sign in to a task."""
    response: Response = error_response(error, scope["path"])
    closed = isinstance(error, UnauthorizedError) and scope["path"].startswith(PROXY)
    if closed and is_navigation(scope):
        response = sign_in_response(scope)
    await response(scope, receive, send)


def _text(headers: _Headers, name: bytes, default: str = "") -> str:
    value = headers.get(name)
    return default if value is None else value.decode("latin-1")


def _without_default_port(origin: str) -> str:
    scheme, _, host = origin.lower().partition("://")
    return f"{scheme}://{host.removesuffix(_DEFAULT_PORTS.get(scheme, ''))}"


def _bearer(headers: _Headers) -> str | None:
    kind, _, token = _text(headers, b"authorization").partition(" ")
    return token.strip() if kind.lower() == "bearer" else None


def _password(headers: _Headers) -> str | None:
    """Return the password of basic authentication; None if a page may have sent it.

    Browsers repeat the credentials of an address by themselves, and then name an origin.
    """
    kind, _, credentials = _text(headers, b"authorization").partition(" ")
    if kind.lower() != "basic" or b"origin" in headers:
        return None
    try:
        text = base64.b64decode(credentials.strip(), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None
    return text.partition(":")[2].strip()


def _cookie(headers: _Headers, name: str) -> str | None:
    try:
        cookies = SimpleCookie(_text(headers, b"cookie"))
    except CookieError:
        return None
    return cookies[name].value if name in cookies else None


def _with_headers(send: Send, path: str) -> Send:
    # Files of the page are named by their content, so browsers may cache them forever. Files of
    # the documentation keep their names: browsers ask whether they have changed.
    cache = _NO_STORE
    if path.startswith(_ASSETS):
        cache = _IMMUTABLE
    elif path.startswith(_DOCS):
        cache = _REVALIDATE

    async def wrapped(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = message.get("headers", ())
            present = dict(headers)
            ours = _RAW_HEADERS
            if not present.keys().isdisjoint(_NAMES):
                ours = tuple(header for header in ours if header[0] not in present)
            message["headers"] = headers = [*headers, *ours]
            if _CACHE not in present:
                headers.append(cache if message["status"] < 400 else _NO_STORE)
        await send(message)

    return wrapped


def _limited(receive: Receive, limit: int) -> Receive:
    """Wrap ``receive`` to raise TooLargeError when a body exceeds the limit."""
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
