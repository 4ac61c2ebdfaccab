"""HTTP transport of the client: token, timeouts, pages, parsing of responses, and backoff."""

import ipaddress
import os
import random
import ssl
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NamedTuple, Self

import msgspec

from zerolab.client.httpx_import import httpx
from zerolab.contract.messages import JSON
from zerolab.errors import (
    CertificateError,
    ConfigError,
    ConflictError,
    ForbiddenError,
    NotFoundError,
    StaleRunError,
    UnreachableError,
    ZerolabError,
)

__all__ = [
    "PREFIX",
    "Backoff",
    "Event",
    "Json",
    "Transport",
    "certificates",
    "drop_none",
    "error_of",
    "is_loopback",
    "parse_events",
    "resource",
]

Json = dict[str, Any]
PREFIX = "/api/v1"
_CONNECT_TIMEOUT_S = 10.0
_PAGE = 1000
"""Rows of a request: the server's maximum."""
_JITTER = random.SystemRandom()
"""Separate from the generator of a user's training, whose numbers must not change."""


class _Bearer(httpx.Auth):
    """HTTP authentication with a token, which is read again once if the server rejects it."""

    def __init__(self, token: str, newer: Callable[[], str] | None) -> None:
        self.token = token
        self._newer = newer

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """Send the request, and again if there is a newer token."""
        sent = self.token
        if sent:
            request.headers["Authorization"] = f"Bearer {sent}"
        response = yield request
        if response.status_code != 401 or self._newer is None:
            return
        self.token = self._newer() or sent
        if self.token != sent:
            request.headers["Authorization"] = f"Bearer {self.token}"
            yield request


