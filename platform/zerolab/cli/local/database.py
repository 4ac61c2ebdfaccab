"""``zerolab db``: back up, restore and check the server's database."""

from pathlib import Path
from typing import Annotated

import typer

from zerolab.contract.spec import ENV_DATABASE

__all__ = ["group"]

group = typer.Typer(no_args_is_help=True, help="The server's database: backup, restore, check.")

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

    It holds the database and the submitted model directories, not the checkpoints.
    """
    _run(database, "backup", *([str(directory)] if directory else []))


@group.command()
def restore(
    directory: Annotated[Path, typer.Argument(help="Directory of a backup, or a SQLite file.")],
    database: _Database = "",
) -> None:
    """Replace the database by a backup. The server must be stopped: `zerolab down`.

    What was there before is backed up first.
    """
    _run(database, "restore", str(directory))


@group.command()
def check(database: _Database = "") -> None:
    """Read the whole database and print what is wrong. Exit code 1 when something is.

    The server may run.
    """
    _run(database, "check")


def _run(database: str, *words: str) -> None:
    import os
    import subprocess
    import sys

    command = [sys.executable, "-P", "-m", "zeroserver.maintenance", *words]
    # By the environment: everybody on this machine sees the words of a command.
    environment = {**os.environ, ENV_DATABASE: database}
    raise typer.Exit(subprocess.run(command, check=False, env=environment).returncode)
