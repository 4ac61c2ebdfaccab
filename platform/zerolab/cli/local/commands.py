"""Commands ``up``, ``down``, ``token`` and ``agent token``."""

from typing import TYPE_CHECKING, Annotated

import typer

from zerolab.cli.connection import connect
from zerolab.cli.groups import command_group
from zerolab.cli.output import AsJson, Port, print_json, print_message, result

if TYPE_CHECKING:
    from zerolab.paths import Home

__all__ = ["agent_token", "down", "token", "up"]


def up(
    context: typer.Context,
    port: Port = None,
    slots: Annotated[
        int | None,
        typer.Option(help="Slots of the agent. Default: all GPUs, or else all CPU cores."),
    ] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Use CPU slots even if there are GPUs.")] = (
        False
    ),
    agent: Annotated[bool, typer.Option(help="Start an agent on this machine.")] = True,
    as_json: AsJson = False,
) -> None:
    """Start the server and an agent in the background.

    Prints the address of the server. If they run already, they are left unchanged. Other options
    are passed to the server; `python -m zeroserver --help` lists them.

    Example: zerolab up --slots 2 --log-megabytes 16
    """
    from zerolab.cli.local.background import start_services
    from zerolab.paths import Home

    url = start_services(
        Home.default(), port=port, slots=slots, cpu=cpu, agent=agent, server_options=context.args,
        print_message=print_message,
    )  # fmt: skip
    if as_json:
        print_json({"url": url})
    else:
        result(url)


def down() -> None:
    """Stop the server and the agent of this machine.

    Runs save a checkpoint first. They resume from it after the next `zerolab up`.
    """
    from zerolab.cli.local.background import stop_services
    from zerolab.paths import Home

    if not stop_services(Home.default(), print_message):
        print_message("no server or agent of this installation is running")


Renew = Annotated[
    bool,
    typer.Option("--renew", help="Create a new token first. The old token becomes invalid."),
]


token = command_group("Print the access token, for curl and other programs.", panel="Server")
token.info.no_args_is_help = False


@token.callback(invoke_without_command=True)
def print_token(context: typer.Context, renew: Renew = False, as_json: AsJson = False) -> None:
    """Print the access token, for curl and other programs.

    Example: curl -H "Authorization: Bearer $(zerolab token)" "$(zerolab status --url)/api/v1/info"
    """
    if context.invoked_subcommand is not None:
        return
    from zerolab.paths import Home

    home = Home.default()
    if not renew:
        secret = home.read_token() or home.create().ensure_token()
    elif _has_server(home):
        with connect(home) as client:
            secret = client.renew_token()
    else:
        secret = home.create().replace_token()
    _print_token(secret, as_json=as_json)


def agent_token(renew: Renew = False, as_json: AsJson = False) -> None:
    """Print the token with which agents of other machines connect.

    It gives access to the routes of agents only.

    Example: zerolab agent token > agent.token
    """
    from zerolab.paths import Home

    home = Home.default()
    if _has_server(home):
        with connect(home) as client:
            secret = client.agent_token(renew=renew)
    else:
        home.create()
        secret = home.replace_agent_token() if renew else home.ensure_agent_token()
    _print_token(secret, as_json=as_json)


def _print_token(secret: str, *, as_json: bool) -> None:
    if as_json:
        print_json({"token": secret})
    else:
        result(secret)


def _has_server(home: "Home") -> bool:
    """Return whether a server is named or runs; without one, the files are changed directly."""
    from zerolab.cli.local.background import running_process, server_of
    from zerolab.paths import named_master

    return bool(named_master()) or running_process(server_of(home)) is not None
