"""What the ranks of several machines write: shown with host and rank, and kept in a file each."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from zerolab.files import append_private
from zerolab.launcher.nodes.messages import Said

__all__ = ["Output", "name_of"]

_UNFIT = re.compile(r"[^A-Za-z0-9._@-]")


def name_of(host: str, line: Said) -> str:
    """The file of a line: ``HOST_rank_N.out`` or ``.err``."""
    who = "launcher" if line.rank is None else f"rank_{line.rank}"
    return f"{_UNFIT.sub('_', host)}_{who}.{line.stream}"


class Output:
    """Shows lines as ``[host:rank] text``, and keeps them as they were.

    Args:
        directory: Gets a file of each rank's lines; made here.
        quiet: Show nothing.
        file_of: The name of the file for a line of a host.
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
        self._quiet = quiet
        self._file_of = file_of
        self._files: dict[str, BinaryIO] = {}

    def take(self, host: str, line: Said) -> None:
        """Take a line of a rank, or of what starts the ranks there."""
        name = self._file_of(host, line)
        if name not in self._files:
            self._files[name] = append_private(self.directory / name)
        file = self._files[name]
        file.write(f"{line.text}\n".encode())
        file.flush()
        if not self._quiet:
            stream = sys.stdout if line.stream == "out" else sys.stderr
            place = host if line.rank is None else f"{host}:{line.rank}"
            print(f"[{place}] {line.text}", file=stream, flush=True)

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
