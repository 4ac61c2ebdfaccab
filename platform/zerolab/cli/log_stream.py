"""Log streaming, and waiting for the end of an experiment."""

import json
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from zerolab.cli.connection import complete_from
from zerolab.cli.output import result

if TYPE_CHECKING:
    from zerolab.client.http import Client

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

_POLL_S = 0.3
_PAGE = 1000

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
    after: Any = None
    tail = log_filter.tail
    while True:
        # Read before the page: after an end seen here, the page has all lines.
        has_ended = not follow or _state(client, noun, noun_id) in ENDED
        while True:
            page = _page(client, noun, noun_id, log_filter, tail=tail, after=after)
            for entry in page["logs"]:
                result(json.dumps(entry) if as_json else _line(entry))
                # Ids are given by the server's only writer, in the order of its commits: no line
                # with a smaller id can appear after this page, so none is missed and none is
                # printed twice.
                after = entry["id"]
            if tail is not None or page.get("next_after") is None:
                break
        tail = None
        if has_ended:
            return
        time.sleep(_POLL_S)


def wait_for_end(
    client: "Client", experiment_id: int, timeout_s: float | None = None
) -> dict[str, Any]:
    """Wait until an experiment has ended, or for a timeout; return the experiment."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        experiment = client.experiment(experiment_id)
        if experiment["state"] in ENDED or (deadline is not None and time.monotonic() > deadline):
            return experiment
        time.sleep(_POLL_S)


def exit_code(experiment: Mapping[str, Any]) -> int:
    """Return the exit code for an experiment that has ended.

    0 when it is COMPLETED, 3 when it is COMPLETED with failed trials, else 1.
    """
    if experiment["state"] != "COMPLETED":
        return 1
    return _SOME_FAILED if experiment["failed_trials"] else 0


def _page(
    client: "Client",
    noun: Noun,
    noun_id: int,
    log_filter: LogFilter,
    *,
    tail: int | None,
    after: Any,
) -> dict[str, Any]:
    limit = None if tail is not None else _PAGE
    filters = {
        "rank": log_filter.rank, "level": log_filter.level,
        "tail": tail, "after": after, "limit": limit
    }  # fmt: skip
    if noun == "trial":
        return client.trial_logs(noun_id, **filters)
    return client.experiment_logs(noun_id, **filters)


def _state(client: "Client", noun: Noun, noun_id: int) -> str:
    resource = client.trial(noun_id) if noun == "trial" else client.experiment(noun_id)
    return str(resource["state"])


def _line(entry: dict[str, Any]) -> str:
    origin = entry["stream"] if entry.get("rank") is None else f"rank {entry['rank']}"
    host = entry.get("host")
    if host and host != socket.gethostname():
        origin = f"{host} {origin}"
    return f"{entry['time']} trial {entry['trial_id']} [{origin}] {entry['text']}"
