"""Connection of commands to a server, and arguments that name its resources."""

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from zerolab.errors import UnreachableError
from zerolab.paths import Home, named_master, server_url, token_of

if TYPE_CHECKING:
    from zerolab.client.http import Client

__all__ = [
    "ExperimentId",
    "TrialId",
    "connect",
    "find_server_url",
    "id_of",
    "named_master",
    "server_url",
    "token_of",
]


def id_of(noun: str) -> Callable[[str], int]:
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
    return f"`{_LISTS[noun][1]}` shows which there are"


_LISTS = {
    "experiment": ("an experiment", "zerolab experiment list"),
    "trial": ("a trial", "zerolab trial list EXPERIMENT"),
    "checkpoint": ("a checkpoint", "zerolab checkpoint list EXPERIMENT"),
}

ExperimentId = Annotated[
    int, typer.Argument(parser=id_of("experiment"), help="Id of the experiment.")
]
TrialId = Annotated[int, typer.Argument(parser=id_of("trial"), help="Id of the trial.")]


def find_server_url(home: Home) -> str:
    """Return the address of the server.

    Raises:
        UnreachableError: If no server of this installation runs, and the environment names none.
    """
    url = server_url(home)
    if url is None:
        msg = f"no server runs for the data directory {home.path}; start one with `zerolab up`"
        raise UnreachableError(msg)
    return url


def connect(home: Home | None = None, *, timeout_s: float = 60.0) -> "Client":
    """Connect to the server.

    Raises:
        UnreachableError: If no server of this installation runs, and the environment names none.
    """
    from zerolab.client.http import Client

    home = home or Home.default()
    url = find_server_url(home)
    return Client(url, token_of(home), timeout_s=timeout_s, newer_token=lambda: token_of(home))
