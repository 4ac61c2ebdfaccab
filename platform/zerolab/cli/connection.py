"""Which server a command talks to, with which token, and how its things are named."""

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
    "id_of",
    "named_master",
    "own_server",
    "server_url",
    "token_of",
]


def id_of(noun: str) -> Callable[[str], int]:
    """Return what reads the id of an experiment or a trial from the command line."""

    def read(text: str) -> int:
        if re.fullmatch(r"[1-9][0-9]{0,14}", text) is None:
            msg = f"must be the id of {_LISTS[noun][0]}, a whole number from 1, got {text!r}"
            raise typer.BadParameter(f"{msg}; {shown_by(noun)}")
        return int(text)

    read.__name__ = "int"  # told in --help
    return read


def shown_by(noun: str) -> str:
    """Say which command lists things of that kind."""
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


def own_server(home: Home) -> str:
    """Return the address of the server.

    Raises:
        UnreachableError: If no server of this installation has been started, and none is named.
    """
    url = server_url(home)
    if url is None:
        msg = f"no server runs for the data directory {home.path}; start one with `zerolab up`"
        raise UnreachableError(msg)
    return url


def connect(home: Home | None = None, *, timeout_s: float = 60.0) -> "Client":
    """Connect to the server.

    Raises:
        UnreachableError: If no server of this installation has been started, and none is named.
    """
    from zerolab.client.http import Client

    home = home or Home.default()
    url = own_server(home)
    return Client(url, token_of(home), timeout_s=timeout_s, newer_token=lambda: token_of(home))
