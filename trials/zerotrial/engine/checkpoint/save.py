"""Saving: every rank writes its part, then rank 0 publishes the checkpoint by one rename.

::

    <dir>/<tag>/rank-00000-000.safetensors       rank 0's master weights and optimizer states
                gradients-00000-000.safetensors  its gradients since the accumulation boundary
                states-00000.pt                  optimizer states of other shapes, if any
                rank-00000.pt                    its random generators; its buffers, if they differ
                module-000.safetensors           buffers and frozen parameters; of pipeline stages
                                                 module-00001-000, ...
                state.pt                         counters, schedule, loss scaler, optimizer options
                client_state.pt                  the user's client state
                manifest.json                    names, sizes and hashes of all other files
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
    CheckpointRanks,
    FileRecord,
    Manifest,
    publish_directory,
    replace_text,
    write_file,
)
from zerotrial.engine.checkpoint.shards import write_tensors

__all__ = ["BackgroundSave", "SaveJob", "save_now"]

_POLL_S = 0.02
_LATE_RANK_TIMEOUT_S = 1800.0
"""Longest wait of rank 0 for the files of late ranks while training continues."""

_ORPHAN_TIMEOUT_S = 30.0
"""Longest wait after the process has otherwise ended."""


@dataclass(frozen=True)
class SaveJob:
    """Data and settings with which one rank writes its part, independent of training."""

    ranks: CheckpointRanks
    temporary: Path
    final: Path
    save_latest: bool
    manifest: Manifest
    """Manifest without ``files``."""

    tensors: Iterable[tuple[str, Tensor]]
    """Tensors that this rank owns."""

    module_tensors: Sequence[tuple[str, Tensor]]
    """Buffers and frozen parameters, on ranks of the first replica."""

    objects: Mapping[str, bytes]
    """Content of the small files by name."""

    part: int = 0
    """Pipeline stage of this rank."""

    gradients: Iterable[tuple[str, Tensor]] = ()
    """This rank's gradients since the last accumulation boundary."""

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
        """Publish the checkpoint after all ranks have written; on rank 0.

        Raises:
            CheckpointError: If the manifest, the rename or ``latest`` fails.
        """
        files = {name: record for part in records for name, record in sorted(part.items())}
        manifest = Manifest(**{**vars(self.manifest), "files": files})
        # `latest` is replaced last: a crash before it leaves the previous checkpoint in force, and
        # a directory with the final name always has its manifest and all files of the manifest.
        write_file(self.temporary / MANIFEST, manifest.to_text().encode())
        publish_directory(self.temporary, self.final)
        if self.save_latest:
            replace_text(self.final.parent / LATEST, f"{self.final.name}\n")

    def abandon(self) -> None:
        """Remove the written files; on rank 0."""
        shutil.rmtree(self.temporary, ignore_errors=True)


def save_now(job: SaveJob) -> None:
    """Write while training waits. **Collective**.

    Raises:
        CheckpointError: On all ranks, if any of them failed; all files are removed.
    """
    ranks = job.ranks
    try:
        records: dict[str, FileRecord] = {}
        with ranks.together():
            records = job.write()
        records_by_rank = ranks.allgather(records)
        with ranks.together():
            if ranks.rank == 0:
                job.commit(records_by_rank)
    except BaseException:
        if ranks.rank == 0:
            job.abandon()
        raise


class BackgroundSave:
    """Save that is written in the background of training.

    The threads of different ranks synchronize through small files in the checkpoint's directory.
    Collectives could interleave with those of training.
    """

    def __init__(self, job: SaveJob) -> None:
        self._job = job
        self._error: Exception | None = None
        self._thread = Thread(target=self._run, name=f"save {job.final.name}")
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether this rank's part has finished or failed."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the checkpoint is valid. **Collective**.

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
            path.touch()  # an empty file needs no room on a full disk

    def _report_path(self, rank: int) -> Path:
        return self._job.temporary / f"written-{rank:05}.json"

    def _collect(self) -> list[dict[str, FileRecord]]:
        collected = []
        started = time.monotonic()
        for rank in range(self._job.ranks.size):
            path = self._report_path(rank)
            while not path.exists():
                waited = time.monotonic() - started
                limit = _LATE_RANK_TIMEOUT_S if main_thread().is_alive() else _ORPHAN_TIMEOUT_S
                if waited > limit:
                    msg = f"{self._job.final}: rank {rank} has written nothing for {waited:.0f} s"
                    raise CheckpointError(msg)
                time.sleep(_POLL_S)
            report = json.loads(path.read_text() or '{"error": "could not write its part"}')
            if "error" in report:
                msg = f"rank {rank}: {report['error']}"
                raise CheckpointError(msg)
            records = report["files"].items()
            collected.append({name: FileRecord(**record) for name, record in records})
        for rank in range(self._job.ranks.size):
            self._report_path(rank).unlink()
        return collected
