"""Run directories of a script without a platform, one for each fit.

The first run uses the directory that the script names, later ones ``NAME-2``, ``NAME-3``, ... A run
that resumes from a checkpoint continues in the directory of the run that saved it.
"""

import fcntl
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from zerolab.contract.spec import CheckpointRef, RunSpec
from zerolab.contract.storage import StorageAddress
from zerolab.reports.reporter import METRICS_FILE
from zerolab.storage.store import CheckpointStore, local_owner

__all__ = ["LOCK_FILE", "RunDirectories", "in_directory", "is_used"]

LOCK_FILE = ".writing"
"""Locked file of a directory in which a run saves checkpoints."""

_CLAIM_FILE = ".claimed"
"""Locked file of a directory whose script has not trained yet."""
_CHECKPOINTS = "checkpoints"


class RunDirectories:
    """The run directories of one name.

    Args:
        base: The directory that the script names.
    """

    def __init__(self, base: Path) -> None:
        self._base = base.absolute()
        self._claim: BinaryIO | None = None

    def claim(self) -> Path:
        """Create and return the directory of a new run.

        It is the first one that no run has used and no other script has claimed.
        """
        self.release()
        for path in self._names():
            path.mkdir(parents=True, exist_ok=True)
            if not is_used(path) and self._lock(path):
                return path
        raise AssertionError("unreachable: the names never end")

    def release(self) -> None:
        """Give up the claim on a directory."""
        if self._claim is not None:
            self._claim.close()
            self._claim = None

    def _lock(self, path: Path) -> bool:
        """Claim a directory until :meth:`release`; return False if another script has done so."""
        claim = (path / _CLAIM_FILE).open("ab")
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            claim.close()
            return False
        except OSError:  # a file system without locks
            pass
        self._claim = claim
        return True

    def find(self, uuid: str) -> Path | None:
        """Return the directory of the run that saved a checkpoint, the newest one first."""
        for path in self._existing():
            metrics = path / METRICS_FILE
            if (path / _CHECKPOINTS / uuid).is_dir():
                return path
            if metrics.is_file() and uuid.encode() in metrics.read_bytes():
                return path
        return None

    def latest(self) -> CheckpointRef | None:
        """Return the furthest checkpoint of the newest run that has one."""
        for path in self.checkpoints():
            checkpoint = CheckpointStore(path).latest()
            if checkpoint is not None:
                return CheckpointRef(checkpoint.uuid, checkpoint.steps_completed, root=str(path))
        return None

    def checkpoints(self) -> list[Path]:
        """Return the checkpoint directories of all runs, the newest one first."""
        paths = [path / _CHECKPOINTS for path in self._existing()]
        return [path for path in paths if path.is_dir()]

    def _names(self) -> Iterator[Path]:
        yield self._base
        for number in itertools.count(2):
            yield self._base.with_name(f"{self._base.name}-{number}")

    def _existing(self) -> list[Path]:
        paths = list(itertools.takewhile(Path.is_dir, self._names()))
        return paths[::-1]


def is_used(path: Path) -> bool:
    """Return whether a run has reported to a directory, or is saving checkpoints there."""
    metrics = path / METRICS_FILE
    if metrics.is_file() and metrics.stat().st_size > 0:
        return True
    try:
        with (path / LOCK_FILE).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def in_directory(spec: RunSpec, path: Path) -> RunSpec:
    """Return a run's specification moved to another directory.

    Checkpoints move as well, unless the script has configured another storage.
    """
    inside = spec.checkpoint_dir == str(Path(spec.run_dir) / _CHECKPOINTS)
    root = str(path / _CHECKPOINTS) if inside else spec.checkpoint_dir
    address = StorageAddress(root=root, options=spec.storage_options)
    return msgspec.structs.replace(
        spec,
        run_dir=str(path),
        checkpoint_dir=root,
        storage_owner=local_owner(address, str(path)),
        checkpoint_cache=str(path / "cache"),
    )
