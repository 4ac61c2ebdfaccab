"""Groups of CLI commands, with abbreviations and hints for Determined's commands."""

from difflib import get_close_matches
from inspect import isfunction
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from zerolab.registry import Registry

__all__ = ["COMMANDS", "NUMBERS", "Group", "Root", "command_group"]

_NEVER_SUGGESTED = {"logout"}
"""Commands with effects on other users; a typing error must not lead to them."""

_GROUPS = {"e": "experiment", "exp": "experiment", "t": "trial", "c": "checkpoint", "m": "model"}
_GROUPS |= {"a": "agent", "j": "job"}
_GROUPS |= {
    f"{noun}s": noun
    for noun in (
        "experiment", "trial", "task", "checkpoint", "agent", "job", "model", "pool", "quota"
    )
}  # fmt: skip


NUMBERS: dict[str, Any] = {"ignore_unknown_options": True}
"""Settings of a command with a number as argument: -1 is a number out of range, not an option."""


def command_group(text: str, cls: type[TyperGroup] | None = None) -> typer.Typer:
    """Create a group of commands, of the core or of an extension.

    Args:
        text: Its help.
        cls: Its class if it is not :class:`Group`.
    """
    return typer.Typer(
        cls=cls or Group,
        help=text,
        no_args_is_help=True,
        rich_markup_mode=None,  # importing rich would take half of the time limit of --help
        add_completion=False,
    )


def _command(loaded: Any) -> Any:
    if isfunction(loaded):
        app = typer.Typer(rich_markup_mode=None, add_completion=False)
        app.command()(loaded)
        return get_command(app)
    if not isinstance(loaded, typer.Typer):
        raise TypeError(f"must be a function or a typer.Typer, got {loaded!r}")
    return get_command(loaded)


COMMANDS: Registry[Any] = Registry("zerolab.commands", {}, _command)
"""Commands of extensions; ``zerolab NAME`` runs one, also in a group: ``experiment preview``."""


class Group(TyperGroup):
    """Group of commands that hints at the replacement of an unknown command."""

    aliases = {"ls": "list"}  # noqa: RUF012 - a class attribute
    """Aliases of its commands."""

    @property
    def prefix(self) -> str:
        """Beginning of the names of extensions' commands in this group."""
        return f"{self.name} "

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Find a command by its name or an alias, in the core, else in an extension."""
        cmd_name = self.aliases.get(cmd_name, cmd_name)
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            return command
        problem = COMMANDS.problem(self.prefix + cmd_name)
        if problem is not None:
            ctx.fail(problem)
        return COMMANDS.get(self.prefix + cmd_name)

    def list_commands(self, ctx: Any) -> list[str]:
        """List the commands of the core, then those of extensions."""
        prefix, names = self.prefix, sorted(COMMANDS)
        own = (name.removeprefix(prefix) for name in names if name.startswith(prefix))
        extensions = [
            name for name in own if " " not in name and not COMMANDS.problem(prefix + name)
        ]
        return [*super().list_commands(ctx), *extensions]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find a command, or fail with its replacement or a similar name."""
        if args and self.get_command(ctx, args[0]) is None:
            from zerolab.replacements import command_replacement

            command_path, parent = [args[0]], ctx
            while parent.parent is not None:
                command_path.insert(0, parent.command.name)
                parent = parent.parent
            text = command_replacement(*command_path)
            if text is not None:
                ctx.fail(
                    f"No such command {args[0]!r}. What `det {' '.join(command_path)}` did: {text}"
                )
            names = sorted({*self.list_commands(ctx)} - _NEVER_SUGGESTED)
            close = get_close_matches(args[0], names)
            suggestion = f" Did you mean {', '.join(map(repr, close))}?" if close else ""
            ctx.fail(f"No such command {args[0]!r}.{suggestion}")
        return super().resolve_command(ctx, args)


class Root(Group):
    """Root of the command line, with short names of the groups and commands of extensions."""

    aliases = _GROUPS
    prefix = ""
