"""Server and agent as background processes."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zerolab.contract.spec import ENV_DATABASE, ENV_HOME, ENV_MASTER, ENV_TOKEN
from zerolab.errors import (
    CertificateError,
    ConfigError,
    ForbiddenError,
    UnreachableError,
    ZerolabError,
)
from zerolab.files import append_private, lock_file, read_json
from zerolab.paths import Home

if TYPE_CHECKING:
    import psutil

__all__ = [
    "Service",
    "agent_of",
    "checked_server_options",
    "running_process",
    "server_of",
    "start_services",
    "stop_services",
    "with_absolute_paths",
]

_UP_S = 120.0
"""Timeout of a server's start, in seconds; it takes 1 s, or longer on a busy machine."""
_DOWN_S = 60.0
"""Timeout of a stop in seconds; longer than an agent's grace period for checkpoints."""
_POLL_S = 0.05
_CONNECTED = ("ready", "draining", "disabled")
"""States of agents that respond."""
_FILE_OPTIONS = ("--tls-cert", "--tls-key")
"""Options of the server whose value is a file."""


@dataclass(frozen=True)
class Service:
    """A background process of an installation."""

    name: str
    file: Path
    """File that the process writes while it runs, with its pid."""
    word: str
    """Words in the command line of every such process."""
    log: Path


def server_of(home: Home) -> Service:
    """Describe the server of an installation."""
    return Service("server", home.server_file, "zeroserver", home.logs / "server.log")


def agent_of(home: Home) -> Service:
    """Describe the agent of an installation."""
    return Service("agent", home.agent_file, "zerolab", home.logs / "agent.log")


def running_process(service: Service) -> "psutil.Process | None":
    """Return the process of a service, if it lives and really is that service."""
    from zerolab.linux import our_process

    pid = (read_json(service.file) or {}).get("pid")
    try:
        written = service.file.stat().st_mtime
    except OSError:
        return None
    return our_process(pid, service.word, written) if isinstance(pid, int) else None


def start_services(
    home: Home,
    *,
    port: int | None = None,
    slots: int | None = None,
    cpu: bool = False,
    agent: bool | None = True,
    server_options: Sequence[str] = (),
    print_message: Callable[[str], None],
) -> str:
    """Start the server and the agent unless they run, and wait until they respond.

    Args:
        home: The installation.
        port: Port of the server; None means 8080, or any free one if that is taken.
        slots: Slots of the agent; None for all.
        cpu: Offer CPU slots even if there are GPUs.
        agent: Start an agent, too. None: only if no other agent is connected.
        server_options: Further options of the server.
        print_message: Prints a status message.

    Returns:
        Address of the server.

    Raises:
        ZerolabError: If a process does not start.
    """
    home.create()
    home.ensure_token()
    options, variables = checked_server_options(home, server_options)
    with lock_file(home.up_lock, wait=True):
        was_running = running_process(server_of(home)) is not None
        url = _start_server(home, port, options, variables, print_message)
        if agent is None:  # a server that has just started does not know who is still there
            agent = not (was_running and _has_other_agent(url, home))
        if agent:
            _start_agent(home, url, slots, cpu=cpu, print_message=print_message)
    return url


def stop_services(home: Home, print_message: Callable[[str], None]) -> bool:
    """Stop the agent, so that its runs can checkpoint and report, and then the server.

    Returns:
        Whether a process was stopped.
    """
    home.create()
    stopped = False
    with lock_file(home.up_lock, wait=True):
        for service in (agent_of(home), server_of(home)):
            process = running_process(service)
            if process is not None:
                _stop(service, process, print_message)
                stopped = True
            service.file.unlink(missing_ok=True)
    return stopped


def checked_server_options(
    home: Home, server_options: Sequence[str]
) -> tuple[list[str], dict[str, str]]:
    """Return options of the server with absolute paths, and variables for the database.

    Args:
        home: The installation.
        server_options: Options of ``python -m zeroserver``.

    Raises:
        ConfigError: If the server does not accept them.
    """
    paths = with_absolute_paths(server_options, _FILE_OPTIONS)
    options, variables = _split_database_option(paths)
    if server_options:
        _check_server_options(home, options, variables)
    return options, variables


