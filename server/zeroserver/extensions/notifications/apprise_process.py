"""Program that sends one message through apprise, in a separate process.

Apprise's many plugins open connections and follow redirects themselves. Here an audit hook checks
the address of each connection, and the plugins see no secrets of the server's environment.
"""

import ipaddress
import json
import logging
import re
import sys
from typing import Any

from zeroserver.extensions.notifications.addresses import address_problem

__all__ = ["main"]

_FORBIDDEN = frozenset(
    {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty"}
    | {"syslog.openlog", "syslog.syslog", "socket.bind"}
)
"""Audit events of plugins that run programs, show messages on this machine or listen."""


class _Guard:
    """Audit hook that permits connections to permitted addresses only."""

    def __init__(self, *, allow_private: bool) -> None:
        self.allow_private = allow_private
        self.problem: str | None = None

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Check an event.

        Raises:
            PermissionError: If it is not permitted.
        """
        if event in _FORBIDDEN:
            self._refuse("url: must send over the network, got a service of the server's machine")
        elif event in {"socket.connect", "socket.sendto"}:
            address = arguments[1]
            if not isinstance(address, tuple):
                self._refuse("url: must send over the network, got a local socket")
            problem = self._problem(str(address[0]))
            if problem is not None:
                self._refuse(f"url: its host {problem}")

    def _problem(self, host: str) -> str | None:
        try:
            ipaddress.ip_address(host.partition("%")[0])
        except ValueError:
            return "must be looked up before the connection"
        return address_problem(host, allow_private=self.allow_private)

    def _refuse(self, problem: str) -> None:
        self.problem = self.problem or problem
        raise PermissionError(problem)


class _StatusLog(logging.Handler):
    """Handler that keeps only the HTTP status of a failure: the rest may contain secrets."""

    def __init__(self) -> None:
        super().__init__()
        self.status: str | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the status of a message of apprise."""
        if match := re.search(r"\berror=(\d{3})\b", record.getMessage()):
            self.status = match.group(1)


def _send(request: dict[str, Any]) -> str | None:
    """Send a message, or only check the URL if there is none; return the problem."""
    import apprise

    log = logging.getLogger("apprise")
    statuses = _StatusLog()
    log.addHandler(statuses)
    log.propagate = False
    apprise.Apprise.instantiate("json://localhost")  # loads all plugins
    guard = _Guard(allow_private=request["allow_private"])
    sys.addaudithook(guard)
    service = apprise.Apprise.instantiate(request["url"], suppress_exceptions=True)
    if service is None:
        invalid = "url: must be a URL of apprise with all its parts, such as mailto:// or slack://"
        return guard.problem or invalid
    if request["title"] is None:
        return None
    sender = apprise.Apprise()
    sender.add(service)
    sent = sender.notify(
        title=request["title"],
        body=request["body"],
        notify_type=request["type"],
        body_format=apprise.NotifyFormat.TEXT,
    )
    if guard.problem is not None:
        return guard.problem
    if sent:
        return None
    return f"HTTP {statuses.status}" if statuses.status else "the service has not accepted it"


def main() -> None:
    """Read a request from standard input, and print the result as JSON."""
    request = json.load(sys.stdin)
    try:
        problem = _send(request)
    except Exception as error:  # noqa: BLE001 - its text may contain the URL
        problem = f"apprise failed ({type(error).__name__})"
    print(json.dumps({"problem": problem}))  # noqa: T201 - read by the server


if __name__ == "__main__":
    main()
