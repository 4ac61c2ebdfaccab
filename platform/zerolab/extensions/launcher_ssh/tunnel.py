"""SSH tunnel from the machines of a hostfile to a server that only this machine reaches."""

from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit

from zerolab.client.transport import is_loopback

__all__ = ["Tunnel", "tunnel_to"]

_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class Tunnel:
    """Port of another machine's loopback that ssh forwards to the server."""

    server: str
    """Address of the server on this machine."""

    @property
    def forward(self) -> str:
        """Return the value of ``ssh -R``; the other machine chooses the port."""
        parts = urlsplit(self.server)
        host = parts.hostname or ""
        port = parts.port or _PORTS[parts.scheme]
        return f"{self._listens}:0:{_bracketed(host)}:{port}"

    def address(self, port: int) -> str:
        """Return the server's address at a port of the other machine.

        A name in a certificate is kept because the certificate is checked against it.
        """
        parts = urlsplit(self.server)
        host = _bracketed(parts.hostname or "") if parts.scheme == "https" else self._listens
        return urlunsplit(parts._replace(netloc=f"{host}:{port}"))

    @property
    def _listens(self) -> str:
        host = urlsplit(self.server).hostname or ""
        return "127.0.0.1" if host.startswith("localhost") else _bracketed(host)


def tunnel_to(server: str) -> Tunnel | None:
    """Return a tunnel to a server on a loopback address; None if other machines reach the server.

    Args:
        server: Address of the server.
    """
    parts = urlsplit(server)
    hidden = parts.scheme in _PORTS and is_loopback(parts.hostname or "")
    return Tunnel(server) if hidden else None


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
