"""Command group ``zerolab artifact``: media of trials."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zerolab.cli.connection import TrialId
from zerolab.cli.groups import command_group
from zerolab.cli.output import (
    AsJson,
    print_done,
    print_json,
    print_message,
    print_table,
    result,
)
from zerolab.formatting import size_text

if TYPE_CHECKING:  # commands import the client when they need it
    from zerolab.client.http import Client, Json

__all__ = ["group"]

group = command_group("List, download and delete media of trials.", panel="Results")

Name = Annotated[
    str | None, typer.Option("--name", metavar="NAME", help="Select only media of this name.")
]
Step = Annotated[
    int | None, typer.Option("--step", metavar="N", min=0, help="Select only media of this batch.")
]


@group.command("list")
def list_artifacts(
    trial_id: TrialId, name: Name = None, step: Step = None, as_json: AsJson = False
) -> None:
    """List the names of a trial's media, or with --name or --step the media.

    Example: zerolab artifact list 3
    """
    from zerolab.cli.connection import connect

    with connect() as client:
        if name is None and step is None:
            names = client.media_names(trial_id)
            if as_json:
                print_json(names)
                return
            rows = [
                (
                    entry["name"],
                    entry["type"],
                    entry["count"],
                    f"{entry['first_step']} to {entry['last_step']}",
                    size_text(entry["size"]),
                )
                for entry in names
            ]
            print_table(["name", "type", "count", "batches", "size"], rows)
            return
        media = client.media(trial_id, name=name, step=step)
    if as_json:
        print_json(media)
        return
    rows = [
        (item["name"], item["type"], item["step"], item["file_name"], size_text(item["size"]))
        for item in media
    ]
    print_table(["name", "type", "batch", "file", "size"], rows)


@group.command("download")
def download_artifacts(
    trial_id: TrialId,
    name: Name = None,
    step: Step = None,
    directory: Annotated[
        Path,
        typer.Option("--directory", metavar="DIR", help="Target directory; created if missing."),
    ] = Path(),
    as_json: AsJson = False,
) -> None:
    """Download media of a trial into a directory, and print the files.

    Histograms are written as JSON. Existing files are overwritten.

    Example: zerolab artifact download 3 --name misclassified --directory images
    """
    from zerolab.cli.connection import connect

    files = []
    with connect() as client:
        media = client.media(trial_id, name=name, step=step)
        for item, file in zip(media, _file_names(media), strict=True):
            path = directory / file
            _download(client, trial_id, item, path)
            files.append(str(path))
            if not as_json:
                result(str(path))
    if as_json:
        print_json({"files": files})
    elif not files:
        print_message(f"trial {trial_id} has no such media; `zerolab artifact list {trial_id}`")


def _download(client: "Client", trial_id: int, item: "Json", path: Path) -> None:
    import msgspec

    path.parent.mkdir(parents=True, exist_ok=True)
    if not item["digest"]:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(item["metadata"])))
        return
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as file:
        for piece in client.media_file(trial_id, item["digest"]):
            file.write(piece)
    part.replace(path)


def _file_names(media: "list[Json]") -> list[str]:
    """Return a file name for each medium; a repeated one gets its batch as a folder."""
    from zerolab.contract.names import file_name_problem

    files: list[str] = []
    for item in media:
        file = str(item["file_name"]) + ("" if item["digest"] else ".json")
        if file_name_problem(file) or "/" in file:  # the server is not trusted with paths
            file = f"{item['step']}-{item['position']}"
        if file in files:
            file = f"{item['step']}/{file}"
        files.append(file)
    return files


@group.command("delete")
def delete_artifacts(
    trial_id: TrialId,
    name: Name = None,
    step: Step = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Delete all media of the trial.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Delete media of an ended trial.

    They are deleted with the trial, too.

    Example: zerolab artifact delete 3 --name misclassified
    """
    from zerolab.cli.connection import connect
    from zerolab.errors import ConfigError

    if everything == (name is not None or step is not None):
        problem = "must be selected by --name or --step, or be --all"
        raise ConfigError("zerolab artifact delete", [f"media: {problem}"])
    with connect() as client:
        deleted = client.delete_media(trial_id, name=name, step=step)
    message = f"{deleted['count']} media of trial {trial_id} are deleted"
    print_done(deleted, f"{message}, {size_text(deleted['size'])}", as_json=as_json)
