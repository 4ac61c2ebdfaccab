"""Command group ``zerolab db``: backup, restore and check of the server's database."""

from pathlib import Path
from typing import Annotated

import typer

from zerolab.cli.groups import command_group
from zerolab.contract.spec import ENV_DATABASE

__all__ = ["group"]

group = command_group("The server's database: backup, restore, check.")

_Database = Annotated[
    str,
    typer.Option(
        metavar="URL",
        envvar=ENV_DATABASE,
        show_envvar=False,
        help="postgresql://USER@HOST/NAME. Default: ZEROLAB_DATABASE, else the SQLite file of the "
        "data directory. Put a password into the variable or into ~/.pgpass.",
    ),
]


@group.command()
def backup(
    directory: Annotated[
        Path | None,
        typer.Argument(help="Directory to create; one in backups/ of the data directory if none."),
    ] = None,
    database: _Database = "",
) -> None:
    """Write a backup while the server runs; prints its directory.

    It contains the database and the submitted model directories, not the checkpoints.
    """
    _run(database, "backup", *([str(directory)] if directory else []))


@group.command()
def restore(
    directory: Annotated[Path, typer.Argument(help="Directory of a backup, or a SQLite file.")],
    database: _Database = "",
) -> None:
    """Replace the database by a backup. The server must be stopped: `zerolab down`.

    The current database is backed up first.
    """
    _run(database, "restore", str(directory))


@group.command()
def check(database: _Database = "") -> None:
    """Check the complete database and print problems. Exit code 1 if there are any.

    The server may run.
    """
    _run(database, "check")


def _run(database: str, *arguments: str) -> None:
    import os
    import subprocess
    import sys

    command = [sys.executable, "-P", "-m", "zeroserver.extensions.database.maintenance", *arguments]
    # Through the environment: all users of this machine can read a command's arguments.
    environment = {**os.environ, ENV_DATABASE: database}
    raise typer.Exit(subprocess.run(command, check=False, env=environment).returncode)
