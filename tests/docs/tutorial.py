"""Runs a tutorial page: writes its files, runs its commands, compares their output."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = ["Walkthrough", "commands_of", "files_of"]

_BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```', re.DOTALL | re.MULTILINE)
_UUID = re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b")
_NORMALIZED = (
    (re.compile(r"\x1b\[[0-9;?]*[A-Za-z]"), ""),
    (re.compile(r"─+"), ""),
    (re.compile(r"login\?code=\S+"), "login?code=CODE"),
    (_UUID, "UUID"),
    (re.compile(r"(checkpoint download) [0-9a-f]{8}"), r"\1 UUID"),
    (re.compile(r"^agent \S+ is", re.MULTILINE), "agent NAME is"),
    (re.compile(r"(/\S*)/\.zerolab(?=/)|/\S+/zerolab-home"), "HOME"),
    (re.compile(r"\d[\d.,]*(?:e-?\d+)?"), "N"),
    (re.compile(r"(?:N (?:h|min|s)\b ?)+"), "TIME "),
    (re.compile(r"N-N-N\S*|N-N"), "N"),
)
"""Text that differs between two runs of a command."""

_PROGRESS = re.compile(r"trial N (starting|running|queued|paused)")
"""Progress of ``zerolab run``, of which a fast machine prints fewer lines."""


def files_of(page: Path) -> Iterator[tuple[str, str]]:
    """Yield name and content of each file that a page shows."""
    for _, title, text in _BLOCK.findall(page.read_text(encoding="utf-8")):
        if title:
            yield title, text


def commands_of(block: str) -> Iterator[tuple[str, str]]:
    """Yield each command of a console block with its output."""
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        yield command, output


def _normalize(text: str) -> str:
    for pattern, replacement in _NORMALIZED:
        text = pattern.sub(replacement, text)
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    return "\n".join(line for line in lines if not _PROGRESS.match(line))


def _pattern(shown: str) -> re.Pattern[str]:
    """Return the pattern of an output: ``...`` matches any text, on its own for any lines."""
    lines = (
        r"(?:.*\n)*?" if line == "..." else re.escape(line).replace(r"\.\.\.", ".*") + "\n"
        for line in shown.splitlines()
    )
    return re.compile("".join(lines) or r"\n?")


class Walkthrough:
    """A user who follows pages in a separate folder.

    Args:
        folder: Where the user begins.
        home: Data directory of the installation.
    """

    def __init__(self, folder: Path, home: Path) -> None:
        self.folder = folder
        self._uuids: dict[str, str] = {}
        self._environment = {
            **{key: value for key, value in os.environ.items() if "ZEROLAB" not in key},
            "ZEROLAB_HOME": str(home),
            "BROWSER": "true",
            "COLUMNS": "200",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }

    def follow(self, page: Path) -> None:
        """Write the files of a page and run its commands, from top to bottom."""
        for language, title, text in _BLOCK.findall(page.read_text(encoding="utf-8")):
            if title:
                (self.folder / title).write_text(text, encoding="utf-8")
            elif language == "console":
                for command, output in commands_of(text):
                    self._check(command, output)

    def run(self, command: str) -> str:
        """Run a command in the current folder and return what it prints; ``cd`` persists."""
        completed = subprocess.run(
            ["bash", "-c", f'{command}\ncode=$?; pwd > "$WALK_PWD"; exit $code'],
            check=False,
            cwd=self.folder,
            env=self._environment | {"WALK_PWD": str(self.folder / ".pwd")},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert completed.returncode == 0, f"$ {command}\n{completed.stdout}"
        self.folder = Path((self.folder / ".pwd").read_text().strip())
        return completed.stdout

    def _check(self, command: str, expected: str) -> None:
        for shown, actual in self._uuids.items():
            command = command.replace(shown[:8], actual[:8])
        output = self.run(command)
        if shown_uuids := _UUID.findall(expected):
            self._uuids[shown_uuids[-1]] = _UUID.findall(output)[-1]
        want, got = _normalize(expected), _normalize(output)
        matches = _pattern(want).fullmatch(f"{got}\n")
        assert matches, f"$ {command}\n--- the page shows\n{want}\n--- but it prints\n{got}"
