"""Command ``zerolab config``, which checks files without a server and without torch."""

from pathlib import Path
from typing import Annotated, Any

import typer

from zerolab.cli.groups import command_group
from zerolab.cli.output import result

__all__ = ["group"]

group = command_group("Experiment files and engine files.")


@group.callback()
def about() -> None:
    """Make typer keep the group with a single command."""


@group.command()
def check(
    file: Annotated[Path, typer.Argument(help="experiment.yaml or ds_config.json.")],
    world_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Ranks in all. Default: the experiment's slots_per_trial, or as many as an engine "
            "file cuts one model over.",
        ),
    ] = None,
    hyperparameters: Annotated[
        Path | None,
        typer.Option(
            help="YAML or JSON file of hyperparameters or training arguments, which fill an engine "
            'file\'s "auto"; of an experiment file its block `hyperparameters`.'
        ),
    ] = None,
    torch: Annotated[
        str | None,
        typer.Option(
            metavar="VERSION",
            help="Version of torch on the machine that trains, e.g. 2.7.1: report keys that need a "
            "newer one.",
        ),
    ] = None,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="Take nothing in an engine file for something else: comments, old names and what "
            "Hugging Face writes are mistakes.",
        ),
    ] = False,
) -> None:
    """Check a file and print the resolved configuration, or all problems with exit code 2.

    Example: zerolab config check ds_config.json --world-size 4
    """
    from zerolab.config.validation import check_file

    auto_values = None if hyperparameters is None else _read_hyperparameters(hyperparameters)
    result(check_file(file, world_size, auto_values, strict=strict, torch=torch).rstrip("\n"))


def _read_hyperparameters(file: Path) -> dict[str, Any]:
    """Return the values of a file, or of an experiment file's block ``hyperparameters``."""
    from zerolab.config.files import read_json, read_yaml

    content = read_json(file) if file.suffix.lower() == ".json" else read_yaml(file)
    inner = content.get("hyperparameters")
    return inner if isinstance(inner, dict) else content
