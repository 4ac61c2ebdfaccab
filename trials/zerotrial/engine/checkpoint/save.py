"""Saving: every rank writes what it owns, then rank 0 makes the whole valid in one rename.

::

    <dir>/<tag>/rank-00000-000.safetensors       what rank 0 owns: master weights, optimizer states
                gradients-00000-000.safetensors  what it gathered since the accumulation boundary
                states-00000.pt                  optimizer states of other shapes, if it has any
                rank-00000.pt                    its random generators; its buffers, if they differ
                module-000.safetensors           buffers and frozen parameters; of pipeline stages
                                                 module-00001-000, ...
                state.pt                         counters, schedule, loss scaler, optimizer options
                client_state.pt                  what the user gave
                manifest.json                    names, sizes and hashes of all the others
    <dir>/latest                                 the newest tag
"""

import json
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Thread, main_thread

from torch import Tensor

from zerotrial.engine.checkpoint.files import (
    LATEST,
    MANIFEST,
    CheckpointError,
    FileRecord,
    Manifest,
    publish_directory,
    replace_text,
    write_file,
)
from zerotrial.engine.checkpoint.ranks import CheckpointRanks
from zerotrial.engine.checkpoint.shards import write_tensors

__all__ = ["BackgroundSave", "SaveJob", "save_now"]

_POLL_S = 0.02
_PATIENCE_S = 1800.0
"""How long rank 0 waits for the files of ranks that are late, as long as training goes on."""

_ORPHAN_PATIENCE_S = 30.0
"""The same, once the process has otherwise ended."""


@dataclass(frozen=True)
class SaveJob:
    """All that one rank needs to write its part; holds no reference to anything that trains."""

    ranks: CheckpointRanks
    temporary: Path
    final: Path
    save_latest: bool
    manifest: Manifest
    """Without ``files``."""

    tensors: Iterable[tuple[str, Tensor]]
    """What this rank owns."""

    module_tensors: Sequence[tuple[str, Tensor]]
    """On the ranks of the first replica."""

    objects: Mapping[str, bytes]
    """Name to content of the small files."""

    part: int = 0
    """Pipeline stage of this rank."""

    gradients: Iterable[tuple[str, Tensor]] = ()
    """What this rank has gathered since the last accumulation boundary."""

    def write(self) -> dict[str, FileRecord]:
        """Write this rank's files.

        Raises:
            CheckpointError: If one cannot be written.
        """
        rank = f"{self.ranks.rank:05}"
        records = write_tensors(self.temporary, f"rank-{rank}", self.tensors)
        records |= write_tensors(self.temporary, f"gradients-{rank}", self.gradients)
        module = f"module-{self.part:05}" if self.part else "module"
        records |= write_tensors(self.temporary, module, self.module_tensors)
        for name, content in self.objects.items():
            records[name] = write_file(self.temporary / name, content)
        return records

    def commit(self, records: Iterable[Mapping[str, FileRecord]]) -> None:
        """Make the checkpoint valid, once all ranks have written; on rank 0.

        Raises:
            CheckpointError: If the manifest, the rename or ``latest`` fails.
        """
        files = {name: record for part in records for name, record in sorted(part.items())}
        manifest = Manifest(**{**vars(self.manifest), "files": files})
        write_file(self.temporary / MANIFEST, manifest.to_text().encode())
        publish_directory(self.temporary, self.final)
        if self.save_latest:
            replace_text(self.final.parent / LATEST, f"{self.final.name}\n")

    def abandon(self) -> None:
        """Remove what was written; on rank 0."""
        shutil.rmtree(self.temporary, ignore_errors=True)


def save_now(job: SaveJob) -> None:
    """Write while training waits. **Collective**.

    Raises:
        CheckpointError: On all ranks, if any could not write; nothing is left behind.
    """
    ranks = job.ranks
    try:
        records: dict[str, FileRecord] = {}
        with ranks.together():
            records = job.write()
        everyones = ranks.allgather(records)
        with ranks.together():
            if ranks.rank == 0:
                job.commit(everyones)
    except BaseException:
        if ranks.rank == 0:
            job.abandon()
        raise


class BackgroundSave:
    """Writes while training goes on.

    The threads of different ranks meet through small files in the checkpoint's own directory, and
    not through collectives, which could interleave with those of training.
    """

    def __init__(self, job: SaveJob) -> None:
        self._job = job
        self._error: Exception | None = None
        self._thread = Thread(target=self._run, name=f"save {job.final.name}")
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether this rank's part is over, well or badly."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Return when the checkpoint is valid. **Collective**.

        Raises:
            CheckpointError: On all ranks, if it could not be written.
        """
        self._thread.join()
        with self._job.ranks.together():
            if self._error is not None:
                raise self._error

    def _run(self) -> None:
        job = self._job
        try:
            try:
                records = job.write()
            except Exception as error:
                self._report({"error": str(error)})
                raise
            self._report({"files": {name: asdict(record) for name, record in records.items()}})
            if job.ranks.rank == 0:
                job.commit(self._collect())
        except Exception as error:  # noqa: BLE001 - raised by wait()
            self._error = error
            if job.ranks.rank == 0:
                job.abandon()

    def _report(self, report: Mapping[str, object]) -> None:
        path = self._report_path(self._job.ranks.rank)
        try:
            replace_text(path, json.dumps(report))
        except CheckpointError:
            path.touch()  # a full disk still has room for an empty file

    def _report_path(self, rank: int) -> Path:
        return self._job.temporary / f"written-{rank:05}.json"

    def _collect(self) -> list[dict[str, FileRecord]]:
        found = []
        started = time.monotonic()
        for rank in range(self._job.ranks.size):
            path = self._report_path(rank)
            while not path.exists():
                waited = time.monotonic() - started
                limit = _PATIENCE_S if main_thread().is_alive() else _ORPHAN_PATIENCE_S
                if waited > limit:
                    msg = f"{self._job.final}: rank {rank} has written nothing for {waited:.0f} s"
                    raise CheckpointError(msg)
                time.sleep(_POLL_S)
            report = json.loads(path.read_text() or '{"error": "could not write its part"}')
            if "error" in report:
                msg = f"rank {rank}: {report['error']}"
                raise CheckpointError(msg)
            records = report["files"].items()
            found.append({name: FileRecord(**record) for name, record in records})
        for rank in range(self._job.ranks.size):
            self._report_path(rank).unlink()
        return found
