"""Commands ``up``, ``down``, ``token`` and ``agent token``."""

from typing import Annotated

import typer

from zerolab.cli.connection import connect, named_master
from zerolab.cli.output import Port, print_message, result
from zerolab.paths import Home

__all__ = ["agent_token", "down", "token", "up"]


def up(
    context: typer.Context,
    port: Port = None,
    slots: Annotated[
        int | None, typer.Option(help="Slots that the agent offers. Default: all GPUs, else cores.")
    ] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Offer CPU slots although there are GPUs.")] = (
        False
    ),
    agent: Annotated[bool, typer.Option(help="Start an agent on this machine too.")] = True,
) -> None:
    """Start the server and an agent in the background, unless they run.

    Prints the server's address. Other options are passed to the server: `python -m zeroserver
    --help`.
    Example: zerolab up --slots 2 --log-megabytes 16
    """
    from zerolab.cli.local.background import start_services

    url = start_services(
        Home.default(), port=port, slots=slots, cpu=cpu, agent=agent, server_options=context.args,
        print_message=print_message,
    )  # fmt: skip
    result(url)


def down() -> None:
    """Stop the agent (its runs checkpoint first) and the server.

    Runs resume from their checkpoints after the next `zerolab up`.
    """
    from zerolab.cli.local.background import stop_services

    if not stop_services(Home.default(), print_message):
        print_message("nothing was running")


Renew = Annotated[
    bool, typer.Option("--renew", help="Make a new one first; the old one is void at once.")
]


def token(renew: Renew = False) -> None:
    """Print the token of this installation, for curl and other programs.

    Example: curl -H "Authorization: Bearer $(zerolab token)" "$(zerolab status --url)/api/v1/info"
    """
    home = Home.default()
    if not renew:
        result(home.read_token() or home.create().ensure_token())
    elif _has_server(home):
        with connect(home) as client:
            result(client.renew_token())
    else:
        result(home.create().replace_token())


def agent_token(renew: Renew = False) -> None:
    """Print the join token, with which agents of other machines connect.

    It is valid for the routes of agents only. Example: zerolab agent token > agent.token
    """
    home = Home.default()
    if _has_server(home):
        with connect(home) as client:
            result(client.agent_token(renew=renew))
    else:
        home.create()
        result(home.replace_agent_token() if renew else home.ensure_agent_token())


def _has_server(home: Home) -> bool:
    """Return whether a server is named or runs; without one, the files are changed directly."""
    from zerolab.cli.local.background import running_process, server_of

    return bool(named_master()) or running_process(server_of(home)) is not None
