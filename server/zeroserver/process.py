"""Server process of a data directory: command line, socket, startup and shutdown."""

import argparse
import ipaddress
import json
import logging
import os
import re
import signal
import socket
import ssl
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import msgspec
from fastapi import FastAPI
from msgspec.structs import replace
from uvicorn.config import Config
from uvicorn.server import Server

from zerolab.contract.limits import read_port
from zerolab.contract.spec import ENV_DATABASE
from zerolab.errors import ConfigError, ConflictError, ZerolabError
from zerolab.files import lock_file, write_json
from zerolab.parent import forbid_inspection
from zerolab.paths import Home
from zerolab.registry import PARTS
from zeroserver.access.connection_timeouts import (
    ConnectionLimits,
    limited_protocol,
    raise_file_limit,
)
from zeroserver.app import create_app, prepare
from zeroserver.services import Services, freeze_startup_objects
from zeroserver.settings import Limits, Settings, Timings
from zeroserver.store.engine_factory import check_url, has_password, take_database

__all__ = ["main", "serving"]

logger = logging.getLogger("zeroserver")


class _Server(Server):
    """uvicorn server that publishes its address and ends long polls on shutdown."""

    def __init__(self, config: Config, services: Services, home: Home) -> None:
        super().__init__(config)
        self._services = services
        self._home = home
        self.lock_lost = ""
        """Message about the server that took over the database; empty while this one owns it."""
        services.database.lock.on_lost = self._stop_after_lock_loss

    def _stop_after_lock_loss(self, reason: str) -> None:
        """Stop after another server has taken over the database; called on the writer thread."""
        self.lock_lost = reason
        logger.error("%s", reason)
        os.kill(os.getpid(), signal.SIGTERM)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen and publish the address."""
        await super().startup(sockets=sockets)
        if self.started:
            freeze_startup_objects()
            write_json(self._home.server_file, {"url": self._services.url, "pid": os.getpid()})
            sys.stdout.write(f"{self._services.url}\n")
            sys.stdout.flush()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start the shutdown and end long polls and event streams."""
        loop = self._services.loop
        if loop is not None:
            loop.call_soon_threadsafe(self._services.hub.close)
        # The base class's method is not called, since it raises the signal again after a clean
        # exit.
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True


def main(arguments: list[str] | None = None) -> int:
    """Run a server until SIGTERM or SIGINT; return the exit code."""
    options = _parse(arguments)
    forbid_inspection()  # the memory contains the token and the keys
    os.umask(0o077)  # only the user may read files of the server
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    if has_password(options.database):
        logger.warning(
            "--database holds a password, which everybody on this machine can read; put it into "
            "%s or ~/.pgpass",
            ENV_DATABASE,
        )
    options.database = take_database(options.database)
    try:
        return _serve(options)
    except ZerolabError as error:
        sys.stderr.write(f"{error}\n")
        return 2


class Connections(msgspec.Struct, frozen=True):
    """TLS and proxy options of the server."""

    tls_cert: Path | None = None
    tls_key: Path | None = None
    trusted_proxies: tuple[str, ...] = ()
    """Addresses whose ``X-Forwarded-*`` headers are used, in addition to loopback."""


def serving(
    app: FastAPI,
    limits: ConnectionLimits,
    connections: Connections = Connections(),  # noqa: B008 - frozen
) -> Config:
    """Return the uvicorn configuration of the application."""
    return Config(
        app,
        ssl_certfile=connections.tls_cert,
        ssl_keyfile=connections.tls_key,
        forwarded_allow_ips=["127.0.0.1", "::1", *connections.trusted_proxies],
        loop="uvloop",
        http=limited_protocol(limits),
        ws="none",
        access_log=False,
        log_config=None,
        timeout_graceful_shutdown=10,
        timeout_keep_alive=75,
        server_header=False,
    )


