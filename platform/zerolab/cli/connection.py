"""Connection of commands to a server, and arguments that name its resources."""

import contextlib
import re
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zerolab.errors import UnreachableError

if TYPE_CHECKING:
    from zerolab.client.http import Client
    from zerolab.paths import Home

__all__ = [
    "ExperimentId",
    "InProject",
    "OfState",
    "TrialId",
    "complete_from",
    "complete_from_server",
    "complete_project",
    "completed_id",
    "connect",
    "find_server_url",
    "id_argument",
    "id_option",
]


def _id_of(noun: str) -> Callable[[str], int]:
    """Return a parser of ids of experiments or trials."""

    def read(text: str) -> int:
        if re.fullmatch(r"[1-9][0-9]{0,14}", text) is None:
            msg = f"must be the id of {_LISTS[noun][0]}, a whole number from 1, got {text!r}"
            raise typer.BadParameter(f"{msg}; {list_command(noun)}")
        return int(text)

    read.__name__ = "int"  # shown in --help
    return read


def list_command(noun: str) -> str:
    """Return the command that lists resources of a kind."""
    return f"`{_LISTS[noun][1]}` lists them"


_LISTS = {
    "experiment": ("an experiment", "zerolab experiment list"),
    "trial": ("a trial", "zerolab trial list EXPERIMENT"),
    "checkpoint": ("a checkpoint", "zerolab checkpoint list EXPERIMENT"),
}

_STATES = "ACTIVE", "PAUSED", "COMPLETED", "CANCELED", "ERROR"
_SAFE_VALUE = re.compile(r"[\w.,/:@%+=-]+")
_UNSAFE_TEXT = re.compile(r"[^\w .,/:@%+=()-]")
"""Shells evaluate what a completion returns, and anybody may name an experiment ``$(command)``."""
_COMPLETION_S = 2.0
"""Maximum time that a shell waits for a completion, for all requests together."""

Completions = Callable[[typer.Context, str], list[tuple[str, str]]]
"""Shell completion: values that begin with a text, each with an explanation or an empty string."""


def completed_id(context: typer.Context) -> int | None:
    """Return the id that precedes the word that the shell completes; None without one."""
    words = [*context.params.values(), *context.args]
    return next((int(word) for word in words if str(word).isdecimal()), None)


def complete_from(*values: str) -> Completions:
    """Return a shell completion of fixed values."""

    def complete(_context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
        return [(value, "") for value in values if value.startswith(incomplete)]

    return complete


def complete_from_server(
    list_values: Callable[["Client", typer.Context], Iterable[tuple[object, str]]],
) -> Completions:
    """Return a shell completion of the server's resources; no values if it does not respond.

    Args:
        list_values: Returns all values and their explanations.
    """

    def complete(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
        values: list[tuple[str, str]] = []

        def read() -> None:
            # A shell must never print an error here.
            with contextlib.suppress(Exception), connect(timeout_s=1.0) as client:
                values.extend((str(value), text) for value, text in list_values(client, context))

        reader = threading.Thread(target=read, daemon=True)  # name lookups have no timeout
        reader.start()
        reader.join(_COMPLETION_S)
        return [
            (value, _UNSAFE_TEXT.sub("?", text))
            for value, text in ([] if reader.is_alive() else values)
            if value.startswith(incomplete) and _SAFE_VALUE.fullmatch(value)
        ]

    return complete


def _experiment_ids(client: "Client", _context: typer.Context) -> Iterable[tuple[object, str]]:
    for item in client.experiments(limit=_COMPLETED):
        yield item["id"], f"{item['name']} ({item['state']})"


def _trial_ids(client: "Client", _context: typer.Context) -> Iterable[tuple[object, str]]:
    for experiment in client.experiments(limit=_COMPLETED_EXPERIMENTS):
        for trial in client.trials(experiment["id"], limit=_COMPLETED):
            yield trial["id"], f"experiment {experiment['id']} ({trial['state']})"


def _project_names(client: "Client", _context: typer.Context) -> Iterable[tuple[object, str]]:
    yield from ((project["name"], project["description"]) for project in client.projects())


complete_project = complete_from_server(_project_names)

InProject = Annotated[
    str | None,
    typer.Option(
        "--project",
        metavar="NAME",
        help="Name of the project. Default: that of the experiment file, else `default`.",
        autocompletion=complete_project,
    ),
]

_COMPLETED = 100
"""Maximum number of resources that the shell offers."""
_COMPLETED_EXPERIMENTS = 5

_COMPLETE = {
    "experiment": complete_from_server(_experiment_ids),
    "trial": complete_from_server(_trial_ids),
}


def id_argument(noun: str, text: str | None = None) -> Any:
    """Return an argument with the id of an experiment or a trial.

    Args:
        noun: ``experiment`` or ``trial``.
        text: Its help.
    """
    return typer.Argument(
        parser=_id_of(noun), help=text or f"Id of the {noun}.", autocompletion=_COMPLETE[noun]
    )


def id_option(noun: str, *names: str, text: str) -> Any:
    """Return an option with the id of an experiment or a trial.

    Args:
        noun: ``experiment`` or ``trial``.
        names: Names of the option.
        text: Its help.
    """
    return typer.Option(
        *names,
        parser=_id_of(noun),
        metavar=f"{noun.upper()}_ID",
        help=text,
        autocompletion=_COMPLETE[noun],
    )


ExperimentId = Annotated[int, id_argument("experiment")]
TrialId = Annotated[int, id_argument("trial")]
OfState = Annotated[
    str | None,
    typer.Option(
        "--state",
        parser=str.upper,
        metavar="STATE",
        help=f"List only those in this state: {', '.join(_STATES)}.",
        autocompletion=complete_from(*_STATES),
    ),
]


def find_server_url(home: "Home") -> str:
    """Return the address of the server.

    Raises:
        UnreachableError: If no server of this installation runs, and the environment names none.
    """
    from zerolab.paths import server_url

    url = server_url(home)
    if url is None:
        msg = f"no server runs for the data directory {home.path}; start one with `zerolab up`, "
        msg += "or name one of another machine with --master URL or ZEROLAB_MASTER"
        raise UnreachableError(msg)
    return url


def connect(home: "Home | None" = None, *, timeout_s: float = 60.0) -> "Client":
    """Connect to the server.

    Raises:
        UnreachableError: If no server of this installation runs, and the environment names none.
    """
    from zerolab.client.http import Client
    from zerolab.paths import Home, token_of

    home = home or Home.default()
    url = find_server_url(home)
    return Client(url, token_of(home), timeout_s=timeout_s, newer_token=lambda: token_of(home))
