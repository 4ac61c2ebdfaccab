"""Commands ``status``, ``open``, ``logout`` and ``version``."""

from typing import Annotated

import typer

from zerolab.cli.output import AsJson, print_fields, print_json, print_message, result

__all__ = ["logout", "open_page", "status", "version"]


def status(
    url: Annotated[bool, typer.Option("--url", help="Print only the address of the server.")] = (
        False
    ),
    as_json: AsJson = False,
) -> None:
    """Show the server, its agents and slots, and active experiments.

    Exit code 1 if no server responds.
    """
    from zerolab.cli.connection import connect
    from zerolab.errors import UnreachableError
    from zerolab.paths import Home, server_url

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
    browser: Annotated[bool, typer.Option(help="Open a browser, or only print the link.")] = True,
    as_json: AsJson = False,
) -> None:
    """Open the web page in a browser, signed in.

    Prints the link as well. It is valid for five minutes, and for one browser.
    """
    from zerolab.cli.connection import connect

    with connect() as client:
        link = client.login_link()
    if as_json:
        print_json({"link": link})
    else:
        result(link)
    if browser:
        import webbrowser

        webbrowser.open(link)


def logout() -> None:
    """Sign out all browsers of the token's user. `zerolab open` signs one in again."""
    from zerolab.cli.connection import connect

    with connect() as client:
        client.log_out()
    print_message("all browsers are signed out")


def version(as_json: AsJson = False) -> None:
    """Print the version."""
    from zerolab import __version__

    if as_json:
        print_json({"version": __version__})
    else:
        result(__version__)