class Transport:
    """A connection to one server; may be shared by threads.

    Every method raises :class:`UnreachableError` if the server does not respond,
    :class:`ForbiddenError` if the token is not accepted, and otherwise the error of
    :mod:`zerolab.errors` that the response names.

    Args:
        url: Address of the server, e.g. ``http://127.0.0.1:8080``. By default address and token
            come from ``ZEROLAB_MASTER`` and ``ZEROLAB_TOKEN``, from the run that the process is
            part of, or from the server of the data directory.
        token: Sent with every request.
        timeout_s: Maximum wait for a response, in seconds; long polls add their own wait.
        newer_token: Returns the current token if the server rejects the known one, which may have
            been renewed.

    Raises:
        ConfigError: If the address is invalid, or no server is found.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str = "",
        *,
        timeout_s: float = 60.0,
        newer_token: Callable[[], str] | None = None,
    ) -> None:
        if url is None:
            from zerolab.client.locate import find_server

            url, default_token = find_server()
            token = token or default_token
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        parsed = httpx.URL(self.url)
        if parsed.scheme not in {"http", "https"} or not parsed.host:
            problem = f"must look like http://127.0.0.1:8080, got {url!r}"
            raise ConfigError("address of the server", [problem])
        self._bearer = _Bearer(token, newer_token)
        self._http = httpx.Client(
            base_url=self.url,
            auth=self._bearer,
            timeout=httpx.Timeout(timeout_s, connect=_CONNECT_TIMEOUT_S),
            verify=certificates(parsed.scheme),
            # SSL_CERT_FILE applies to a loopback address too; a proxy does not.
            trust_env=not is_loopback(parsed.host),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def use_token(self, token: str) -> None:
        """Send another token in later requests.

        Args:
            token: The new token.

        Example:
            >>> client = zerolab.Client()
            >>> client.use_token(client.agent_token())
        """
        self._bearer.token = token

    def close(self) -> None:
        """Close the connections to the server.

        Example:
            >>> client = zerolab.Client()
            >>> client.close()
        """
        self._http.close()

    # -- any route ---------------------------------------------------------------------------

    def get(self, path: str, **params: Any) -> Json:
        """GET JSON from any path of the REST API.

        Args:
            path: Path after ``/api/v1``, e.g. ``/trials/3/engine``.
            params: Query parameters; those with None are left out.

        Returns:
            The JSON object of the response.

        Raises:
            NotFoundError: If the path or its resource does not exist.

        Example:
            >>> client = zerolab.Client()
            >>> client.get("/experiments/1/files")["files"][0]["path"]
            'train.py'
        """
        response: Json = self._get(path, params).json()
        return response

    def post(
        self, path: str, body: Mapping[str, Any] | None = None, *, repeatable: bool = False
    ) -> Json:
        """POST JSON to any path of the REST API.

        Args:
            path: Path after ``/api/v1``, e.g. ``/experiments/3/pause``.
            body: JSON object; empty if None.
            repeatable: The request is idempotent: retry it after a lost connection.

        Returns:
            The JSON object of the response; empty if it has no content.

        Raises:
            NotFoundError: If the path or its resource does not exist.
            ConflictError: If the state of the resource does not allow it.

        Example:
            >>> client = zerolab.Client()
            >>> client.post("/experiments/1/archive")["experiment"]["archived"]
            True
        """
        response = self._send("POST", path, json=body or {}, repeatable=repeatable)
        answer: Json = response.json() if response.content else {}
        return answer

    def _get(self, path: str, params: Mapping[str, Any], *, extra_s: float = 0.0) -> httpx.Response:
        return self._send("GET", path, params=params, extra_s=extra_s, repeatable=True)

    def _send_typed(self, path: str, body: msgspec.Struct, **options: Any) -> httpx.Response:
        """POST a body in an idempotent request; ``options`` are those of :meth:`_send`."""
        content, headers = msgspec.json.encode(body), {"Content-Type": JSON}
        return self._send(
            "POST", path, content=content, headers=headers, repeatable=True, **options
        )

    def _unpaged_list(self, path: str, key: str, **params: Any) -> list[Json]:
        """Read a list without pages."""
        items: list[Json] = self.get(path, **params)[key]
        return items

    def _list(self, path: str, key: str, params: Mapping[str, Any] | None = None) -> list[Json]:
        """Read all pages of a list, or one page if the caller sets ``limit``."""
        params = drop_none(params or {})
        one_page = "limit" in params
        params.setdefault("limit", _PAGE)
        items: list[Json] = []
        while True:
            page = self.get(path, **params)
            items += page[key]
            params["after"] = page.get("next_after")
            if params["after"] is None or one_page:
                return items

    def _download(self, path: str, params: Mapping[str, Any]) -> Iterator[bytes]:
        with self._stream(path, params=drop_none(params)) as response:
            yield from response.iter_bytes()

    @contextmanager
    def _stream(
        self, path: str, *, endless: bool = False, **request: Any
    ) -> Iterator[httpx.Response]:
        """Stream a response; an endless one may be silent for any time."""
        if endless:
            request["timeout"] = httpx.Timeout(_CONNECT_TIMEOUT_S, read=None)
        try:
            with self._http.stream("GET", path, **request) as response:
                if response.is_error:
                    response.read()
                    raise error_of(response, self.url)
                yield response
        except httpx.TransportError as error:
            raise self._unreachable(error) from error

    def _send(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        extra_s: float = 0.0,
        repeatable: bool = False,
        **content: Any,
    ) -> httpx.Response:
        timeout = httpx.Timeout(self._timeout_s + extra_s, connect=_CONNECT_TIMEOUT_S)
        last_attempt = 1 if repeatable else 0
        for attempt in range(last_attempt + 1):
            try:
                response = self._http.request(
                    method, PREFIX + path, params=drop_none(params), timeout=timeout, **content
                )
                break
            except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError) as error:
                # A kept-alive connection that the server has closed.
                if attempt == last_attempt:
                    raise self._unreachable(error) from error
            except httpx.TransportError as error:
                raise self._unreachable(error) from error
            except ValueError:  # not a JSON number, or not valid UTF-8
                from zerolab.schema.json_values import (
                    json_value_problems,
                )  # slow import, rarely needed

                problems = json_value_problems(content.get("json") or {})
                if not problems:
                    raise
                raise ConfigError("request", problems) from None
        if response.is_error:
            raise error_of(response, self.url)
        return response

    def _unreachable(self, error: httpx.TransportError) -> UnreachableError:
        reason = str(error) or type(error).__name__
        if "CERTIFICATE_VERIFY_FAILED" in reason:
            return CertificateError(f"{self.url}: {_certificate_problem(reason)}")
        return UnreachableError(
            f"no Zerolab server responds at {self.url} ({reason}); start one with `zerolab up`, "
            "or set ZEROLAB_MASTER to the address of one that runs"
        )


def certificates(scheme: str) -> ssl.SSLContext:
    """Read the trusted certificates, which takes 20 ms and is only needed for TLS.

    Raises:
        ConfigError: If the file of ``SSL_CERT_FILE`` cannot be read.
    """
    if scheme == "http":
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context: ssl.SSLContext = httpx.create_ssl_context()
    except OSError as error:  # ssl.SSLError for a file without certificates
        value = os.environ.get("SSL_CERT_FILE")
        problem = f"SSL_CERT_FILE: must be a file with certificates, got {value!r} ({error})"
        raise ConfigError("environment", [problem]) from error
    return context


def _certificate_problem(reason: str) -> str:
    """Explain why OpenSSL rejects a server's certificate, with the remedy."""
    if "mismatch" in reason:
        problem, remedy = (
            "is for another name",
            "use a name of the certificate in ZEROLAB_MASTER, and in --host-name of the server",
        )
    elif "expired" in reason or "not yet valid" in reason:
        problem, remedy = "is not valid today", "renew it, or correct the clock of this machine"
    else:
        problem, remedy = (
            "is not trusted here",
            "set SSL_CERT_FILE to the certificate of its authority",
        )
    return f"the server's certificate {problem} ({reason}); {remedy}"


