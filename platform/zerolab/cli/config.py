"""``zerolab config``: files are checked without a server and without torch."""

from pathlib import Path
from typing import Annotated

import typer

from zerolab.cli.output import result

__all__ = ["group"]

group = typer.Typer(
    help="Experiment files and engine files.", no_args_is_help=True, rich_markup_mode=None
)


@group.callback()
def about() -> None:
    """Keep the group a group, with one command or many."""


@group.command()
def check(
    file: Annotated[Path, typer.Argument(help="experiment.yaml or ds_config.json.")],
    world_size: Annotated[
        int | None,
        typer.Option(
            min=1, help="Data-parallel ranks. Default: the experiment's slots_per_trial, or 1."
        ),
    ] = None,
) -> None:
    """Check a file whole and print what it comes to; all problems at once, exit code 2.

    Example: zerolab config check ds_config.json --world-size 4
    """
    from zerolab.config import check_file

    result(check_file(file, world_size).rstrip("\n"))
