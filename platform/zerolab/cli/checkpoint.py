"""Command group ``zerolab checkpoint``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zerolab.cli.connection import ExperimentId, complete_from_server, id_option
from zerolab.cli.groups import command_group
from zerolab.cli.output import (
    AsJson,
    number,
    print_fields,
    print_json,
    print_message,
    print_table,
    result,
    without_lengths,
)
from zerolab.formatting import size_text

if TYPE_CHECKING:  # commands import the client when they need it
    from collections.abc import Iterable

    from zerolab.client.http import Client, Json

__all__ = ["Uuid", "complete_uuid", "group", "metric_lines"]

group = command_group("List, download and delete checkpoints.", panel="Results")


def _uuids(client: "Client", _context: typer.Context) -> "Iterable[tuple[object, str]]":
    for experiment in client.experiments(limit=5):
        for checkpoint in client.experiment_checkpoints(experiment["id"]):
            text = f"batch {checkpoint['steps_completed']} of trial {checkpoint['trial_id']}"
            yield checkpoint["uuid"], text


complete_uuid = complete_from_server(_uuids)

Uuid = Annotated[
    str,
    typer.Argument(
        help="UUID of the checkpoint, or its first 4 or more characters.",
        autocompletion=complete_uuid,
    ),
]


@group.command("list")
def list_checkpoints(
    experiment_id: ExperimentId,
    trial: Annotated[
        int | None, id_option("trial", "--trial", text="List only the checkpoints of this trial.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the checkpoints of an experiment.

    Each is listed with the searcher's metric at its batch. The best one is marked.

    Example: zerolab checkpoint list 1
    """
    from zerolab.cli.connection import connect

    with connect() as client:
        checkpoints = client.experiment_checkpoints(experiment_id)
        metric = client.experiment(experiment_id)["metric"]
        best = client.best_checkpoint(experiment_id)["checkpoint"]
    if trial is not None:
        checkpoints[:] = [item for item in checkpoints if item["trial_id"] == trial]
    if as_json:
        print_json(checkpoints)
        return
    rows = [
        (
            checkpoint["uuid"],
            checkpoint["trial_id"],
            checkpoint["steps_completed"],
            number((checkpoint["metrics"] or {}).get(metric)),
            "best" if best and best["uuid"] == checkpoint["uuid"] else "",
            checkpoint["state"],
            size_text(checkpoint["size_bytes"]),
            checkpoint["created_at"],
        )
        for checkpoint in checkpoints
    ]
    columns = ["uuid", "trial", "batch", metric or "metric", "", "state", "size", "created"]
    print_table(columns, rows)
    stored = [
        checkpoint for checkpoint in checkpoints if checkpoint["state"] in {"COMPLETED", "PARTIAL"}
    ]
    size = size_text(sum(checkpoint["size_bytes"] for checkpoint in stored))
    print_message(f"{len(stored)} of {len(checkpoints)} checkpoint(s) in storage, {size}")


@group.command()
def describe(uuid: Uuid, as_json: AsJson = False) -> None:
    """Show a checkpoint: files, storage path, validation metrics.

    Example: zerolab checkpoint describe 2f0c
    """
    from zerolab.cli.connection import connect

    with connect() as client:
        checkpoint = client.checkpoint(uuid)
    if as_json:
        print_json(checkpoint)
        return
    print_fields(
        {
            "checkpoint": checkpoint["uuid"],
            "trial": f"{checkpoint['trial_id']} of experiment {checkpoint['experiment_id']}",
            "batch": checkpoint["steps_completed"],
            "state": checkpoint["state"],
            "size": size_text(checkpoint["size_bytes"]),
            "validation": metric_lines(checkpoint),
            "metadata": "\n".join(
                f"{key}: {value}" for key, value in checkpoint["metadata"].items()
            ),
            "path": checkpoint["path"],
            "files": "\n".join(
                f"{name} ({size_text(size)})"
                for name, size in sorted(checkpoint["resources"].items())
            ),
            "created": checkpoint["created_at"],
        }
    )


def metric_lines(checkpoint: "Json") -> str:
    """Return a checkpoint's validation metrics, one per line."""
    metrics = without_lengths(checkpoint["metrics"] or {})
    return "\n".join(f"{name}: {number(value)}" for name, value in metrics.items())


@group.command()
def download(
    uuid: Uuid,
    directory: Annotated[Path, typer.Argument(help="New or empty directory.")],
    glob: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Download only files that match, such as 'model0/*'. May be repeated.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Download a checkpoint, and print its directory.

    The files come from the server: this machine needs no access to the storage. To resume an
    interrupted download, repeat the command with the same directory.

    Example: zerolab checkpoint download 2f0c best/
    """
    from zerolab.cli.connection import connect
    from zerolab.client.checkpoints import download_checkpoint

    with connect() as client:
        size = download_checkpoint(client, uuid, directory, glob or ())
    if as_json:
        print_json({"directory": str(directory), "size_bytes": size})
        return
    print_message(f"downloaded {size_text(size)}")
    result(str(directory))
