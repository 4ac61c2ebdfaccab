"""Groups of CLI commands, with abbreviations and hints for Determined's commands."""

from difflib import get_close_matches
from typing import Any

from typer.core import TyperGroup

__all__ = ["Group", "Root"]

_NEVER_SUGGESTED = {"logout"}
"""Commands that take something away from others, which a slip must not lead to."""

_GROUPS = {"e": "experiment", "exp": "experiment", "t": "trial", "c": "checkpoint", "m": "model"}
_GROUPS |= {"a": "agent", "j": "job"}
_GROUPS |= {
    f"{noun}s": noun
    for noun in (
        "experiment", "trial", "task", "checkpoint", "agent", "job", "model", "pool", "quota"
    )
}  # fmt: skip


class Group(TyperGroup):
    """Group of commands that hints at the replacement of an unknown command."""

    aliases = {"ls": "list"}  # noqa: RUF012 - of the class
    """Other words for its commands."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Find a command by its name or by another word for it."""
        return super().get_command(ctx, self.aliases.get(cmd_name, cmd_name))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find a command, or fail with its replacement or a similar name."""
        if args and self.get_command(ctx, args[0]) is None:
            from zerolab.determined import command_replacement

            words, parent = [args[0]], ctx
            while parent.parent is not None:
                words.insert(0, parent.command.name)
                parent = parent.parent
            text = command_replacement(*words)
            if text is not None:
                ctx.fail(f"No such command {args[0]!r}. What `det {' '.join(words)}` did: {text}")
            close = get_close_matches(args[0], sorted({*self.commands} - _NEVER_SUGGESTED))
            meant = f" Did you mean {', '.join(map(repr, close))}?" if close else ""
            ctx.fail(f"No such command {args[0]!r}.{meant}")
        return super().resolve_command(ctx, args)


class Root(Group):
    """The root of the command: plurals of its groups, and short words, mean the group."""

    aliases = _GROUPS