def _split_database_option(options: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Move the address of the database from the options to the environment.

    The address may contain a password, and all users of this machine can read a command's
    arguments.

    Raises:
        ConfigError: If ``--database`` has no value.
    """
    remaining: list[str] = []
    url = os.environ.get(ENV_DATABASE, "")
    iterator = iter(options)
    for option in iterator:
        name, equals, value = option.partition("=")
        if name == "--database":
            url = value if equals else next(iterator, "")
            if not url or url.startswith("--"):
                raise ConfigError(
                    "server", [f"--database: must have a URL, got {url or 'nothing'}"]
                )
        else:
            remaining.append(option)
    return remaining, {ENV_DATABASE: url} if url else {}


def with_absolute_paths(options: Sequence[str], file_options: Sequence[str]) -> list[str]:
    """Return options with absolute paths, for a process in another directory.

    Args:
        options: Options with their values.
        file_options: Names of the options whose value is a file.
    """
    result: list[str] = []
    for option in options:
        name, equals, value = option.partition("=")
        if name in file_options and value:
            result.append(f"{name}{equals}{Path(value).absolute()}")
        elif result and result[-1] in file_options and not option.startswith("--"):
            result.append(str(Path(option).absolute()))
        else:
            result.append(option)
    return result


def _check_server_options(home: Home, options: list[str], variables: dict[str, str]) -> None:
    """Let the server check its options before anything is started.

    Raises:
        ConfigError: With the server's message about the first invalid option.
    """
    if any(word.partition("=")[0] == "--home" for word in options):
        raise ConfigError("server", [f"--home: must be left out; set {ENV_HOME} instead"])
    command = [sys.executable, "-P", "-m", "zeroserver", "--home", str(home.path), *options]
    done = subprocess.run(
        [*command, "--check-options"], capture_output=True, text=True, check=False, cwd=home.path,
        env={**os.environ, **variables},
    )  # fmt: skip
    if done.returncode:
        message = (done.stderr.strip() or "cannot be started").splitlines()[-1].strip()
        raise ConfigError("server", [message.removeprefix("python -m zeroserver: error: ")])


def _start_server(
    home: Home,
    port: int | None,
    options: Sequence[str],
    variables: dict[str, str],
    print_message: Callable[[str], None],
) -> str:
    service = server_of(home)
    process = running_process(service)
    if process is not None:
        if options or ENV_DATABASE in variables:
            print_message(
                "the server is running with other options; run `zerolab down` first to change them"
            )
        return _wait_for_server(home, process.is_running)
    message = f"starting the server (log: {service.log})"
    ports = [port]
    if not port and (old := _last_port(service)) is not None:
        ports.insert(0, old)  # the agent and runs of a killed server still use its port
    service.file.unlink(missing_ok=True)
    for number in ports:
        print_message(message)
        command = ["zeroserver", "--home", str(home.path)]
        command += [] if number is None else ["--port", str(number)]
        child = _start(service, [*command, *options], home, variables)
        try:
            url = _wait_for_server(home, _is_alive(child))
            print_message(f"server is running at {url}")
            return url
        except UnreachableError:
            if child.poll() is None or number == ports[-1]:
                raise
        message = f"port {number} is in use; trying another one"
    raise AssertionError


def _last_port(service: Service) -> int | None:
    url = str((read_json(service.file) or {}).get("url", ""))
    port = url.rpartition(":")[2]
    return int(port) if port.isdecimal() else None


def _is_alive(child: "subprocess.Popen[bytes]") -> Callable[[], bool]:
    return lambda: child.poll() is None


def _wait_for_server(home: Home, lives: Callable[[], bool]) -> str:
    service = server_of(home)
    deadline = time.monotonic() + _UP_S
    while time.monotonic() < deadline:
        alive = lives()
        url = (read_json(service.file) or {}).get("url")
        if url and _responds(str(url), home):
            return str(url)
        if not alive:
            msg = f"the server exited during its start; last lines of {service.log}:\n"
            raise UnreachableError(msg + _tail(service.log))
        time.sleep(_POLL_S)
    msg = f"the server has not responded within {_UP_S:.0f} s; see {service.log}"
    raise UnreachableError(msg)


def _responds(url: str, home: Home) -> bool:
    from zerolab.client.http import Client

    try:
        with Client(url, home.ensure_token(), timeout_s=10.0) as client:
            client.info()
    except (CertificateError, ForbiddenError):
        raise
    except ZerolabError:
        return False
    return True


def _start_agent(
    home: Home, url: str, slots: int | None, *, cpu: bool, print_message: Callable[[str], None]
) -> None:
    service = agent_of(home)
    process = running_process(service)
    if process is not None:
        master = (read_json(service.file) or {}).get("master")
        if master in (None, url):
            return
        print_message(f"the agent is connected to a server at {master}")
        _stop(service, process, print_message)
    print_message(f"starting an agent (log: {service.log})")
    command = ["zerolab", "agent", "start"]
    command += [] if slots is None else ["--slots", str(slots)]
    command += ["--cpu"] if cpu else []
    child = _start(service, command, home, {ENV_MASTER: url})
    deadline = time.monotonic() + _UP_S
    while time.monotonic() < deadline:
        registration = read_json(service.file) or {}
        if registration.get("pid") == child.pid and "agent_id" in registration:
            print_message(_agent_text(url, home, registration["agent_id"]))
            return
        if child.poll() is not None:
            msg = f"the agent exited during its start; last lines of {service.log}:\n"
            raise UnreachableError(msg + _tail(service.log))
        time.sleep(_POLL_S)
    msg = f"the agent has not registered within {_UP_S:.0f} s; see {service.log}"
    raise UnreachableError(msg)


def _has_other_agent(url: str, home: Home) -> bool:
    """Return whether an agent other than the background one of this home is connected."""
    from zerolab.client.http import Client

    own_id = (read_json(agent_of(home).file) or {}).get("agent_id")
    with Client(url, home.ensure_token()) as client:
        agents = client.agents()
    return any(agent["state"] in _CONNECTED and agent["id"] != own_id for agent in agents)


def _agent_text(url: str, home: Home, agent_id: int) -> str:
    from zerolab.client.http import Client

    with Client(url, home.ensure_token()) as client:
        agent = next((agent for agent in client.agents() if agent["id"] == agent_id), None)
    if agent is None:
        return "agent is connected"
    slots = agent["slots"]
    kinds = " and ".join(dict.fromkeys(str(slot["device"]) for slot in slots)) or "no"
    return f"agent {agent['name']} is connected: {len(slots)} slot(s), {kinds}"


def _start(
    service: Service,
    arguments: Sequence[str],
    home: Home,
    environment: dict[str, str] | None = None,
) -> "subprocess.Popen[bytes]":
    # Use this installation's token, not another server's.
    hidden = {ENV_TOKEN, ENV_DATABASE}
    inherited = {key: value for key, value in os.environ.items() if key not in hidden}
    with append_private(service.log) as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=home.path,
            env={**inherited, ENV_HOME: str(home.path), **(environment or {})},
            start_new_session=True,
        )


def _stop(
    service: Service, process: "psutil.Process", print_message: Callable[[str], None]
) -> None:
    import psutil

    from zerolab.linux import kill_tree, wait_for_end

    print_message(f"stopping the {service.name} (process {process.pid})")
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(signal.SIGTERM)
    if not wait_for_end([process], _DOWN_S):
        print_message(f"the {service.name} has not stopped within {_DOWN_S:.0f} s; killing it")
        kill_tree(process.pid)


def _tail(log: Path) -> str:
    from zerolab.contract.outcome import tail

    return tail(log, 15) or f"(empty; check the free disk space with `df -h {log.parent}`)"
