"""Commands ``up``, ``down``, ``status``, ``open``, ``logout``, ``version`` and ``token``."""

from typing import Annotated

import typer

from zerolab.cli.output import AsJson, Port, print_fields, print_json, print_message, result
from zerolab.paths import Home

__all__ = ["down", "logout", "open_page", "status", "token", "up", "version"]


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


def status(
    url: Annotated[bool, typer.Option("--url", help="Print the address of the server only.")] = (
        False
    ),
    as_json: AsJson = False,
) -> None:
    """Show the server, agents, slots and experiments. Exit code 1 if no server responds."""
    from zerolab.cli.connection import connect, server_url
    from zerolab.errors import UnreachableError

    home = Home.default()
    try:
        with connect(home, timeout_s=10.0) as client:
            info, agents = client.info(), client.agents()
            active = client.experiments(state="ACTIVE")
    except UnreachableError as error:
        print_message(f"zerolab: {error}")
        raise typer.Exit(1) from None
    if url:
        result(str(server_url(home)))
        return
    if as_json:
        print_json({"url": server_url(home), "info": info, "agents": agents, "active": active})
        return
    cluster = info["cluster"]
    print_fields(
        {
            "server": server_url(home),
            "version": info["version"],
            "data": info["home"],
            "started": info["started_at"],
            "agents": ", ".join(item["name"] for item in agents if item["alive"]) or "none",
            "slots": f"{cluster['slots']}, {cluster['free_slots']} free",
            "active": "\n".join(f"experiment {item['id']}: {item['name']}" for item in active),
        }
    )


def open_page(
    browser: Annotated[bool, typer.Option(help="Open a browser; else only print the link.")] = True,
) -> None:
    """Print a link that signs a browser in to the web page, once, and open it."""
    from zerolab.cli.connection import connect

    with connect() as client:
        link = client.login_link()
    result(link)
    if browser:
        import webbrowser

        webbrowser.open(link)


def logout() -> None:
    """Sign every browser out of the web page; `zerolab open` signs one in again."""
    from zerolab.cli.connection import connect

    with connect() as client:
        client.log_out()
    print_message("every browser is signed out")


def token(
    renew: Annotated[
        bool, typer.Option("--renew", help="Make a new one first; the old one is void at once.")
    ] = False,
) -> None:
    """Print the token of this installation, for curl and other programs.

    Example: curl -H "Authorization: Bearer $(zerolab token)" "$(zerolab status --url)/api/v1/info"
    """
    from zerolab.cli.local.background import renew_token

    home = Home.default()
    result(renew_token(home) if renew else home.read_token() or home.create().ensure_token())


def version() -> None:
    """Print the version."""
    from zerolab import __version__

    result(__version__)
