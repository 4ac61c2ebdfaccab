"""A model directory in memory."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryFiles:
    """Content of files by path."""

    files: dict[str, bytes]

    def read(self, path: str) -> bytes | None:
        return self.files.get(path)

    def names(self) -> list[str]:
        return sorted(self.files)
