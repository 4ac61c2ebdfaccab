"""Command group ``zerolab deepspeed``: installs a command ``deepspeed``."""

import os
import sys
from pathlib import Path
from typing import Any

from zerolab.cli.groups import Group, command_group
from zerolab.cli.output import AsJson, print_json, print_message, result

__all__ = ["group"]

_MARK = "# Written by `zerolab deepspeed install-command`"
_LONGEST_SHEBANG = 120
_EXPLANATION = (
    "`zerolab deepspeed` does not start scripts: use `zerolab launch --as-deepspeed train.py ...`, "
    "which accepts the options of DeepSpeed's launcher; `zerolab deepspeed install-command` "
    "installs it as the command `deepspeed`"
)


class _DeepspeedGroup(Group):
    """Command group with an explanation for use as DeepSpeed's launcher."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Reject arguments that are neither a command nor an option for help."""
        if args and args[0] not in {*self.commands, "--help", "-h"}:
            ctx.fail(_EXPLANATION)
        return super().parse_args(ctx, args)


group = command_group(
    "Install a command `deepspeed` for scripts that call it.", _DeepspeedGroup, panel="Train"
)


@group.command("install-command")
def install_command(as_json: AsJson = False) -> None:
    """Install a command `deepspeed`, and print its path.

    It runs `zerolab launch --as-deepspeed`, so that `import deepspeed` in a script imports
    Zerolab's engine. It does not replace an installed DeepSpeed.

    Example: zerolab deepspeed install-command
    """
    from zerolab.errors import ConfigError, ConflictError

    file = _target_file()
    other = _other_deepspeed(file)
    if other is not None:
        msg = f"there is a deepspeed already: {other}"
        raise ConflictError(f"{msg}; uninstall it first, or use `zerolab launch --as-deepspeed`")
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o755), "w") as new:
            new.write(_script())
        temporary.replace(file)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        problem = f"{file}: cannot be written ({error.strerror or error})"
        raise ConfigError("deepspeed", [f"{problem}; use a virtual environment of yours"]) from None
    if as_json:
        print_json({"path": str(file)})
    else:
        result(str(file))
    if str(file.parent) not in os.environ.get("PATH", "").split(os.pathsep):
        print_message(f"{file.parent} is not in PATH: add it, or call the file by its path")


@group.command("uninstall-command")
def uninstall_command() -> None:
    """Delete the command that `install-command` wrote.

    Example: zerolab deepspeed uninstall-command
    """
    from zerolab.errors import ConflictError, NotFoundError

    file = _target_file()
    if not os.path.lexists(file):
        raise NotFoundError(f"there is no {file}: `zerolab deepspeed install-command` installs it")
    if not _is_installed_by_us(file):
        raise ConflictError(f"{file} was not installed by zerolab; it is not deleted")
    file.unlink()
    print_message(f"deleted {file}")


def _target_file() -> Path:
    return Path(sys.executable).parent / "deepspeed"


def _is_installed_by_us(file: Path) -> bool:
    try:
        with file.open("rb") as content:
            return _MARK.encode() in content.read(2000)
    except OSError:
        return False


def _other_deepspeed(file: Path) -> str | None:
    """Return the path of a real DeepSpeed command, or None."""
    import shutil
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"the package deepspeed {version('deepspeed')} of {sys.executable}"
    except PackageNotFoundError:
        pass
    if os.path.lexists(file) and not _is_installed_by_us(file):
        return str(file)
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        program = shutil.which("deepspeed", path=folder) if folder else None
        if program is not None and not _is_installed_by_us(Path(program)):
            return program
    return None


def _script() -> str:
    """Return the program; a shell starts it if the shebang would be too long."""
    head = f"#!{sys.executable}\n"
    if len(sys.executable) > _LONGEST_SHEBANG or any(char.isspace() for char in sys.executable):
        import shlex

        head = f"#!/bin/sh\n'''exec' {shlex.quote(sys.executable)} \"$0\" \"$@\"\n' '''\n"
    return f"""{head}{_MARK}; `zerolab deepspeed uninstall-command` removes it.
import sys

from zerolab.cli.main import main

sys.argv[:1] = ["zerolab", "launch", "--as-deepspeed"]
main()
"""
