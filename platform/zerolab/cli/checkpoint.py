"""``zerolab checkpoint`` and ``zerolab model``: what trials have saved, and what has a name."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zerolab.cli.connection import ExperimentId, id_of
from zerolab.cli.output import (
    AsJson,
    Yes,
    number,
    print_fields,
    print_json,
    print_table,
    result,
    say,
)
from zerolab.formatting import size_text

if TYPE_CHECKING:  # the client is loaded by the commands that need it
    from zerolab.client.http import Json

__all__ = ["group", "models"]

group = typer.Typer(help="Checkpoints of trials.", no_args_is_help=True, rich_markup_mode=None)

models = typer.Typer(
    help="The registry: checkpoints that are versions of a model, and are kept.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

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
            size_text(one["size_bytes"]),
            one["created_at"],
        )
        for one in found
    ]
    print_table(["uuid", "trial", "batch", "state", "size", "created"], rows)
    there = [one for one in found if one["state"] in {"COMPLETED", "PARTIAL"}]
    say(f"{len(there)} there, {size_text(sum(one['size_bytes'] for one in there))}")


@group.command()
def describe(uuid: Uuid, as_json: AsJson = False) -> None:
    """Show one checkpoint: what is in it, where it lies, how good it is."""
    from zerolab.cli.connection import connect

    with connect() as client:
        found = client.checkpoint(uuid)
    if as_json:
        print_json(found)
        return
    print_fields(
        {
            "checkpoint": found["uuid"],
            "trial": f"{found['trial_id']} of experiment {found['experiment_id']}",
            "batch": found["steps_completed"],
            "state": found["state"],
            "size": size_text(found["size_bytes"]),
            "validation": _metrics(found),
            "metadata": "\n".join(f"{key}: {value}" for key, value in found["metadata"].items()),
            "path": found["path"],
            "files": "\n".join(
                f"{name} ({size_text(size)})" for name, size in sorted(found["resources"].items())
            ),
            "created": found["created_at"],
        }
    )


def _metrics(found: "Json") -> str:
    """The validation metrics of a checkpoint, one a line; empty without any."""
    metrics = found["metrics"] or {}
    return "\n".join(f"{name}: {number(metrics[name])}" for name in metrics)


@group.command()
def download(
    uuid: Uuid,
    directory: Annotated[Path, typer.Argument(help="Directory to copy it to.")],
    glob: Annotated[
        list[str] | None, typer.Option(help="Only files like this; may be repeated.")
    ] = None,
) -> None:
    """Copy a checkpoint out of its storage, through the server; prints where it is.

    One that was cut off goes on where it stopped, when it is given the same directory.

    Example: zerolab checkpoint download 2f0c... best/
    """
    from zerolab.cli.connection import connect
    from zerolab.client.checkpoints import download_checkpoint

    with connect() as client:
        size = download_checkpoint(client, uuid, directory, glob or ())
    say(f"copied {size_text(size)}")
    result(str(directory))


DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")]


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
    """Remove checkpoints, or files of them; what something still needs is refused.

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
        int | None, typer.Option(help="Keep so many, the experiment's best.")
    ] = None,
    save_trial_best: Annotated[
        int | None, typer.Option(help="Keep so many of each trial, its best.")
    ] = None,
    save_trial_latest: Annotated[
        int | None, typer.Option(help="Keep so many of each trial, its newest.")
    ] = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Set how many checkpoints an experiment keeps, and remove the others.

    Example: zerolab checkpoint gc 1 --save-trial-best 0 --dry-run
    """
    from zerolab.cli.connection import connect

    given = {
        "save_experiment_best": save_experiment_best,
        "save_trial_best": save_trial_best,
        "save_trial_latest": save_trial_latest,
    }
    policy = {name: count for name, count in given.items() if count is not None}
    with connect() as client:
        if not (dry_run or yes):
            plan = client.collect_checkpoints(experiment_id, policy, dry_run=True)
            _ask(plan)
        answer = client.collect_checkpoints(experiment_id, policy, dry_run=dry_run)
    print_removal(answer, as_json)


def _ask(plan: "Json") -> None:
    """Ask whether to remove what a dry run names.

    Raises:
        typer.Abort: If the answer is no.
    """
    size, count = size_text(plan["size_bytes"]), len(plan["checkpoints"])
    typer.confirm(f"Remove {size} of {count} checkpoint(s)?", abort=True, err=True)


def print_removal(answer: "Json", as_json: bool) -> None:
    """Print what went, or would go."""
    if as_json:
        print_json(answer)
        return
    rows = [
        (
            one["uuid"],
            one["trial_id"],
            one["steps_completed"],
            "all" if one["whole"] else len(one["files"]),
            size_text(one["size_bytes"]),
        )
        for one in answer["checkpoints"]
    ]
    if rows:
        print_table(["uuid", "trial", "batch", "files", "size"], rows)
    done = "would be removed" if answer["dry_run"] else "removed"
    say(f"{size_text(answer['size_bytes'])} of {len(rows)} checkpoint(s) {done}")


ModelName = Annotated[str, typer.Argument(metavar="NAME", help="Name of the model.")]


@models.command("create")
def create_model(
    name: ModelName,
    description: Annotated[str, typer.Option(help="What it is for.")] = "",
) -> None:
    """Add a model to the registry.

    Example: zerolab model create digits --description "reads postcodes"
    """
    from zerolab.cli.connection import connect

    with connect() as client:
        result(str(client.create_model(name, description)["name"]))


@models.command("list")
def list_models(as_json: AsJson = False) -> None:
    """List the models and how many versions they have."""
    from zerolab.cli.connection import connect

    with connect() as client:
        found = client.models()
    if as_json:
        print_json(found)
        return
    rows = [
        (one["name"], len(one["versions"]), _newest(one), one["created_at"], one["description"])
        for one in found
    ]
    print_table(["name", "versions", "newest", "created", "description"], rows)


def _newest(model: "Json") -> int | str:
    versions = model["versions"]
    return versions[-1]["version"] if versions else ""


@models.command("describe")
def describe_model(name: ModelName, as_json: AsJson = False) -> None:
    """Show a model and its versions."""
    from zerolab.cli.connection import connect

    with connect() as client:
        found = client.model(name)
    if as_json:
        print_json(found)
        return
    print_fields({key: found[key] for key in ("name", "description", "created_at")})
    rows = [
        (
            one["version"],
            one["checkpoint"],
            one["experiment_id"],
            one["trial_id"],
            one["steps_completed"],
            size_text(one["size_bytes"]),
            _metrics(one),
            one["notes"],
        )
        for one in found["versions"]
    ]
    columns = ["version", "checkpoint", "experiment", "trial", "batch", "size", "validation"]
    print_table([*columns, "notes"], rows)


@models.command("register-version")
def register_version(
    name: ModelName,
    uuid: Uuid,
    notes: Annotated[str, typer.Option(help="What is to be known of it.")] = "",
) -> None:
    """Make a checkpoint the next version of a model, and print its number; it is kept from then on.

    Example: zerolab model register-version digits 6f5902ac-237a-4c2d-9d2b-7e7a4e7d7b0f
    """
    from zerolab.cli.connection import connect

    with connect() as client:
        uuid = client.checkpoint(uuid)["uuid"]
        found = client.register_version(name, uuid, notes)
    result(str(next(one["version"] for one in found["versions"] if one["checkpoint"] == uuid)))


@models.command("remove-version")
def remove_version(
    name: ModelName, version: Annotated[int, typer.Argument(help="Its number.", min=1)]
) -> None:
    """Take a version out of the registry; its checkpoint is kept no longer for that."""
    from zerolab.cli.connection import connect

    with connect() as client:
        client.remove_version(name, version)
    say(f"version {version} of model {name} is removed; its checkpoint is still there")


@models.command("remove")
def remove_model(name: ModelName) -> None:
    """Take a model and its versions out of the registry; its checkpoints are not touched."""
    from zerolab.cli.connection import connect

    with connect() as client:
        client.remove_model(name)
    say(f"model {name} is removed; its checkpoints are still there")
