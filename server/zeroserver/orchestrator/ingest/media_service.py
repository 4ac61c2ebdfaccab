"""Index of the media that trials report; their content is in the checkpoint storage."""

from collections.abc import Sequence

import msgspec

from zerolab.contract.media import MAX_MEDIA, MAX_MEDIA_BYTES, MediaRecord, media_problem
from zerolab.errors import ConfigError
from zerolab.formatting import size_text
from zeroserver.orchestrator.ingest.metric_names import MetricNameService
from zeroserver.orchestrator.service import Service, Uses
from zeroserver.orchestrator.state import owner_of
from zeroserver.store.janitor import Chore

__all__ = ["MediaService"]

_TOTALS = "SELECT count(*), coalesce(sum(size), 0) FROM media WHERE trial_id = ?"
_STORE = (
    "INSERT INTO media (trial_id, name, step, position, type, digest, size, suffix, metadata, time)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (trial_id, name, step, position) "
    "DO UPDATE SET type = excluded.type, digest = excluded.digest, size = excluded.size, "
    "suffix = excluded.suffix, metadata = excluded.metadata, time = excluded.time"
)
_HAS_MEDIA = "SELECT 1 FROM media WHERE trial_id = ? LIMIT 1"
_RESTARTED = "SELECT 1 FROM runs WHERE trial_id = ? LIMIT 1 OFFSET 1"


class MediaService(Service):
    """Stores the index of media, within the limits of a trial."""

    warnings = Uses(MetricNameService)

    def store(self, trial_id: int, records: Sequence[MediaRecord]) -> None:
        """Store records; one of the same name, step and position is replaced.

        Records beyond the limits of a trial are discarded, with a warning in its log.

        Raises:
            ConfigError: If a record has an invalid value.
        """
        ((count, size),) = self.work.raw(_TOTALS, (trial_id,))
        rows = []
        for record in records:
            if problem := media_problem(record):
                raise ConfigError("media", [problem])
            count, size = count + 1, size + record.size
            if count > MAX_MEDIA or size > MAX_MEDIA_BYTES:
                limits = f"{MAX_MEDIA:,} and {size_text(MAX_MEDIA_BYTES)}"
                text = f"media: must be at most {limits} in a trial, got more; these are discarded"
                self.warnings.warn_once(trial_id, f"{text}: report them less often")
                break
            metadata = msgspec.json.encode(record.metadata).decode()
            rows.append((
                trial_id, record.name, record.steps, record.position, record.type, record.digest,
                record.size, record.suffix, metadata, record.time,
            ))  # fmt: skip
        self.work.many(_STORE, rows)

    def forget_after(self, trial_id: int, step: int) -> None:
        """Delete a trial's media after ``step``, since a new run will report them again.

        The files stay until the trial is deleted: the new run may report the same content.
        """
        self.work.run("DELETE FROM media WHERE trial_id = ? AND step > ?", (trial_id, step))

    def remove_files(self, experiment_id: int, trial_ids: Sequence[int]) -> None:
        """Delete the files of trials after the commit; their rows are deleted as orphans."""
        # A second run may have reported nothing while the files of the first one are there.
        owners = [
            owner_of(self.work.orchestrator, trial_id)
            for trial_id in trial_ids
            if self.work.raw(_HAS_MEDIA, (trial_id,)) or self.work.raw(_RESTARTED, (trial_id,))
        ]
        if owners:
            storage = self.work.storage_of(experiment_id)
            chores = (Chore(storage=storage, owner=owner, media=True) for owner in owners)
            self.work.orchestrator.janitor.discard(self.work, *chores)
