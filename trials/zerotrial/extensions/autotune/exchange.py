"""Files by which the autotuner and the ranks of a run exchange a request and its results."""

from pathlib import Path
from typing import Any, Literal

import msgspec

from zerolab.files import write_atomic
from zerotrial.extensions.autotune.candidates import Candidate, Profile

__all__ = ["Measurement", "Request", "RunFiles"]


class Request(msgspec.Struct, frozen=True):
    """Measurement by the ranks of a run."""

    candidate: Candidate | None = None
    """None: profile the model, and stop before anything trains."""
    overrides: dict[str, Any] = {}
    """Keys of the engine file that the candidate sets."""
    override_engine: bool = False
    """The script has its own file: the engine merges the overrides into it."""
    warmup: int = 2
    """Optimizer steps before the measured ones."""
    steps: int = 0
    """Measured optimizer steps."""
    seconds: float = 0.0
    """Minimum duration of the measured steps; short steps are repeated."""
    limit_s: float | None = None
    """Seconds per step; the run stops early if every step takes longer."""
    clock: Literal["wall", "cpu"] = "wall"
    memory_bytes: int | None = None
    """Memory that a rank may use; None for no limit."""


class Measurement(msgspec.Struct, frozen=True):
    """Result of one rank."""

    step_seconds: tuple[float, ...] = ()
    memory: int = 0
    rows: int | None = None
    complete: bool = False
    slow: bool = False
    mismatch: str = ""
    """Difference between the engine's configuration and the candidate's."""


class RunFiles:
    """Files in the directory of a run.

    Args:
        directory: The directory.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def write_request(self, request: Request) -> None:
        """Write the request."""
        write_atomic(self.directory / "request.json", msgspec.json.encode(request))

    def read_request(self) -> Request:
        """Read the request."""
        return msgspec.json.decode((self.directory / "request.json").read_bytes(), type=Request)

    def write_measurement(self, rank: int, measurement: Measurement) -> None:
        """Write a rank's result, in place of the last one."""
        write_atomic(self.directory / f"rank_{rank}.json", msgspec.json.encode(measurement))

    def read_measurements(self) -> list[Measurement]:
        """Read the results of all ranks that wrote one, by rank."""
        files = sorted(
            self.directory.glob("rank_*.json"),
            key=lambda path: int(path.stem.removeprefix("rank_")),
        )
        return [msgspec.json.decode(path.read_bytes(), type=Measurement) for path in files]

    def write_profile(self, profile: Profile) -> None:
        """Write the profile of the model."""
        write_atomic(self.directory / "profile.json", msgspec.json.encode(profile))

    def read_profile(self) -> Profile | None:
        """Read the profile of the model; None if the run wrote none."""
        path = self.directory / "profile.json"
        return msgspec.json.decode(path.read_bytes(), type=Profile) if path.is_file() else None
