"""Commands and groups of the CLI: help pages, abbreviations, hints for unknown commands."""

import re
from collections.abc import Callable
from difflib import get_close_matches
from functools import cache
from inspect import cleandoc, isfunction
from typing import Any, ClassVar, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from zerolab.registry import Registry

__all__ = [
    "COMMANDS",
    "NUMBERS",
    "Command",
    "Group",
    "Root",
    "command_group",
    "in_panel",
    "single_command",
]

F = TypeVar("F", bound=Callable[..., Any])

_NEVER_SUGGESTED = {"logout", "down", "delete", "kill", "gc", "restore", "deactivate", "revoke"}
"""Commands that stop or delete something; a typing error must not lead to them."""

_GROUPS = {"e": "experiment", "exp": "experiment", "t": "trial", "c": "checkpoint", "m": "model"}
_GROUPS |= {"a": "agent", "j": "job"}
_GROUPS |= {
    f"{noun}s": noun
    for noun in (
        "experiment", "trial", "task", "checkpoint", "agent", "job", "model", "pool", "quota",
        "user", "token",
    )
}  # fmt: skip
_GROUPS |= {"queue": "job", "log": "logs"}

_OTHER_WORDS = {
    "browse": "zerolab open",
    "create": "zerolab submit FILE",
    "list": "zerolab experiment list",
    "login": "zerolab open",
    "ls": "zerolab experiment list",
    "new": "zerolab init",
    "restart": "zerolab experiment continue ID",
    "resume": "zerolab experiment activate ID",
    "server": "zerolab up",
    "show": "zerolab experiment describe ID",
    "start": "zerolab up",
    "stop": "zerolab experiment cancel ID",
    "train": "zerolab run FILE",
    "ui": "zerolab open",
    "web": "zerolab open",
}
"""Words that users try as a command, with the command that they need."""

NUMBERS: dict[str, Any] = {"ignore_unknown_options": True}
"""Settings of a command with a number as argument: -1 is a number out of range, not an option."""

_METAVARS = {"int": "N", "int range": "N", "float": "NUMBER", "float range": "NUMBER"}
_METAVARS |= {"str": "TEXT", "list[str]": "TEXT", "list[int]": "N", "path": "PATH"}
_LIMITS = {
    r"\bx>=(\S+?)(?=[;\]])": r"at least \g<1>",
    r"(\S+)<=x<=(\S+?)(?=[;\]])": r"\g<1> to \g<2>",
}
"""typer's notation of a range, and words."""


def _with_metavar(record: tuple[str, str]) -> tuple[str, str]:
    """Replace typer's types in a row of the help, such as ``<int>``."""
    name, text = record
    name = re.sub(r"<([^<>]+)>", lambda match: _METAVARS.get(match[1], match[1]), name)
    for pattern, words in _LIMITS.items():
        text = re.sub(pattern, words, text)
    return name, text


def _split_help(help_text: str | None) -> tuple[str, list[str]]:
    """Return the text of a command's help, and its examples."""
    text, _, rest = cleandoc(help_text or "").partition("Example:")
    examples: list[str] = []
    for line in filter(None, map(str.strip, rest.splitlines())):
        if not examples or re.match(r"zerolab |\w+=\$\(", line):
            examples.append(line)
        else:
            examples[-1] += f" {line}"
    return text.strip(), examples


def _summary(help_text: str | None) -> str:
    """Return the first sentence of a command's help."""
    first = " ".join(_split_help(help_text)[0].split("\n\n")[0].split())
    return re.split(r"(?<=[^.])\.(?:\s|$)", first)[0]


def _argument_name(parameter: Any) -> str:
    return str(parameter.metavar or parameter.name.upper())


