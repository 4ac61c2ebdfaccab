"""Command group ``zerolab checkpoint``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zerolab.cli.connection import ExperimentId, id_of
from zerolab.cli.groups import command_group
from zerolab.cli.output import (
    AsJson,
    Yes,
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


DryRun = Annotated[bool, typer.Option("--dry-run", help="Only list what would be removed.")]


@group.command()
def delete(
    uuids: Annotated[
        list[str], typer.Argument(help="Uuids of the checkpoints, or their first characters.")
    ],
    glob: Annotated[
        list[str] | None, typer.Option(help="Only files like this; may be repeated.")
    ] = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Remove checkpoints, or some of their files; checkpoints in use are refused.

    Example: zerolab checkpoint delete 2f0c... --glob 'model0/rank-*'
    """
    from zerolab.cli.connection import connect

    with connect() as client:
        if not (dry_run or yes):
            plan = client.remove_checkpoints(uuids, glob or (), dry_run=True)
            _ask(plan)
        print_removal(client.remove_checkpoints(uuids, glob or (), dry_run=dry_run), as_json)


@group.command()
def gc(
    experiment_id: ExperimentId,
    save_experiment_best: Annotated[
        int | None, typer.Option(help="Number of the experiment's best to keep.")
    ] = None,
    save_trial_best: Annotated[
        int | None, typer.Option(help="Number of each trial's best to keep.")
    ] = None,
    save_trial_latest: Annotated[
        int | None, typer.Option(help="Number of each trial's newest to keep.")
    ] = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Set an experiment's retention of checkpoints, and remove the others.

    Example: zerolab checkpoint gc 1 --save-trial-best 0 --dry-run
    """
    from zerolab.cli.connection import connect

    limits = {
        "save_experiment_best": save_experiment_best,
        "save_trial_best": save_trial_best,
        "save_trial_latest": save_trial_latest,
    }
    policy = {name: count for name, count in limits.items() if count is not None}
    with connect() as client:
        if not (dry_run or yes):
            plan = client.collect_checkpoints(experiment_id, policy, dry_run=True)
            _ask(plan)
        answer = client.collect_checkpoints(experiment_id, policy, dry_run=dry_run)
    print_removal(answer, as_json)


def _ask(plan: "Json") -> None:
    """Ask whether to remove the checkpoints of a dry run.

    Raises:
        typer.Abort: If the user declines.
    """
    size, count = size_text(plan["size_bytes"]), len(plan["checkpoints"])
    typer.confirm(f"Remove {size} of {count} checkpoint(s)?", abort=True, err=True)


def print_removal(answer: "Json", as_json: bool) -> None:
    """Print the removed checkpoints, or those of a dry run."""
    if as_json:
        print_json(answer)
        return
    rows = [
        (
            checkpoint["uuid"],
            checkpoint["trial_id"],
            checkpoint["steps_completed"],
            "all" if checkpoint["whole"] else len(checkpoint["files"]),
            size_text(checkpoint["size_bytes"]),
        )
        for checkpoint in answer["checkpoints"]
    ]
    if rows:
        print_table(["uuid", "trial", "batch", "files", "size"], rows)
    done = "would be removed" if answer["dry_run"] else "removed"
    print_message(f"{size_text(answer['size_bytes'])} of {len(rows)} checkpoint(s) {done}")
