"""Journal of a search: its results in a file, so that a search that was killed continues."""

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec

from zerolab.errors import ConfigError
from zerotrial.extensions.autotune.candidates import Candidate, Profile
from zerotrial.extensions.autotune.search import Result

__all__ = ["Journal"]


class _Line(msgspec.Struct, frozen=True, omit_defaults=True):
    fingerprint: str = ""
    profile: Profile | None = None
    candidate: Candidate | None = None
    rung: int = 0
    result: Result | None = None


class Journal:
    """Results of a search by candidate and rung, each stored before the next run starts.

    Args:
        directory: Directory of the results.
        fingerprint: What determines the results; a journal of something else is not continued.
        restart: Delete earlier results.

    Raises:
        ConfigError: If the directory has results of something else.
    """

    def __init__(self, directory: Path, fingerprint: Any, *, restart: bool = False) -> None:
        self.directory = directory
        self.profile: Profile | None = None
        self._file = directory / "journal.jsonl"
        self._results: dict[tuple[Candidate, int], Result] = {}
        text = json.dumps(fingerprint, sort_keys=True, default=str)
        if restart:
            self._file.unlink(missing_ok=True)
        directory.mkdir(parents=True, exist_ok=True)
        for run in directory.glob("run-*"):  # of a search that was killed
            shutil.rmtree(run, ignore_errors=True)
        lines = self._read()
        if lines and lines[0].fingerprint != text:
            problem = (
                f"results_dir: {directory} has results of other settings or another file; use "
                "--restart to delete them, or --results-dir DIR"
            )
            raise ConfigError("autotune", [problem])
        if not lines:
            self._append(_Line(fingerprint=text))
        for line in lines:
            self.profile = line.profile or self.profile
            if line.candidate is not None and line.result is not None:
                self._results[line.candidate, line.rung] = line.result

    def __len__(self) -> int:
        return len(self._results)

    def result(self, candidate: Candidate, rung: int) -> Result | None:
        """Return a stored result."""
        return self._results.get((candidate, rung))

    def add_profile(self, profile: Profile) -> None:
        """Store the profile of the model."""
        self.profile = profile
        self._append(_Line(profile=profile))

    def add(self, candidate: Candidate, rung: int, result: Result) -> None:
        """Store a result."""
        self._results[candidate, rung] = result
        self._append(_Line(candidate=candidate, rung=rung, result=result))

    def _append(self, line: _Line) -> None:
        with self._file.open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")

    def _read(self) -> list[_Line]:
        """Read all complete lines, and cut off one that was being written."""
        content = self._file.read_bytes() if self._file.is_file() else b""
        complete = content[: content.rfind(b"\n") + 1]
        if complete != content:
            self._file.write_bytes(complete)
        return [msgspec.json.decode(line, type=_Line) for line in complete.splitlines()]
