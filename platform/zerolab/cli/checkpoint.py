"""Command group ``zerolab checkpoint``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zerolab.cli.connection import ExperimentId, id_of
from zerolab.cli.groups import command_group
from zerolab.cli.output import (
    AsJson,
    number,
    print_fields,
    print_json,
    print_message,
    print_table,
    result,
)
from zerolab.formatting import size_text

if TYPE_CHECKING:  # commands import the client when they need it
    from zerolab.client.http import Json

__all__ = ["Uuid", "group", "metric_lines"]

group = command_group("Checkpoints of trials.")


Uuid = Annotated[
    str, typer.Argument(help="Uuid of the checkpoint, or its first characters (4 or more).")
]


@group.command("list")
def list_checkpoints(
    experiment_id: ExperimentId,
    trial: Annotated[
        int | None, typer.Option(parser=id_of("trial"), help="Only this trial's.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List an experiment's checkpoints.

    Example: zerolab checkpoint list 1
    """
    from zerolab.cli.connection import connect

    with connect() as client:
        checkpoints = client.experiment_checkpoints(experiment_id)
    if trial is not None:
        checkpoints = [checkpoint for checkpoint in checkpoints if checkpoint["trial_id"] == trial]
    if as_json:
        print_json(checkpoints)
        return
    rows = [
        (
            checkpoint["uuid"],
            checkpoint["trial_id"],
            checkpoint["steps_completed"],
            checkpoint["state"],
            size_text(checkpoint["size_bytes"]),
            checkpoint["created_at"],
        )
        for checkpoint in checkpoints
    ]
    print_table(["uuid", "trial", "batch", "state", "size", "created"], rows)
    stored = [
        checkpoint for checkpoint in checkpoints if checkpoint["state"] in {"COMPLETED", "PARTIAL"}
    ]
    print_message(
        f"{len(stored)} there, {size_text(sum(checkpoint['size_bytes'] for checkpoint in stored))}"
    )


@group.command()
def describe(uuid: Uuid, as_json: AsJson = False) -> None:
    """Show a checkpoint: files, storage path, validation metrics."""
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
    metrics = checkpoint["metrics"] or {}
    return "\n".join(f"{name}: {number(metrics[name])}" for name in metrics)


@group.command()
def download(
    uuid: Uuid,
    directory: Annotated[Path, typer.Argument(help="Directory to copy it to.")],
    glob: Annotated[
        list[str] | None, typer.Option(help="Only files like this; may be repeated.")
    ] = None,
) -> None:
    """Download a checkpoint through the server; prints the directory.

    An interrupted download continues if it gets the same directory.

    Example: zerolab checkpoint download 2f0c... best/
    """
    from zerolab.cli.connection import connect
    from zerolab.client.checkpoints import download_checkpoint

    with connect() as client:
        size = download_checkpoint(client, uuid, directory, glob or ())
    print_message(f"copied {size_text(size)}")
    result(str(directory))
