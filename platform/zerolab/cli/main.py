"""Root of the command line: groups, global options, errors as exit codes."""

import os
import re
import sys
from typing import Annotated

import typer

from zerolab.cli import agent, checkpoint, config, experiment, server, trial
from zerolab.cli.connection import list_command
from zerolab.cli.groups import Root, in_panel, single_command
from zerolab.cli.local import commands
from zerolab.cli.local.init import init
from zerolab.cli.local.run import run
from zerolab.cli.submit import submit
from zerolab.contract.environment import ENV_MASTER, ENV_TOKEN
from zerolab.errors import ZerolabError

__all__ = ["app", "main"]

app = typer.Typer(
    cls=Root,
    name="zerolab",
    help="Train deep-learning models with ZeRO, on a laptop or a cluster.",
    epilog="Begin with: zerolab init my-project && zerolab run my-project\n\n"
    "Short forms: e for experiment, t for trial, ls for list.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # importing rich would take half of the time limit of --help
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(requested: bool) -> None:
    if requested:
        server.version()
        raise typer.Exit


@app.callback()
def options(
    master: Annotated[
        str | None,
        typer.Option(
            help="Address of the server. Default: the server of this machine.",
            metavar="URL",
            envvar=ENV_MASTER,
        ),
    ] = None,
    _version: Annotated[
        bool,
        typer.Option(
            "--version", "-V", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Declare the global options."""
    if master:
        os.environ[ENV_MASTER] = master


_up = single_command()
_up.command(
    rich_help_panel="Server",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)(commands.up)

Root.core = {
    "init": in_panel("Train")(init),
    "run": in_panel("Train")(run),
    "submit": in_panel("Train")(submit),
    "ps": in_panel("Results")(experiment.ps),
    "logs": in_panel("Results")(experiment.all_logs),
    "up": _up,
    "down": in_panel("Server")(commands.down),
    "status": in_panel("Server")(server.status),
    "open": in_panel("Server")(server.open_page),
    "logout": in_panel("Server")(server.logout),
    "version": in_panel("Server")(server.version),
    "experiment": experiment.group,
    "trial": trial.group,
    "checkpoint": checkpoint.group,
    "agent": agent.group,
    "config": config.group,
    "token": commands.token,
}


def main() -> None:
    """Run a command; a user error prints one message and exits with 2."""
    if ENV_TOKEN in os.environ:
        from zerolab.parent import forbid_inspection

        forbid_inspection()
    try:
        app()
    except ZerolabError as error:
        missing = re.match(r"there is no (experiment|trial|checkpoint) \S+$", str(error))
        hint = f"; {list_command(missing[1])}" if missing else ""
        print(f"zerolab: {error}{hint}", file=sys.stderr)  # noqa: T201 - the one message
        sys.exit(2)
    except BrokenPipeError:  # the reader, e.g. `head`, has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:
        print(f"zerolab: {error}", file=sys.stderr)  # noqa: T201 - the one message
        sys.exit(2)


if __name__ == "__main__":
    main()
