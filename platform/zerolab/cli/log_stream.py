"""Log streaming, and waiting for the end of an experiment."""

import json
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from zerolab.cli.connection import complete_from
from zerolab.cli.output import result
from zerolab.errors import WaitTimeoutError

if TYPE_CHECKING:
    from zerolab.client.http import Client
    from zerolab.client.objects import Experiment

__all__ = [
    "ENDED",
    "AsJsonLines",
    "Follow",
    "LogFilter",
    "OfLevel",
    "OfRank",
    "Tail",
    "exit_code",
    "print_logs",
    "wait_for_end",
]

Follow = Annotated[bool, typer.Option("--follow", "-f", help="Print new lines until it has ended.")]
Tail = Annotated[
    int | None, typer.Option("--tail", "-n", metavar="N", help="Print only the last N lines.")
]
OfRank = Annotated[
    int | None, typer.Option("--rank", metavar="N", help="Print only the lines of this rank.")
]
OfLevel = Annotated[
    str | None,
    typer.Option(
        "--level",
        parser=str.upper,
        metavar="LEVEL",
        help="Print only the lines of this level: DEBUG, INFO, WARNING, ERROR or CRITICAL.",
        autocompletion=complete_from("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"),
    ),
]
AsJsonLines = Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")]

ENDED = frozenset({"COMPLETED", "CANCELED", "ERROR"})
"""Final states of experiments and trials."""

_SOME_FAILED = 3

Noun = Literal["experiment", "trial"]


@dataclass(frozen=True)
class LogFilter:
    """Filter of log lines."""

    rank: int | None = None
    level: str | None = None
    tail: int | None = None


def print_logs(
    client: "Client",
    noun: Noun,
    noun_id: int,
    log_filter: LogFilter,
    *,
    follow: bool,
    as_json: bool,
) -> None:
    """Print log lines so far or, with ``follow``, until the experiment or trial has ended."""
    resource = client.trial(noun_id) if noun == "trial" else client.experiment(noun_id)
    for line in resource.logs(
        rank=log_filter.rank, level=log_filter.level, tail=log_filter.tail, follow=follow
    ):
        result(json.dumps(line) if as_json else _line(line))


def wait_for_end(
    client: "Client", experiment_id: int, timeout_s: float | None = None
) -> "Experiment":
    """Wait until an experiment has ended, or for a timeout; return the experiment."""
    experiment = client.experiment(experiment_id)
    with suppress(WaitTimeoutError):
        experiment.wait(timeout_s)
    return experiment


def exit_code(experiment: Mapping[str, Any]) -> int:
    """Return the exit code for an experiment that has ended.

    0 when it is COMPLETED, 3 when it is COMPLETED with failed trials, else 1.
    """
    if experiment["state"] != "COMPLETED":
        return 1
    return _SOME_FAILED if experiment["failed_trials"] else 0


def _line(entry: Mapping[str, Any]) -> str:
    origin = entry["stream"] if entry.get("rank") is None else f"rank {entry['rank']}"
    host = entry.get("host")
    if host and host != socket.gethostname():
        origin = f"{host} {origin}"
    return f"{entry['time']} trial {entry['trial_id']} [{origin}] {entry['text']}"
