"""Command group ``zerolab model``."""

from typing import TYPE_CHECKING, Annotated

import typer

from zerolab.cli.checkpoint import Uuid, metric_lines
from zerolab.cli.groups import command_group
from zerolab.cli.output import AsJson, print_fields, print_json, print_message, print_table, result
from zerolab.formatting import size_text

if TYPE_CHECKING:  # commands import the client when they need it
    from zerolab.client.http import Json

__all__ = ["group"]

group = command_group("The registry: checkpoints that are versions of a model, and are kept.")

ModelName = Annotated[str, typer.Argument(metavar="NAME", help="Name of the model.")]


@group.command("create")
def create_model(
    name: ModelName,
    description: Annotated[str, typer.Option(help="Description of the model.")] = "",
) -> None:
    """Add a model to the registry.

    Example: zerolab model create digits --description "reads postcodes"
    """
    from zerolab.cli.connection import connect

    with connect() as client:
        result(str(client.create_model(name, description)["name"]))


@group.command("list")
def list_models(as_json: AsJson = False) -> None:
    """List the models and how many versions they have."""
    from zerolab.cli.connection import connect

    with connect() as client:
        model_list = client.models()
    if as_json:
        print_json(model_list)
        return
    rows = [
        (
            model["name"],
            len(model["versions"]),
            _newest(model),
            model["created_at"],
            model["description"],
        )
        for model in model_list
    ]
    print_table(["name", "versions", "newest", "created", "description"], rows)


def _newest(model: "Json") -> int | str:
    versions = model["versions"]
    return versions[-1]["version"] if versions else ""


@group.command("describe")
def describe_model(name: ModelName, as_json: AsJson = False) -> None:
    """Show a model and its versions."""
    from zerolab.cli.connection import connect

    with connect() as client:
        model = client.model(name)
    if as_json:
        print_json(model)
        return
    print_fields({key: model[key] for key in ("name", "description", "created_at")})
    rows = [
        (
            version["version"],
            version["checkpoint"],
            version["experiment_id"],
            version["trial_id"],
            version["steps_completed"],
            size_text(version["size_bytes"]),
            metric_lines(version),
            version["notes"],
        )
        for version in model["versions"]
    ]
    columns = ["version", "checkpoint", "experiment", "trial", "batch", "size", "validation"]
    print_table([*columns, "notes"], rows)


@group.command("register-version")
def register_version(
    name: ModelName,
    uuid: Uuid,
    notes: Annotated[str, typer.Option(help="Notes.")] = "",
) -> None:
    """Make a checkpoint the next version of a model, and print its number; retention then keeps it.

    Example: zerolab model register-version digits 6f5902ac-237a-4c2d-9d2b-7e7a4e7d7b0f
    """
    from zerolab.cli.connection import connect

    with connect() as client:
        uuid = client.checkpoint(uuid)["uuid"]
        model = client.register_version(name, uuid, notes)
    result(
        str(
            next(
                version["version"] for version in model["versions"] if version["checkpoint"] == uuid
            )
        )
    )


@group.command("remove-version")
def remove_version(
    name: ModelName, version: Annotated[int, typer.Argument(help="Its number.", min=1)]
) -> None:
    """Remove a version from the registry; retention no longer keeps its checkpoint."""
    from zerolab.cli.connection import connect

    with connect() as client:
        client.remove_version(name, version)
    print_message(f"version {version} of model {name} is removed; its checkpoint is still there")


@group.command("remove")
def remove_model(name: ModelName) -> None:
    """Remove a model and its versions from the registry; its checkpoints are not deleted."""
    from zerolab.cli.connection import connect

    with connect() as client:
        client.remove_model(name)
    print_message(f"model {name} is removed; its checkpoints are still there")
