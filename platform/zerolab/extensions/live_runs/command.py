"""Command ``zerolab sync``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from filelock import Timeout

from zerolab.cli.groups import in_panel
from zerolab.cli.output import AsJson, print_json, print_message, result
from zerolab.errors import ConfigError, StaleRunError

if TYPE_CHECKING:
    from zerolab.client.http import Client
    from zerolab.extensions.live_runs.run_directory import LiveDirectory

__all__ = ["sync_runs"]

_STATES = {
    "delivered": "sent already",
    "rejected": "rejected by the server:",
    "running": "its script still runs",
    "sent": "sent",
}


@in_panel("Results")
def sync_runs(
    path: Annotated[
        Path, typer.Argument(help="Directory of a live run, or a directory with several.")
    ] = Path(".zerolab", "live"),
    as_json: AsJson = False,
) -> None:
    """Send reports of scripts that had no connection, and print the ids of the experiments.

    Everything arrives exactly once, however often it is sent. Runs that were sent completely, and
    those whose script still runs, are skipped.

    Example: zerolab sync
    zerolab sync .zerolab/live/20261128-101500-1a2b3c4d
    """
    from zerolab.cli.connection import connect
    from zerolab.extensions.live_runs.run_directory import find_live_directories

    directories = find_live_directories(path)
    if not directories:
        problem = "must be a directory with live runs; scripts write them to .zerolab/live"
        raise ConfigError(str(path), [problem])
    reports = []
    with connect() as client:
        for directory in directories:
            report = _send(directory, client)
            reports.append(report)
            if as_json:
                continue
            detail = report["error"] or f"as experiment {report['experiment_id']}"
            end = f" {detail}" if report["state"] in {"sent", "rejected"} else ""
            print_message(f"{report['directory']}: {_STATES[report['state']]}{end}")
            if report["experiment_id"] is not None:
                result(str(report["experiment_id"]))
    if as_json:
        print_json(reports)
    if any(report["state"] == "rejected" for report in reports):
        raise typer.Exit(2)


def _send(directory: "LiveDirectory", client: "Client") -> dict[str, Any]:
    """Send a run; return what was done."""
    from zerolab.extensions.live_runs.connection import LiveConnection
    from zerolab.extensions.live_runs.delivery import sync

    report = {"directory": directory.path.name, "experiment_id": None, "error": None}
    if directory.is_delivered:
        return {**report, "state": "delivered"}
    try:
        directory.lock.acquire(blocking=False)
    except Timeout:
        return {**report, "state": "running"}
    try:
        connection = LiveConnection(directory, client, replace=False)
        sync(directory, connection)
    except StaleRunError as error:
        return {**report, "state": "rejected", "error": str(error)}
    finally:
        directory.lock.release()
    return {**report, "state": "sent", "experiment_id": connection.experiment_id}
