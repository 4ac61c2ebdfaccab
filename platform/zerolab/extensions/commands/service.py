"""Command group ``zerolab service``: units of systemd for the server and an agent."""

import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from zerolab.cli.groups import command_group
from zerolab.cli.output import AsJson, print_json, print_message, result

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from zerolab.paths import Home

__all__ = ["group"]

group = command_group("Start the server or an agent with this machine.", panel="Server")

_UNIT = """\
[Unit]
Description=Zerolab {name}

[Service]
Environment={home}
EnvironmentFile=-{variables}
ExecStart={command}
Restart=on-failure
RestartSec=5
KillMode=mixed
TimeoutStopSec=90

[Install]
WantedBy=default.target
"""
# mixed: the agent stops its ranks itself, so that they can save checkpoints.
_VARIABLES = "service.env"
_FILE_OPTIONS = ("--token-file", "--resource-manager")


class Part(StrEnum):
    """Process that a unit starts."""

    SERVER = "server"
    AGENT = "agent"


@group.callback()
def service() -> None:
    """Start the server or an agent with this machine."""


@group.command(
    "install", context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)
def install(
    context: typer.Context,
    part: Annotated[Part, typer.Argument(metavar="PART", help="server or agent.")],
    print_only: Annotated[
        bool, typer.Option("--print", help="Print the unit, and write nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write a unit of systemd for your user, and print its path.

    Other options are passed to `python -m zeroserver` or `zerolab agent start`.

    Example: zerolab service install server --port 8080
    zerolab service install agent --slots 2 --print
    """
    from zerolab.files import write_atomic
    from zerolab.paths import Home

    home = Home.default().create()
    options = context.args
    command = _server(home, options) if part == Part.SERVER else _agent(options)
    unit = _UNIT.format(
        name=part.value,
        home=_quote(f"ZEROLAB_HOME={home.path}", "ZEROLAB_HOME"),
        variables=_file_name(home.path / _VARIABLES),
        command=" ".join(_quote(word, "options", of_command=True) for word in command),
    )
    file = _directory() / f"zerolab-{part.value}.service"
    if not print_only:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, unit.encode(), mode=0o644)
    if as_json:
        print_json({"path": None if print_only else str(file), "unit": unit})
        return
    if print_only:
        sys.stdout.write(unit)
        return
    result(str(file))
    print_message(
        f"start it now and at each login: systemctl --user daemon-reload && systemctl --user "
        f"enable --now {file.stem}; also without a login: loginctl enable-linger"
    )


def _server(home: "Home", options: "Sequence[str]") -> list[str]:
    """Return the command of the server.

    Raises:
        ConfigError: If an option is invalid.
    """
    from zerolab.cli.local.background import checked_server_options
    from zerolab.contract.spec import ENV_DATABASE
    from zerolab.errors import ConfigError

    checked, variables = checked_server_options(home, options)
    if variables:
        file = home.path / _VARIABLES
        problem = f"--database, {ENV_DATABASE}: must not be in a unit, which others can read; "
        problem += f"put {ENV_DATABASE}=... into {file} (mode 0600), and leave it out here"
        raise ConfigError("service", [problem])
    return [sys.executable, "-P", "-m", "zeroserver", *checked]


def _agent(options: "Sequence[str]") -> list[str]:
    """Return the command of an agent.

    Raises:
        ConfigError: If it reads the token from standard input.
        UsageError: If an option is invalid.
    """
    from typer.main import get_command

    from zerolab.cli.agent import start
    from zerolab.cli.local.background import with_absolute_paths
    from zerolab.errors import ConfigError

    command = typer.Typer()
    command.command()(start)
    parsed = get_command(command).make_context("zerolab agent start", list(options))
    if parsed.params["token_file"] == "-":  # noqa: S105 - standard input
        problem = "--token-file: must be a file, got standard input, which a service does not have"
        raise ConfigError("service", [problem])
    if parsed.params["token"] is not None:
        raise ConfigError("service", ["--token: not accepted; use --token-file FILE"])
    paths = with_absolute_paths(options, _FILE_OPTIONS)
    return [sys.executable, "-P", "-m", "zerolab", "agent", "start", *paths]


def _directory() -> "Path":
    """Return the directory of the user's units."""
    import os
    from pathlib import Path

    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "systemd" / "user"


def _quote(text: str, key: str, *, of_command: bool = False) -> str:
    """Quote a word for a unit.

    Raises:
        ConfigError: If it has control characters.
    """
    from zerolab.contract.names import text_problem
    from zerolab.errors import ConfigError

    if problem := text_problem(text):
        raise ConfigError("service", [f"{key}: {problem}"])
    text = text.replace("%", "%%")  # of systemd's specifiers
    if of_command:
        text = text.replace("$", "$$")  # of variables
    if text and not set(text) & set(" \t\"'\\;#"):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _file_name(path: "Path") -> str:
    """Return a path for EnvironmentFile, which takes the rest of the line literally."""
    return str(path).replace("%", "%%")
