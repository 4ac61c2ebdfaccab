"""Command group ``zerolab notify``."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zerolab.cli.connection import complete_from_server
from zerolab.cli.groups import command_group
from zerolab.cli.output import AsJson, print_done, print_json, print_message, print_table, result

if TYPE_CHECKING:  # commands import the client when they need it
    from collections.abc import Iterable, Mapping

    from zerolab.client.http import Client

__all__ = ["group"]

group = command_group(
    "Send messages to webhooks and chats when runs end or fail.", panel="Queue and machines"
)

_URL_BYTES = 8192


def _names(client: "Client", _context: typer.Context) -> "Iterable[tuple[object, str]]":
    yield from (
        (channel["name"], ", ".join(channel["events"]))
        for channel in client.notification_channels()
    )


ChannelName = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="Name of the channel.",
        autocompletion=complete_from_server(_names),
    ),
]


@group.command("add")
def add_channel(
    name: ChannelName,
    url_file: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="File with the URL of the webhook; - reads standard input. The URL is a secret: "
            "it is no argument, since others could see it.",
        ),
    ],
    kind: Annotated[
        str,
        typer.Option(
            metavar="KIND",
            help="webhook, or apprise for a URL such as mailto:// or slack://, which needs the "
            "extra notify on the server.",
        ),
    ] = "webhook",
    events: Annotated[
        str | None,
        typer.Option(
            metavar="EVENTS",
            help="Events, separated by commas. Default: finished,failed,alert.",
        ),
    ] = None,
    all_experiments: Annotated[
        bool,
        typer.Option(
            "--all-experiments",
            help="Send messages about all experiments, not only about those that name the channel.",
        ),
    ] = False,
    user: Annotated[
        str | None,
        typer.Option(metavar="USER", help="Send messages about all experiments of this user."),
    ] = None,
    project: Annotated[
        str | None,
        typer.Option(
            metavar="PROJECT",
            help="Send messages about all experiments of this project; with --user, about the "
            "user's in it.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Add a channel, and print the secret that signs its messages.

    Example: zerolab notify add team --url-file url.txt --events failed,canceled
    """
    from zerolab.cli.connection import connect

    url = _read_url(url_file)
    names = None if events is None else [event.strip() for event in events.split(",")]
    with connect() as client:
        answer = client.add_notification_channel(
            name,
            url,
            names,
            all_experiments=all_experiments,
            user=user,
            project=project,
            kind=kind,
        )
    if as_json:
        print_json(answer)
        return
    print_message(
        f"channel {name} is added; check it with `zerolab notify test {name}`"
        + (
            ""
            if all_experiments or user or project
            else f"; experiments name it as notify: {{channels: [{name}]}}"
        )
    )
    if answer.get("secret"):
        print_message("the secret of its signatures, which is not shown again:")
        result(str(answer["secret"]))


def _read_url(file: str) -> str:
    """Read the URL of a channel.

    Raises:
        ConfigError: If there is none; the error does not contain the content of the file.
    """
    from zerolab.errors import ConfigError

    if file == "-":
        text = sys.stdin.read(_URL_BYTES)
    else:
        try:
            text = Path(file).read_text(encoding="utf-8")[:_URL_BYTES]
        except (OSError, UnicodeDecodeError):
            problem = f"--url-file: must be a readable text file with a URL, got {file}"
            raise ConfigError("channel", [problem]) from None
    lines = text.split()
    if len(lines) != 1:
        problem = f"--url-file: must hold one URL, got {len(lines) or 'nothing'}"
        raise ConfigError("channel", [f"{problem} words" if lines else problem])
    return lines[0]


@group.command("list")
def list_channels(
    messages: Annotated[
        bool, typer.Option("--messages", help="List the newest messages instead.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the channels, or the newest messages to them.

    Example: zerolab notify list
    """
    from zerolab.cli.connection import connect

    with connect() as client:
        rows = client.notifications() if messages else client.notification_channels()
    if as_json:
        print_json(rows)
        return
    if messages:
        names = ["id", "channel", "event", "state", "attempts", "created_at", "title", "error"]
    else:
        names = ["name", "kind", "events", "experiments", "pending", "failed"]
        names += ["last_sent_at", "error"]
    for row in rows:
        row["experiments"] = _experiments(row)
        row["events"] = ", ".join(row.get("events", []))
    columns = [name.removesuffix("_at").replace("_", " ") for name in names]
    print_table(columns, [[row[name] for name in names] for row in rows])


def _experiments(channel: "Mapping[str, Any]") -> str:
    """Return about which experiments a channel gets messages."""
    if channel.get("all_experiments"):
        return "all"
    user, project = channel.get("user"), channel.get("project")
    parts = [f"of {user}"] if user else []
    parts += [f"in {project}"] if project else []
    return " ".join(parts) or "that name it"


@group.command("test")
def send_test(name: ChannelName, as_json: AsJson = False) -> None:
    """Send a test message to a channel; exit with 1 if it is not delivered.

    Example: zerolab notify test team
    """
    from zerolab.cli.connection import connect

    with connect() as client:
        answer = client.test_notification_channel(name)
    if answer["delivered"]:
        print_done(answer, f"channel {name} has accepted the message", as_json=as_json)
        return
    print_done(answer, f"channel {name}: not delivered: {answer['error']}", as_json=as_json)
    raise typer.Exit(1)


@group.command("delete")
def delete_channel(name: ChannelName, as_json: AsJson = False) -> None:
    """Delete a channel and its messages.

    Example: zerolab notify delete team
    """
    from zerolab.cli.connection import connect

    with connect() as client:
        client.delete_notification_channel(name)
    print_done({"name": name, "deleted": True}, f"channel {name} is deleted", as_json=as_json)
