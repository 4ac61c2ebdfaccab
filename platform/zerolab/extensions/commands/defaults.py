"""Command group ``zerolab defaults``."""

from pathlib import Path
from typing import Annotated, Any

import typer

from zerolab.cli.connection import complete_project
from zerolab.cli.groups import command_group
from zerolab.cli.output import AsJson, print_json, print_message, result

__all__ = ["group"]

group = command_group("Set defaults and limits of new experiments.", panel="Queue and machines")

OfProject = Annotated[
    str | None,
    typer.Option(
        "--project",
        metavar="NAME",
        help="Name of the project. Default: the installation.",
        autocompletion=complete_project,
    ),
]


@group.command("set")
def set_defaults(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="YAML file with keys of experiment files.")
    ],
    project: OfProject = None,
    as_json: AsJson = False,
) -> None:
    """Set the defaults and limits of new experiments; only for administrators.

    The file replaces the previous one. It has keys of experiment files, and `limits`:
    `slots_per_trial`, `max_slots`, `priority`, `storage_gb`.

    Example: zerolab defaults set defaults.yaml
    zerolab defaults set vision.yaml --project vision
    """
    from zerolab.cli.connection import connect
    from zerolab.config.files import read_yaml

    content = dict(read_yaml(file))
    limits = content.pop("limits", None) or {}
    with connect() as client:
        defaults = client.put_defaults(content, limits, project)
    if as_json:
        print_json(defaults)
        return
    keys = ", ".join([*content, *(f"limits.{key}" for key in limits)])
    result(f"{_scope(project)} has defaults: {keys or 'none'}")


@group.command("show")
def show_defaults(project: OfProject = None, as_json: AsJson = False) -> None:
    """Print the defaults and limits as YAML; secrets are masked.

    Example: zerolab defaults show
    """
    from zerolab.cli.connection import connect

    with connect() as client:
        defaults = client.defaults(project)
    if as_json:
        print_json(defaults)
        return
    content: dict[str, Any] = dict(defaults["config"])
    limits = {key: value for key, value in defaults["limits"].items() if value is not None}
    if limits:
        content["limits"] = limits
    if not content:
        print_message(f"{_scope(project)} has no defaults; `zerolab defaults set FILE` sets them")
        return
    import yaml

    result(yaml.safe_dump(content, sort_keys=False, allow_unicode=True).rstrip("\n"))


@group.command("clear")
def clear_defaults(project: OfProject = None, as_json: AsJson = False) -> None:
    """Remove the defaults and limits; existing experiments keep their settings.

    Example: zerolab defaults clear --project vision
    """
    from zerolab.cli.connection import connect

    with connect() as client:
        client.delete_defaults(project)
    if as_json:
        print_json({"project": project, "cleared": True})
    else:
        result(f"{_scope(project)} has no defaults")


def _scope(project: str | None) -> str:
    return "the installation" if project is None else f"project {project}"
