"""What the ranks of several machines write: kept in a file each, and shown with host and rank."""

import os
import re
from collections.abc import Callable
from pathlib import Path

from zerolab.launcher.nodes.messages import Said
from zerolab.launcher.nodes.printing import Printer, View

__all__ = ["Output", "name_of"]

_UNFIT = re.compile(r"[^A-Za-z0-9._@-]")


def name_of(host: str, piece: Said) -> str:
    """The file of a piece: ``HOST_rank_N.out`` or ``.err``."""
    who = "launcher" if piece.rank is None else f"rank_{piece.rank}"
    return f"{_UNFIT.sub('_', host)}_{who}.{piece.stream}"


class Output:
    """Keeps what is written as it was, and shows lines of it as ``[host:rank] text``.

    Args:
        directory: Gets a file for each rank and stream; made here.
        quiet: Show nothing.
        file_of: The name of the file for a piece from a host.
    """

    def __init__(
        self,
        directory: Path,
        *,
        quiet: bool = False,
        file_of: Callable[[str, Said], str] = name_of,
    ) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.directory = directory
        self._file_of = file_of
        self._files: dict[str, int] = {}
        self._views: dict[str, View] = {}
        self._printer = None if quiet else Printer()

    def take(self, host: str, piece: Said) -> None:
        """Take what a rank wrote, or what starts the ranks there.

        Raises:
            OSError: If it cannot be kept, or what came before could not be shown.
        """
        name = self._file_of(host, piece)
        if name not in self._files:
            self._open(name, host, piece)
        content = memoryview(piece.content)
        while content:
            content = content[os.write(self._files[name], content) :]
        if self._printer is not None:
            self._printer.look(self._views[name])

    def say(self, text: str) -> None:
        """Show a sentence of the command itself."""
        if self._printer is not None:
            self._printer.say(text)

    def hurry(self) -> None:
        """Hear that the run was told to stop: who reads nothing is waited for no more."""
        if self._printer is not None:
            self._printer.hurry()

    def close(self) -> None:
        """Wait until all is shown, and close the files.

        Raises:
            OSError: If it could not be shown.
        """
        if self._printer is not None and not self._printer.close():
            return  # its thread may still read
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def _open(self, name: str, host: str, piece: Said) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
        self._files[name] = os.open(self.directory / name, flags, 0o600)
        if self._printer is not None:
            place = host if piece.rank is None else f"{host}:{piece.rank}"
            self._views[name] = View(self._files[name], place, piece.stream)
            self._printer.add(self._views[name])
