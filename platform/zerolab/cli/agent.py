"""Command group ``zerolab agent``: machines that offer slots."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zerolab.cli.connection import complete_from
from zerolab.cli.groups import command_group
from zerolab.cli.local.commands import agent_token

if TYPE_CHECKING:
    from zerolab.paths import Home

__all__ = ["group"]

group = command_group("Manage agents: the machines that run trials.", panel="Queue and machines")


@group.command()
def start(
    server: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Address of the server. Default: ZEROLAB_MASTER, or the server of this machine.",
        ),
    ] = None,
    token_file: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="File (mode 0600) with the output of `zerolab agent token`; - reads standard "
            "input. Default: ZEROLAB_TOKEN, or the token of this machine.",
        ),
    ] = "",
    token: Annotated[
        str | None, typer.Option(hidden=True, help="Not accepted; use --token-file.")
    ] = None,
    pool: Annotated[str, typer.Option(metavar="NAME", help="Resource pool to join.")] = "default",
    slots: Annotated[
        int | None, typer.Option(help="Number of slots. Default: all GPUs, or else all CPU cores.")
    ] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Use CPU slots even if there are GPUs.")] = (
        False
    ),
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Name of the agent. Default: the host name."),
    ] = None,
    launcher: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="How to start ranks: local (this machine, and hostfiles over ssh), ssh (hostfiles "
            "only), or slurm (as jobs).",
            autocompletion=complete_from("local", "ssh", "slurm"),
        ),
    ] = "local",
    resource_manager: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="YAML file with a block `resource_manager`: settings for Slurm."
        ),
    ] = None,
) -> None:
    """Start an agent on this machine, in the foreground.

    Ctrl-C stops it. `zerolab up` starts an agent for a server on the same machine.

    Example: zerolab agent start --server http://10.0.0.1:8080 --token-file agent.token
    """
    from zerolab.agent.token import agent_token, hide_environment_token

    environment_token = hide_environment_token()  # first, because it replaces this process

    import logging
    import os

    from zerolab.agent.agent import Agent
    from zerolab.cli.connection import find_server_url
    from zerolab.client.http import Client
    from zerolab.contract.spec import ENV_MASTER
    from zerolab.errors import ForbiddenError
    from zerolab.launcher.devices import find_slots
    from zerolab.launcher.registry import LAUNCHERS, launcher_of_file
    from zerolab.parent import forbid_inspection
    from zerolab.paths import Home

    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.INFO, format=form)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    problems = [] if resource_manager is None else _duplicate_options(slots, launcher, cpu=cpu)
    if token is not None:
        unplanned_users = "not accepted, since other users can read the arguments of a process"
        problems.append(f"--token: {unplanned_users}; use --token-file FILE or set ZEROLAB_TOKEN")
    _check(pool, name, launcher, problems)
    forbid_inspection()
    if server:
        os.environ[ENV_MASTER] = server
    home = Home.default().create()
    secret, renewed = agent_token(token_file, environment_token, home)
    agent_home = _agent_home(home, name)
    over_ssh = None
    if resource_manager is not None:
        starts = launcher_of_file(agent_home, resource_manager)
    else:
        starts = LAUNCHERS[launcher](agent_home, find_slots(slots, cpu=cpu))
        if launcher == "local" and "ssh" in LAUNCHERS:
            over_ssh = LAUNCHERS["ssh"](agent_home, starts.offers())
    with Client(find_server_url(home), secret, newer_token=renewed) as client:
        new_agent = Agent(agent_home, client, starts, over_ssh, name=name or "", pool=pool)
        try:
            new_agent.run()
        except ForbiddenError as error:
            msg = f"{error}; run `zerolab agent token` on the server, and use --token-file here"
            raise ForbiddenError(msg) from error


def _check(pool: str, name: str | None, launcher: str, problems: list[str]) -> None:
    """Check the names given to an agent, and raise them with the problems so far.

    Raises:
        ConfigError: With all problems.
    """
    from zerolab.contract.names import check_pool
    from zerolab.errors import ConfigError
    from zerolab.launcher.registry import LAUNCHERS

    for option, word in (("pool", pool), ("name", name)):
        try:
            check_pool("a" if word is None else word)
        except ValueError as error:
            problems.append(f"--{option}: {error}")
    problem = LAUNCHERS.problem(launcher)
    if problem is not None:
        problems.append(f"--launcher: {problem}")
    elif launcher not in LAUNCHERS:
        problems.append(f"--launcher: must be one of {', '.join(LAUNCHERS)}, got {launcher!r}")
    if problems:
        raise ConfigError("agent", problems)


def _duplicate_options(slots: int | None, launcher: str, *, cpu: bool) -> list[str]:
    """Return options that conflict with the file of ``--resource-manager``."""
    from zerolab.launcher.registry import managed_launchers

    conflicting = {
        "slots": slots is not None,
        "cpu": cpu,
        "launcher": launcher not in {"local", *managed_launchers()},
    }
    reason = "cannot be combined with --resource-manager, whose file defines the slots"
    return [
        f"--{option}: {reason}: leave it out" for option, is_set in conflicting.items() if is_set
    ]


def _agent_home(home: "Home", name: str | None) -> "Home":
    """Return the agent's directory; one with a name has its own."""
    from zerolab.paths import Home

    return home if name is None else Home(home.path / "agents" / name).create()


group.command(name="token")(agent_token)