def _serve(options: argparse.Namespace) -> int:
    home = Home(Path(options.home).absolute() if options.home else Home.default().path).create()
    connections = _connections(options)
    tls = connections.tls_cert is not None
    _check_host(options.host, allow_remote=options.allow_remote or tls)
    check_url(options.database)
    oidc = PARTS["oidc"].read_oidc_settings(Path(options.oidc)) if options.oidc else None
    if options.check_options:
        return 0
    try:
        lock = lock_file(home.path / "server.lock")
    except BlockingIOError:
        msg = f"another server already works on {home.path}; stop it with `zerolab down`"
        raise ConflictError(msg) from None
    except OSError as error:
        raise home.unwritable_error(error) from error
    with lock, _listen(options.host, options.port) as listening:
        host, port = listening.getsockname()[:2]
        settings = Settings(
            home=home.path,
            host=options.host,
            port=port,
            database_url=options.database,
            synchronous=options.synchronous,
            allow_remote=options.allow_remote or tls,
            host_names=tuple(options.host_name),
            task_domain=options.task_domain or "",
            behind_https=options.behind_https,
            custom_searchers=not options.no_custom_searchers,
            private_webhooks=options.allow_private_webhooks,
            oidc=oidc,
            limits=Limits(
                metric_names=options.metric_names,
                log_bytes=options.log_megabytes << 20,
                audit_days=options.audit_days,
                searcher_memory_bytes=options.searcher_memory_megabytes << 20,
                searcher_cpu_s=options.searcher_cpu_seconds,
            ),
            timings=replace(Timings(), grow_first_s=options.grow_after).with_agent_timeout(
                options.agent_timeout
            ),
        )
        try:
            app = create_app(settings)
            services: Services = app.state.services
            prepare(services)
        except OSError as error:
            raise home.unwritable_error(error) from error
        services.url = _url(host, port, options.host_name if tls else (), tls=tls)
        limits = ConnectionLimits(max_per_peer=max(64, raise_file_limit() // 2))
        server = _Server(serving(app, limits, connections), services, home)
        try:
            server.run(sockets=[listening])
        except OSError as error:  # its address could not be written
            raise home.unwritable_error(error) from error
        finally:
            _forget(home)
    if server.lock_lost:
        raise ConflictError(server.lock_lost)
    return 0 if server.started else 1


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the options; an unknown one ends the process with exit code 2 and a similar name."""
    parser = _parser()
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        from difflib import get_close_matches

        known = list(parser._option_string_actions)  # noqa: SLF001 - argparse has no public list
        close = get_close_matches(unknown[0].partition("=")[0], known, 1)
        hint = f"did you mean {close[0]}?" if close else "--help lists the options"
        kind = "option" if unknown[0].startswith("-") else "argument"
        parser.error(f"unknown {kind} {unknown[0]}; {hint}")
    return options


def _parser() -> argparse.ArgumentParser:
    timings, limits = Timings(), Limits()
    parser = argparse.ArgumentParser(
        prog="python -m zeroserver",
        description="One server process for one data directory.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--check-options", action="store_true", help="check the options and exit; start nothing"
    )
    parser.add_argument("--home", help="data directory (default: ZEROLAB_HOME or ~/.zerolab)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument(
        "--port",
        type=_port,
        default=None,
        help="port to listen on; 0: any free one (default: 8080, or a free one if it is taken)",
    )
    parser.add_argument(
        "--database",
        default="",
        help=f"postgresql://USER@HOST/NAME (default: {ENV_DATABASE}, else SQLite); put a password "
        f"into {ENV_DATABASE} or ~/.pgpass, since everybody on this machine sees this option",
    )
    parser.add_argument(
        "--synchronous",
        choices=("full", "normal"),
        default="full",
        help="SQLite: full survives a power failure (default); normal survives a crash of the "
        "server only",
    )
    parser.add_argument(
        "--allow-remote",
        action="store_true",
        help="listen beyond this machine without TLS: only behind a proxy that adds it, or in a "
        "network that you trust",
    )
    parser.add_argument(
        "--host-name",
        action="append",
        default=[],
        metavar="NAME",
        help="another host name of this server; may be repeated",
    )
    parser.add_argument(
        "--task-domain",
        type=_domain,
        metavar="NAME",
        help="domain of interactive tasks: browsers open each one at task-ID.NAME, so that its "
        "page cannot act for its user; all these names must resolve to this server (default: "
        "localhost, for browsers on this machine or behind `ssh -L`)",
    )
    parser.add_argument(
        "--tls-cert",
        metavar="FILE",
        help="serve HTTPS with this certificate (PEM, with its chain); needs --tls-key",
    )
    parser.add_argument("--tls-key", metavar="FILE", help="private key of the certificate (PEM)")
    parser.add_argument(
        "--trusted-proxy",
        action="append",
        default=[],
        type=_address,
        metavar="ADDRESS",
        help="IP address of a trusted reverse proxy, for its X-Forwarded-Proto header, in "
        "addition to this "
        "machine; may be repeated",
    )
    parser.add_argument(
        "--behind-https",
        action="store_true",
        help="browsers use HTTPS, through a proxy that cannot set X-Forwarded-Proto",
    )
    parser.add_argument(
        "--oidc",
        metavar="FILE",
        help="sign in with an OpenID Connect provider: YAML with issuer, client_id and "
        "client_secret; needs the extra oidc",
    )
    parser.add_argument(
        "--agent-timeout",
        type=_seconds,
        default=timings.agent_dead_s,
        metavar="SECONDS",
        help="an agent without a heartbeat for this time is lost; its trials restart on other "
        "agents "
        f"(default: {timings.agent_dead_s:g})",
    )
    parser.add_argument(
        "--grow-after",
        type=_seconds,
        default=timings.grow_first_s,
        metavar="SECONDS",
        help="minimum run time of an elastic trial on fewer slots before it restarts on more; "
        f"grows each time (default: {timings.grow_first_s:g})",
    )
    parser.add_argument(
        "--metric-names",
        type=_count,
        default=limits.metric_names,
        metavar="N",
        help="different metric names that a trial may report; metrics with further ones are "
        f"discarded (default: {limits.metric_names})",
    )
    parser.add_argument(
        "--log-megabytes",
        type=_count,
        default=limits.log_bytes >> 20,
        metavar="N",
        help="size of the log of a run in the database; beyond it the oldest lines are dropped "
        f"(default: {limits.log_bytes >> 20})",
    )
    parser.add_argument(
        "--audit-days",
        type=_count,
        metavar="N",
        help="days after which an entry of the audit log is deleted (default: keep all entries)",
    )
    parser.add_argument(
        "--allow-private-webhooks",
        action="store_true",
        help="send notifications also to addresses of private networks and of this machine",
    )
    parser.add_argument(
        "--no-custom-searchers",
        action="store_true",
        help="refuse experiments whose searcher.entrypoint names a class, which this machine would "
        "run",
    )
    parser.add_argument(
        "--searcher-memory-megabytes",
        type=_count,
        default=limits.searcher_memory_bytes >> 20,
        metavar="N",
        help="memory of the process of such a class "
        f"(default: {limits.searcher_memory_bytes >> 20})",
    )
    parser.add_argument(
        "--searcher-cpu-seconds",
        type=_count,
        default=limits.searcher_cpu_s,
        metavar="N",
        help="processor time of such a process; it has one core at most "
        f"(default: {limits.searcher_cpu_s})",
    )
    return parser


def _connections(options: argparse.Namespace) -> Connections:
    """Read the options of TLS and proxies.

    Raises:
        ConfigError: If certificate and key cannot be used together.
    """
    files = {"--tls-cert": options.tls_cert, "--tls-key": options.tls_key}
    if not any(files.values()):
        return Connections(trusted_proxies=tuple(options.trusted_proxy))
    problems = [f"{name}: missing; give both files" for name, file in files.items() if not file]
    for name, file in files.items():
        if file and not Path(file).is_file():
            problems.append(f"{name}: must be a file, got {file}")
    if not problems:
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            # An empty password prevents OpenSSL from prompting for one.
            context.load_cert_chain(options.tls_cert, options.tls_key, password="")
        except (OSError, ValueError) as error:
            problem = f"must be a certificate and its key without a passphrase, both PEM ({error})"
            problems.append(f"--tls-cert, --tls-key: {problem}")
    if problems:
        raise ConfigError("server", problems)
    cert, key = Path(options.tls_cert), Path(options.tls_key)
    return Connections(cert, key, tuple(options.trusted_proxy))


def _url(host: str, port: int, names: Sequence[str], *, tls: bool) -> str:
    """Return the URL at which programs on this machine reach the server.

    Args:
        host: Address on which it listens.
        port: Port on which it listens.
        names: Possible host names of its certificate.
        tls: Whether it uses HTTPS.
    """
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared
    host = names[0] if names else f"[{host}]" if ":" in host else host
    return f"{'https' if tls else 'http'}://{host}:{port}"


def _address(text: str) -> str:
    """Parse an IP address.

    Raises:
        argparse.ArgumentTypeError: If it is invalid.
    """
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        msg = f"must be an IP address, got {text!r}"
        raise argparse.ArgumentTypeError(msg) from None


def _domain(text: str) -> str:
    """Parse a domain name.

    Raises:
        argparse.ArgumentTypeError: If it is invalid.
    """
    if re.fullmatch(r"[a-z0-9]([a-z0-9.-]{0,200}[a-z0-9])?", text.lower()) is None:
        msg = f"must be a domain name such as tasks.example.com, got {text!r}"
        raise argparse.ArgumentTypeError(msg)
    return text.lower()


def _count(text: str) -> int:
    """Parse a positive integer.

    Raises:
        argparse.ArgumentTypeError: If it is invalid.
    """
    number = int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0
    if not number:
        msg = f"must be a whole number from 1 to 999999999, got {text!r}"
        raise argparse.ArgumentTypeError(msg)
    return number


def _seconds(text: str) -> float:
    """Parse a duration in seconds.

    Raises:
        argparse.ArgumentTypeError: If it is invalid.
    """
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds <= 1_000_000:
        msg = f"must be a number of seconds, at least 1, got {text!r}"
        raise argparse.ArgumentTypeError(msg)
    return seconds


def _port(text: str) -> int:
    """Parse a port.

    Raises:
        argparse.ArgumentTypeError: If it is invalid.
    """
    try:
        return read_port(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _check_host(host: str, *, allow_remote: bool) -> None:
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        raise ConfigError("server", [f"--host: must be an IP address, got {host!r}"]) from None
    if not loopback and not allow_remote:
        problem = (
            f"--host: must be a loopback address, got {host!r}; whoever reaches this port with "
            "the token can run code here: use --tls-cert and --tls-key, or add --allow-remote if "
            "a proxy adds TLS or you trust the network"
        )
        raise ConfigError("server", [problem])


def _listen(host: str, port: int | None) -> socket.socket:
    """Open the listening socket; without a port, 8080 or any free one.

    Raises:
        ConfigError: If the port is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for candidate in (8080, 0) if port is None else (port,):
        listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, candidate))
        except OSError as error:
            listening.close()
            if port is not None:
                raise ConfigError("server", [f"--port {port}: cannot listen: {error}"]) from error
            continue
        listening.set_inheritable(True)
        return listening
    raise ConfigError("server", [f"--host {host}: no port can be listened on"])


def _forget(home: Home) -> None:
    """Remove server.json if this process wrote it."""
    try:
        is_own = json.loads(home.server_file.read_bytes()).get("pid") == os.getpid()
    except (OSError, ValueError):
        return
    if is_own:
        home.server_file.unlink(missing_ok=True)
