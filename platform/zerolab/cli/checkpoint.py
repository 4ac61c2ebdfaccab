"""``zerolab checkpoint``: what trials have saved."""

from pathlib import Path
from typing import Annotated

import typer

from zerolab.cli.output import AsJson, number, print_fields, print_json, print_table, result, say

__all__ = ["group"]

group = typer.Typer(help="Checkpoints of trials.", no_args_is_help=True, rich_markup_mode=None)

Uuid = Annotated[str, typer.Argument(help="Uuid of the checkpoint.")]


@group.command("list")
def list_checkpoints(
    experiment_id: Annotated[int, typer.Argument(help="Id of the experiment.")],
    trial: Annotated[int | None, typer.Option(help="Only this trial's.")] = None,
    as_json: AsJson = False,
) -> None:
    """List an experiment's checkpoints.

    Example: zerolab checkpoint list 1
    """
    from zerolab.cli.connection import connect

    with connect() as client:
        found = client.experiment_checkpoints(experiment_id)
    if trial is not None:
        found = [one for one in found if one["trial_id"] == trial]
    if as_json:
        print_json(found)
        return
    rows = [
        (
            one["uuid"],
            one["trial_id"],
            one["steps_completed"],
            one["state"],
            _megabytes(one["size_bytes"]),
            one["created_at"],
        )
        for one in found
    ]
    print_table(["uuid", "trial", "batch", "state", "size", "created"], rows)


@group.command()
def describe(uuid: Uuid, as_json: AsJson = False) -> None:
    """Show one checkpoint: what is in it, where it lies, how good it is."""
    from zerolab.cli.connection import connect

    with connect() as client:
        found = client.checkpoint(uuid)
    if as_json:
        print_json(found)
        return
    metrics = found["metrics"] or {}
    print_fields(
        {
            "checkpoint": found["uuid"],
            "trial": f"{found['trial_id']} of experiment {found['experiment_id']}",
            "batch": found["steps_completed"],
            "state": found["state"],
            "size": _megabytes(found["size_bytes"]),
            "validation": "\n".join(f"{name}: {number(metrics[name])}" for name in metrics),
            "metadata": "\n".join(f"{key}: {value}" for key, value in found["metadata"].items()),
            "path": found["path"],
            "files": "\n".join(
                f"{name} ({_megabytes(size)})" for name, size in sorted(found["resources"].items())
            ),
            "created": found["created_at"],
        }
    )


@group.command()
def download(
    uuid: Uuid,
    directory: Annotated[Path, typer.Argument(help="New directory to copy it to.")],
) -> None:
    """Copy a checkpoint out of the storage; prints where it is.

    Example: zerolab checkpoint download 2f0c... best/
    """
    import shutil

    from zerolab.cli.connection import connect
    from zerolab.errors import ConflictError, NotFoundError

    with connect() as client:
        found = client.checkpoint(uuid)
    source = Path(found["path"])
    if found["state"] != "COMPLETED":
        raise ConflictError(f"checkpoint {uuid} is {found['state']}: there is nothing to copy")
    if not source.is_dir():
        msg = f"checkpoint {uuid} lies at {source}, which this machine does not see"
        raise NotFoundError(f"{msg}; run the command where the storage is")
    if directory.exists():
        raise ConflictError(f"{directory}: must not exist yet; name a new directory")
    shutil.copytree(source, directory)
    say(f"copied {_megabytes(found['size_bytes'])}")
    result(str(directory))


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.2f} MB"
