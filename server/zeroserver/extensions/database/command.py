"""Command group ``zerolab db``: backup, restore and check of the server's database."""

from pathlib import Path
from typing import Annotated

import typer

from zerolab.cli.groups import command_group
from zerolab.contract.environment import ENV_DATABASE

__all__ = ["group"]

group = command_group("Back up, restore and check the database.", panel="Server")

_Database = Annotated[
    str,
    typer.Option(
        metavar="URL",
        envvar=ENV_DATABASE,
        show_envvar=False,
        help="Database, such as postgresql://USER@HOST/NAME. Default: ZEROLAB_DATABASE, or the "
        "SQLite file of the data directory. Put a password into the variable or into ~/.pgpass.",
    ),
]


@group.command()
def backup(
    directory: Annotated[
        Path | None,
        typer.Argument(
            help="New directory. Default: a directory below backups/ of the data directory."
        ),
    ] = None,
    database: _Database = "",
) -> None:
    """Write a backup, and print its directory.

    The server may run. A backup contains the database and the submitted model directories, not
    the checkpoints.

    Example: zerolab db backup
    """
    _run(database, "backup", *([str(directory)] if directory else []))


@group.command()
def restore(
    directory: Annotated[Path, typer.Argument(help="Directory of a backup, or a SQLite file.")],
    database: _Database = "",
) -> None:
    """Replace the database with a backup.

    Stop the server first: `zerolab down`. The command backs up the current database before it
    replaces it.

    Example: zerolab db restore ~/.zerolab/backups/zerolab-20261127-013000
    """
    _run(database, "restore", str(directory))


@group.command()
def check(database: _Database = "") -> None:
    """Check the database, and print its problems.

    The server may run. Exit code 1 if there are problems.

    Example: zerolab db check
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