class Command(TyperCommand):
    """Command with standard metavars in its help and errors, and examples at its end."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments; an error names them as the help does."""
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            if error.param is not None and error.param.param_type_name == "argument":
                error.param_hint = _argument_name(error.param)
            problems = getattr(error.__cause__, "errors", None)  # pydantic checks types of options
            if problems is not None:
                from zerolab.schema.section import requirement

                error.message = requirement(problems()[0])
            raise

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the arguments in capitals, optional ones in brackets."""
        pieces = super().collect_usage_pieces(ctx)
        return [re.sub(r"[{}]", "", piece).upper() for piece in pieces]

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """Write the help without the examples."""
        text = _split_help(self.help)[0]
        if text:
            formatter.write_paragraph()
            with formatter.indentation():
                formatter.write_text(text)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and the options."""
        rows: dict[str, list[tuple[str, str]]] = {"argument": [], "option": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            if parameter.param_type_name == "argument":
                name = _argument_name(parameter)
                record = name + "..." * (parameter.nargs != 1 and "." not in name), record[1]
            rows[parameter.param_type_name].append(_with_metavar(record))
        for kind, records in rows.items():
            if records:
                with formatter.section(f"{kind.capitalize()}s"):
                    formatter.write_dl(records)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples, each on one line that can be copied."""
        examples = _split_help(self.help)[1]
        if examples:
            with formatter.section("Examples" if len(examples) > 1 else "Example"):
                for example in examples:
                    formatter.write(f"{'':{formatter.current_indent}}{example}\n")


class _App(typer.Typer):
    """Typer whose commands are of the class :class:`Command`."""

    def command(self, *args: Any, **settings: Any) -> Any:
        """Register a command."""
        return super().command(*args, **{"cls": Command, **settings})


def command_group(
    text: str, cls: type[TyperGroup] | None = None, *, panel: str | None = None
) -> typer.Typer:
    """Create a group of commands, of the core or of an extension.

    Args:
        text: Its help.
        cls: Its class if it is not :class:`Group`.
        panel: Heading under which ``zerolab --help`` lists it.
    """
    app = _App(
        cls=cls or Group,
        help=text,
        no_args_is_help=True,
        rich_markup_mode=None,  # importing rich would take half of the time limit of --help
        add_completion=False,
    )
    app.info.rich_help_panel = panel  # typer would apply an argument to the group's commands
    return app


def single_command() -> typer.Typer:
    """Create an app for one command of an extension that needs separate settings."""
    return _App(rich_markup_mode=None, add_completion=False)


def in_panel(title: str) -> Callable[[F], F]:
    """Return a decorator that sets the heading under which the help lists a command."""

    def decorate(function: F) -> F:
        function.panel = title  # type: ignore[attr-defined]
        return function

    return decorate


def _as_app(loaded: Any) -> typer.Typer:
    """Return the app of a function, or an app unchanged."""
    if isfunction(loaded):
        app = single_command()
        app.command(rich_help_panel=getattr(loaded, "panel", None))(loaded)
        return app
    if not isinstance(loaded, typer.Typer):
        raise TypeError(f"must be a function or a typer.Typer, got {loaded!r}")
    return loaded


@cache
def _command(loaded: Any, name: str) -> Any:
    """Return a command, with the parameters of all commands of a group: this takes time."""
    command = get_command(_as_app(loaded))
    command.name = name
    return command


def _source_of(app: typer.Typer, name: str) -> Any:
    """Return an object with the help, heading and visibility of an app."""
    commands = app.registered_commands
    if len(commands) == 1 and not (app.registered_callback or app.registered_groups):
        return commands[0]
    return app.info if isinstance(app.info.help, str) else _command(app, name)


COMMANDS: Registry[typer.Typer] = Registry("zerolab.commands", {}, _as_app)
"""Commands of extensions; ``zerolab NAME`` runs one, also in a group: ``experiment preview``."""


class Group(TyperGroup):
    """Group of commands that hints at the replacement of an unknown command."""

    aliases = {  # noqa: RUF012 - a class attribute
        "edit": "change", "get": "describe", "log": "logs", "ls": "list", "remove": "delete",
        "remove-version": "delete-version", "resume": "activate", "rm": "delete",
        "show": "describe", "stop": "cancel", "update": "change",
    }  # fmt: skip
    """Aliases of its commands, where it has no command of that name."""

    @property
    def prefix(self) -> str:
        """Beginning of the names of extensions' commands in this group."""
        return f"{self.name} "

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Find a command by its name or an alias, in the core, else in an extension."""
        command = self._find(ctx, cmd_name)
        if command is None and cmd_name in self.aliases:
            command = self._find(ctx, self.aliases[cmd_name])
        return command

    def _find(self, ctx: Any, name: str) -> Any:
        command = super().get_command(ctx, name)
        if command is not None:
            return command
        problem = COMMANDS.problem(self.prefix + name)
        if problem is not None:
            ctx.fail(problem)
        app = COMMANDS.get(self.prefix + name)
        return None if app is None else _command(app, name)

    def list_commands(self, ctx: Any) -> list[str]:
        """List the commands of the core, then those of extensions."""
        prefix, names = self.prefix, sorted(COMMANDS.keys())
        own = (name.removeprefix(prefix) for name in names if name.startswith(prefix))
        extensions = [
            name for name in own if " " not in name and not COMMANDS.problem(prefix + name)
        ]
        return [*super().list_commands(ctx), *extensions]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the commands by theme, then the options."""
        self.format_commands(ctx, formatter)
        records = [parameter.get_help_record(ctx) for parameter in self.get_params(ctx)]
        with formatter.section("Options"):
            formatter.write_dl([_with_metavar(record) for record in records if record])

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands by theme, with the first sentence of the help of each."""
        panels: dict[str, list[tuple[str, str]]] = {}
        commands = [(name, self._help_source(name)) for name in self.list_commands(ctx)]
        width = max((len(name) for name, _ in commands), default=0)
        for name, source in commands:
            if not source.hidden:
                title = source.rich_help_panel
                title = title if isinstance(title, str) else "Commands"
                summary = _summary(source.help or getattr(source.callback, "__doc__", None))
                panels.setdefault(title, []).append((f"{name:<{width}}", summary))
        for title, rows in panels.items():
            with formatter.section(title):
                formatter.write_dl(rows)

    def _help_source(self, name: str) -> Any:
        return self.commands.get(name) or _source_of(COMMANDS[self.prefix + name], name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find a command, or fail with its replacement or a similar name."""
        if args and self.get_command(ctx, args[0]) is None:
            ctx.fail(f"No such command {args[0]!r}.{self._suggestion(ctx, args[0])}")
        return super().resolve_command(ctx, args)

    def _suggestion(self, ctx: Any, name: str) -> str:
        """Return what to use instead of an unknown command, or an empty string."""
        from zerolab.replacements import command_replacement

        command_path, parent = [name], ctx
        while parent.parent is not None:
            command_path.insert(0, parent.command.name)
            parent = parent.parent
        text = command_replacement(*command_path)
        if text is not None:
            return f" What `det {' '.join(command_path)}` did: {text}"
        names = self.list_commands(ctx)
        close = get_close_matches(name, sorted({*names} - _NEVER_SUGGESTED))
        if close:
            return f" Did you mean {', '.join(map(repr, close))}?"
        return f" Its commands: {', '.join(names)}." if ctx.parent is not None else ""


class Root(Group):
    """Root of the command line, with short names of the groups and commands of extensions."""

    aliases = _GROUPS
    prefix = ""
    core: ClassVar[dict[str, Any]] = {}
    """Functions and groups of the core by name."""

    def _find(self, ctx: Any, name: str) -> Any:
        return (
            _command(_as_app(self.core[name]), name)
            if name in self.core
            else super()._find(ctx, name)
        )

    def _help_source(self, name: str) -> Any:
        core = self.core.get(name)
        return super()._help_source(name) if core is None else _source_of(_as_app(core), name)

    def list_commands(self, ctx: Any) -> list[str]:
        """List the commands of the core, then those of extensions."""
        return [*self.core, *super().list_commands(ctx)]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read ``zerolab help COMMAND`` as ``zerolab COMMAND --help``."""
        if args[:1] == ["help"]:
            args = [*args[1:], "--help"]
        return super().parse_args(ctx, args)

    def _suggestion(self, ctx: Any, name: str) -> str:
        """Suggest commands of the groups, too: ``zerolab pause`` means an experiment or a trial."""
        groups = {group: self.get_command(ctx, group) for group in ("experiment", "trial")}
        matches = (
            [_OTHER_WORDS[name]]
            if name in _OTHER_WORDS
            else [
                f"zerolab {group} {name} ID"
                for group, command in groups.items()
                if name in command.list_commands(ctx)
            ]
        )
        if matches:
            return f" Did you mean {' or '.join(f'`{line}`' for line in matches)}?"
        return super()._suggestion(ctx, name)
