"""Command group ``zerolab model``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zerolab.cli.checkpoint import Uuid, metric_lines
from zerolab.cli.connection import complete_from_server, complete_project
from zerolab.cli.groups import command_group
from zerolab.cli.output import (
    AsJson,
    print_done,
    print_fields,
    print_json,
    print_message,
    print_table,
    result,
)
from zerolab.errors import ConfigError
from zerolab.formatting import size_text

if TYPE_CHECKING:  # commands import the client when they need it
    from collections.abc import Iterable

    from zerolab.client.http import Client, Json

__all__ = ["group"]

group = command_group("Register checkpoints as versions of a model.", panel="Results")


def _names(client: "Client", _context: typer.Context) -> "Iterable[tuple[object, str]]":
    yield from ((model["name"], model["description"]) for model in client.models())


ModelName = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="Name of the model.",
        autocompletion=complete_from_server(_names),
    ),
]


@group.command("create")
def create_model(
    name: ModelName,
    description: Annotated[str, typer.Option(help="Description of the model.")] = "",
    project: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Name of its project. Default: `default`.",
            autocompletion=complete_project,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Create a model, and print its name.

    Example: zerolab model create digits --description "reads postcodes"
    """
    from zerolab.cli.connection import connect

    with connect() as client:
        model = client.create_model(name, description, project)
    if as_json:
        print_json(model)
    else:
        result(str(model["name"]))


@group.command("list")
def list_models(as_json: AsJson = False) -> None:
    """List the models and their number of versions.

    Example: zerolab model list
    """
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
    """Show a model and its versions.

    Example: zerolab model describe digits
    """
    from zerolab.cli.connection import connect

    with connect() as client:
        model = client.model(name)
    if as_json:
        print_json(model)
        return
    print_fields({key: model[key] for key in ("name", "owner", "description", "created_at")})
    rows = [
        (
            version["version"],
            ", ".join(version["aliases"]),
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
    columns = ["version", "aliases", "checkpoint", "experiment", "trial", "batch", "size"]
    print_table([*columns, "validation", "notes"], rows)


@group.command("register-version")
def register_version(
    name: ModelName,
    uuid: Uuid,
    notes: Annotated[str, typer.Option(help="Notes about this version.")] = "",
    as_json: AsJson = False,
) -> None:
    """Register a checkpoint as a version, and print its number.

    Retention does not delete a registered checkpoint.

    Example: zerolab model register-version digits 6f59
    """
    from zerolab.cli.connection import connect

    with connect() as client:
        uuid = client.checkpoint(uuid)["uuid"]
        model = client.register_version(name, uuid, notes)
    version = next(item for item in model["versions"] if item["checkpoint"] == uuid)
    if as_json:
        print_json(version)
    else:
        result(str(version["version"]))


@group.command("alias")
def set_alias(
    name: ModelName,
    alias: Annotated[str, typer.Argument(help="Alias, such as production.")],
    version: Annotated[int | None, typer.Argument(help="Number of the version.", min=1)] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the alias.")] = False,
    as_json: AsJson = False,
) -> None:
    """Assign an alias to a version of a model, or remove the alias.

    An alias names one version: assigning it again moves it.

    Example: zerolab model alias digits production 2
    """
    from zerolab.cli.connection import connect

    if remove != (version is None):
        raise ConfigError("model alias", ["give either a version or --remove"])
    with connect() as client:
        if version is None:
            client.remove_alias(name, alias)
            message = f"alias {alias} of model {name} is removed; its version still exists"
        else:
            client.put_alias(name, alias, version)
            message = f"{alias} is now version {version} of model {name}"
    changed = {"name": name, "alias": alias, "version": version}
    print_done(changed, message, as_json=as_json)


@group.command("download")
def download(
    name: ModelName,
    directory: Annotated[Path, typer.Argument(help="New or empty directory.")],
    version: Annotated[
        str | None,
        typer.Option(metavar="VERSION", help="Number or alias of the version. Default: newest."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Download the checkpoint of a version, and print its directory.

    To resume an interrupted download, repeat the command with the same directory.

    Example: zerolab model download digits best/ --version production
    """
    from zerolab.cli.connection import connect
    from zerolab.client.checkpoints import download_checkpoint

    chosen = int(version) if version is not None and version.isdecimal() else version
    with connect() as client:
        registered = client.model(name).version(chosen)
        size = download_checkpoint(client, registered.checkpoint, directory)
    if as_json:
        print_json({"version": registered.version, "directory": str(directory), "size_bytes": size})
        return
    print_message(f"downloaded {size_text(size)} of version {registered.version}")
    result(str(directory))


@group.command("delete-version")
def delete_version(
    name: ModelName,
    version: Annotated[int, typer.Argument(help="Number of the version.", min=1)],
    as_json: AsJson = False,
) -> None:
    """Delete a version of a model.

    Its checkpoint is kept only as long as the retention of its experiment says.

    Example: zerolab model delete-version digits 2
    """
    from zerolab.cli.connection import connect

    with connect() as client:
        client.remove_version(name, version)
    deleted = {"name": name, "version": version, "deleted": True}
    message = f"version {version} of model {name} is deleted; its checkpoint still exists"
    print_done(deleted, message, as_json=as_json)


@group.command("delete")
def delete_model(name: ModelName, as_json: AsJson = False) -> None:
    """Delete a model and its versions, but not their checkpoints.

    Example: zerolab model delete digits
    """
    from zerolab.cli.connection import connect

    with connect() as client:
        client.remove_model(name)
    message = f"model {name} is deleted; its checkpoints still exist"
    print_done({"name": name, "deleted": True}, message, as_json=as_json)