def drop_none(params: Mapping[str, Any] | None) -> dict[str, Any]:
    """Drop parameters that are None."""
    return {key: value for key, value in (params or {}).items() if value is not None}


_BUSY_STATUS = {408, 429, 502, 503, 504, 507}


class Event(NamedTuple):
    """One message of a server's event stream."""

    id: str
    """Cursor: pass it as ``after`` to continue after this event."""
    name: str
    data: Json


def resource(response: Json, key: str) -> Json:
    """Unwrap ``{"experiment": {...}}``, with its ``warnings``."""
    inner = response.get(key)
    if not isinstance(inner, dict):
        return response
    return inner | {"warnings": response["warnings"]} if response.get("warnings") else inner


def parse_events(lines: Iterator[str]) -> Iterator[Event]:
    """Read the event-stream format: fields until an empty line, comments skipped."""
    fields: dict[str, str] = {}
    for line in lines:
        if not line:
            if "data" in fields:
                data = msgspec.json.decode(fields["data"])
                yield Event(fields.get("id", ""), fields.get("event", "message"), data)
            fields = {}
            continue
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data" and "data" in fields:
            value = f"{fields['data']}\n{value}"
        if name:
            fields[name] = value


def error_of(response: httpx.Response, url: str) -> ZerolabError:
    """Convert a response with status 400 or above to an exception."""
    status = response.status_code
    try:
        body = response.json()["error"]
        kind, message = str(body.get("type", "")), str(body["message"])
        problems = [str(problem) for problem in body.get("problems") or ()]
    except (ValueError, KeyError, TypeError, AttributeError):
        kind, problems = "", []
        text = " ".join(response.text.split())[:500]  # perhaps the page of another server
        message = f"{response.request.method} {response.request.url.path}: {text}"
    error: ZerolabError
    if kind == "stale_run":  # also with status 401, for an expired token
        error = StaleRunError(message)
    elif status in {401, 403}:
        origin = (
            "; the token comes from ZEROLAB_TOKEN, or from the file `token` of the server's data "
            "directory"
        )
        names_token = status == 401 or message.startswith("the token")
        error = ForbiddenError(f"{url}: {message}{origin if names_token else ''}")
    elif status in _BUSY_STATUS or kind == "unreachable":
        error = UnreachableError(f"{url}: the server cannot take this now ({status}): {message}")
    elif kind == "not_found":
        error = NotFoundError(message)
    elif status == 409:
        error = ConflictError(message)
    elif kind and status < 500:
        source, counted, _ = message.partition(f": {len(problems)} problem(s)\n")
        error = ConfigError(source if counted else "request", problems or [message])
    elif kind:
        error = ZerolabError(f"{url}: the server failed ({status}): {message}; see its log")
    else:
        error = UnreachableError(f"{url}: not a Zerolab server ({status}): {message}")
    return error


class Backoff:
    """Exponential backoff with random jitter.

    The jitter keeps clients from reconnecting at the same moment after an outage.

    Args:
        first_s: The first pause, in seconds.
        longest_s: Approximate maximum of a pause, in seconds.
    """

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._next_s = first_s

    def pause_s(self) -> float:
        """Return the next pause, in seconds."""
        now_s = min(self._next_s, self._longest_s)
        self._next_s = min(2 * self._next_s, self._longest_s)
        return now_s * _JITTER.uniform(0.8, 1.2)

    def reset(self) -> None:
        """Start again with the first pause, after a success."""
        self._next_s = self._first_s


def is_loopback(host: str) -> bool:
    """Return whether a name or an address is a loopback address.

    Args:
        host: As in ``urlsplit(...).hostname``: without brackets.
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower().rstrip(".") == "localhost"
