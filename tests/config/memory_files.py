"""A model directory that is written in a test."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryFiles:
    """Path to content."""

    files: dict[str, bytes]

    def read(self, path: str) -> bytes | None:
        return self.files.get(path)

    def names(self) -> list[str]:
        return sorted(self.files)
