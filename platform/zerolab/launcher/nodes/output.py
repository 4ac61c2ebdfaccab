"""What the ranks of several machines write: shown with host and rank, and kept in a file each."""

import re
import sys
from pathlib import Path
from typing import BinaryIO

from zerolab.files import append_private
from zerolab.launcher.nodes.messages import Said

__all__ = ["Output"]

_UNFIT = re.compile(r"[^A-Za-z0-9._@-]")


class Output:
    """Shows lines as ``[host:rank] text``, and keeps them as they were.

    Args:
        directory: Gets ``HOST_rank_N.out`` and ``.err``; made here.
        quiet: Show nothing.
    """

    def __init__(self, directory: Path, *, quiet: bool = False) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.directory = directory
        self._quiet = quiet
        self._files: dict[str, BinaryIO] = {}

    def take(self, host: str, line: Said) -> None:
        """Take a line of a rank, or of what starts the ranks there."""
        who = "launcher" if line.rank is None else f"rank_{line.rank}"
        name = f"{_UNFIT.sub('_', host)}_{who}.{line.stream}"
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
