"""Command ``zerolab sync``."""

from pathlib import Path
from typing import Annotated

import typer
from filelock import Timeout

from zerolab.cli.groups import in_panel
from zerolab.cli.output import print_message, result
from zerolab.errors import ConfigError

__all__ = ["sync_runs"]


@in_panel("Results")
def sync_runs(
    path: Annotated[
        Path, typer.Argument(help="Directory of a live run, or a directory with several.")
    ] = Path(".zerolab", "live"),
) -> None:
    """Send reports of scripts that had no connection, and print the ids of the experiments.

    Everything arrives exactly once, however often it is sent. Runs that were sent completely, and
    those whose script still runs, are skipped.

    Example: zerolab sync
    zerolab sync .zerolab/live/20261128-101500-1a2b3c4d
    """
    from zerolab.cli.connection import connect
    from zerolab.extensions.live_runs.connection import LiveConnection
    from zerolab.extensions.live_runs.delivery import sync
    from zerolab.extensions.live_runs.run_directory import find_live_directories

    directories = find_live_directories(path)
    if not directories:
        problem = "must be a directory with live runs; scripts write them to .zerolab/live"
        raise ConfigError(str(path), [problem])
    with connect() as client:
        for directory in directories:
            name = directory.path.name
            if directory.is_delivered:
                print_message(f"{name}: sent already")
                continue
            try:
                directory.lock.acquire(blocking=False)
            except Timeout:
                print_message(f"{name}: its script still runs")
                continue
            try:
                connection = LiveConnection(directory, client, replace=False)
                sync(directory, connection)
            finally:
                directory.lock.release()
            print_message(f"{name}: sent as experiment {connection.experiment_id}")
            result(str(connection.experiment_id))
