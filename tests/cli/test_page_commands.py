"""Commands in the pages of the manual and of the examples: their names and options exist."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import typer

from zerolab.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/README.md")]
NOT_CURRENT = {"CHANGELOG.md"}
BLOCK = re.compile(r"^ *```(sh|bash|console)[^\n]*\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
END_OF_COMMAND = re.compile(r"[|;&<>].*|\d>.*")


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the arguments of each ``zerolab`` command in the shell blocks of a page."""
    for language, text in BLOCK.findall(page.read_text(encoding="utf-8")):
        for line in text.replace("\\\n", " ").splitlines():
            prompt = r"\$ " if language == "console" else ""
            found = re.match(rf"\s*{prompt}(?:[A-Z_]+=\S+ )*zerolab (.*)", line)
            if found and "..." not in found[1]:
                words = []
                for word in shlex.split(found[1], comments=True):
                    if END_OF_COMMAND.fullmatch(word):
                        break
                    words.append(word)
                yield words


def check(words: list[str]) -> None:
    """Raise an error of click if a command or one of its options does not exist."""
    command: Any = typer.main.get_command(app)
    context = typer.Context(command)
    rest = list(words)
    while hasattr(command, "list_commands") and rest and not rest[0].startswith("-"):
        found = command.get_command(context, rest[0])
        if found is None:
            break
        command, context = found, typer.Context(found)
        rest.pop(0)
    if hasattr(command, "list_commands") and rest and not rest[0].startswith("-"):
        msg = f"no such command: {' '.join(words)}"
        raise click.UsageError(msg)
    context.allow_interspersed_args = command.context_settings.get("allow_interspersed_args", True)
    context.ignore_unknown_options = command.context_settings.get("ignore_unknown_options", False)
    command.make_parser(context).parse_args(rest)


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.name not in NOT_CURRENT],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_commands_and_options_exist(page: Path) -> None:
    for words in commands(page):
        check(words)


def test_pages_contain_commands_and_errors_are_found() -> None:
    assert sum(1 for page in PAGES for _ in commands(page)) > 150
    check(["db", "backup"])
    for wrong in (["db", "bakup"], ["experiment", "list", "--sorted", "name"], ["nothing"]):
        with pytest.raises(Exception, match=r"[Nn]o such"):
            check(wrong)
