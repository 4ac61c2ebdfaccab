"""Output of ranks on several machines: a file for each, and lines with host and rank."""

import os
import re
from collections.abc import Callable
from pathlib import Path

from zerolab.extensions.launcher_ssh.messages import RankOutput
from zerolab.extensions.launcher_ssh.printing import Printer, View

__all__ = ["Output", "name_of"]

_UNFIT = re.compile(r"[^A-Za-z0-9._@-]")


def name_of(host: str, piece: RankOutput) -> str:
    """Return the file name of a piece: ``HOST_rank_N.out`` or ``.err``."""
    who = "launcher" if piece.rank is None else f"rank_{piece.rank}"
    return f"{_UNFIT.sub('_', host)}_{who}.{piece.stream}"


class Output:
    """Writes output to files unchanged, and shows its lines as ``[host:rank] text``.

    Args:
        directory: Directory with a file for each rank and stream; created here.
        quiet: Show no lines.
        file_of: Function that returns the file name for a piece of a host.
    """

    def __init__(
        self,
        directory: Path,
        *,
        quiet: bool = False,
        file_of: Callable[[str, RankOutput], str] = name_of,
    ) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.directory = directory
        self._file_of = file_of
        self._files: dict[str, int] = {}
        self._views: dict[str, View] = {}
        self._printer = None if quiet else Printer()

    def store_output(self, host: str, piece: RankOutput) -> None:
        """Store and show a piece of output of a rank, or of a launcher.

        Raises:
            OSError: If it cannot be written, or earlier output could not be shown.
        """
        name = self._file_of(host, piece)
        if name not in self._files:
            self._open(name, host, piece)
        content = memoryview(piece.content)
        while content:
            content = content[os.write(self._files[name], content) :]
        if self._printer is not None:
            self._printer.enqueue(self._views[name])

    def print_message(self, text: str) -> None:
        """Show a message of the command."""
        if self._printer is not None:
            self._printer.print_message(text)

    def limit_wait(self) -> None:
        """Note that the run was stopped: no longer wait for a blocked reader."""
        if self._printer is not None:
            self._printer.limit_wait()

    def close(self) -> None:
        """Wait until everything is shown, and close the files.

        Raises:
            OSError: If something could not be shown.
        """
        if self._printer is not None and not self._printer.close():
            return  # its thread may still be reading
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def _open(self, name: str, host: str, piece: RankOutput) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
        self._files[name] = os.open(self.directory / name, flags, 0o600)
        if self._printer is not None:
            label = host if piece.rank is None else f"{host}:{piece.rank}"
            self._views[name] = View(self._files[name], label, piece.stream)
            self._printer.add(self._views[name])
