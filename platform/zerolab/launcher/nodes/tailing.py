"""Whole lines of the ranks' output files, as they come."""

import re
from pathlib import Path

from zerolab.launcher.nodes.messages import Said

__all__ = ["Tails"]

_RANK_FILE = re.compile(r"rank_(\d+)\.(out|err)")
_MOST_BYTES = 1 << 18
"""That one look takes from one file; a longer line is cut."""


class Tails:
    """Reads on where it stopped.

    Args:
        logs: Directory of the files.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._read: dict[str, int] = {}

    def read(self) -> list[Said]:
        """Return the lines that have been written since."""
        return self._collect(rest=False)

    def read_rest(self) -> list[Said]:
        """Return all that is left, a last line without its end too."""
        lines: list[Said] = []
        while more := self._collect(rest=True):
            lines += more
        return lines

    def _collect(self, *, rest: bool) -> list[Said]:
        lines = []
        for path in sorted(self._logs.iterdir()):
            named = _RANK_FILE.fullmatch(path.name)
            if named is None:
                continue
            start = self._read.get(path.name, 0)
            with path.open("rb") as file:
                file.seek(start)
                content = file.read(_MOST_BYTES)
            whole = content.rfind(b"\n") + 1
            if not whole and (rest or len(content) == _MOST_BYTES):
                whole = len(content)
            if not whole:
                continue
            self._read[path.name] = start + whole
            text = content[:whole].decode(errors="replace").removesuffix("\n")
            rank, stream = int(named[1]), named[2]
            lines += [Said(line.rstrip("\r"), rank, stream) for line in text.split("\n")]
        return lines
