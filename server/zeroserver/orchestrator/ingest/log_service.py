"""Log lines of runs: stored exactly once by number, up to a limit for each run.

The log of a run has at most ``Limits.log_bytes``. When new lines exceed the limit, the same
transaction drops the oldest lines and replaces them with a line that states their number.
"""

from collections.abc import Iterator, Sequence

from sqlalchemy import select

from zerolab.contract.messages import LogBatch
from zerolab.contract.secret_text import mask_values
from zerolab.errors import StaleRunError
from zeroserver.orchestrator.ingest.values import check_times
from zeroserver.orchestrator.log_policies import Match
from zeroserver.orchestrator.node_service import NodeService, host_of, next_log
from zeroserver.orchestrator.run_service import RunService
from zeroserver.orchestrator.service import Service, Uses
from zeroserver.orchestrator.state import Orchestrator
from zeroserver.states import RunState
from zeroserver.store.rows import RunRow
from zeroserver.store.schema import logs, runs

__all__ = ["LogService", "split_logs"]

_LINES = 2000
_BYTES = 1024 * 1024
"""Limits of the lines and bytes that one transaction stores: some 50 ms of the writer."""
_LINE_BYTES = 64
"""Estimated size of a line without its text."""
_LINE_CHARACTERS = 16_000
"""Maximum stored length of a line; agents send no more."""
_DROPPED_AT_ONCE = 20_000
"""Maximum number of lines that one transaction drops over the limit."""
_EXPIRED_LINES = 5000
"""Maximum number of expired lines that one transaction removes."""
_EXPIRED = (
    "SELECT t.id FROM trials t JOIN experiments e ON e.id = t.experiment_id "
    "WHERE e.log_retention_days IS NOT NULL "
    "AND t.ended_at <= ? - e.log_retention_days * 86400.0 "
    "AND EXISTS (SELECT 1 FROM logs l WHERE l.trial_id = t.id) ORDER BY t.id LIMIT 1"
)
_INSERT = (
    "INSERT INTO logs (experiment_id, trial_id, run_id, rank, stream, level, text, time, host) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
_DELETE = (
    "DELETE FROM logs WHERE id IN (SELECT id FROM logs WHERE trial_id = ? ORDER BY id LIMIT ?)"
)


class LogService(Service):
    """Stores log lines of runs, applies log policies and expires old lines."""

    runs = Uses(RunService)
    nodes = Uses(NodeService)

    def store(
        self,
        run_id: int,
        batch: LogBatch,
        matches: Sequence[Match] = (),
        *,
        by_run: bool = False,
    ) -> int:
        """Store the new lines of a batch; return the number of the next expected line.

        Late lines are stored up to a day after the end of the run. Later ones are discarded, but
        acknowledged, so that the sender continues.

        Args:
            run_id: Run that wrote the lines.
            batch: Numbered lines.
            matches: Matches of the log policies in the batch.
            by_run: Whether the run sends them itself, not its agent; it must not after its end.

        Raises:
            NotFoundError: If there is no such run.
            StaleRunError: If the run sends them itself and has ended.
        """
        run = self.work.find(RunRow, run_id)
        if by_run and run.state == RunState.EXITED:
            raise StaleRunError(f"run {run_id} has ended: only its agent may deliver its log")
        expected = next_log(self.work.connection, run, batch.node)
        if batch.first > expected or batch.first < 0:
            return expected
        fresh = batch.entries[expected - batch.first :]
        if not fresh:
            return expected
        if _is_over(self.work.orchestrator, run):
            return expected + len(fresh)
        check_times(entry.time for entry in fresh)
        secrets = self.work.secrets_of(run.experiment_id)
        host = host_of(self.work.connection, run, batch.node)
        texts = [
            mask_values(entry.text[:_LINE_CHARACTERS], secrets).replace("\0", "\ufffd")
            for entry in fresh
        ]
        rows = [
            (
                run.experiment_id, run.trial_id, run.id, entry.rank, entry.stream, entry.level,
                text, entry.time, host,
            )
            for entry, text in zip(fresh, texts, strict=True)
        ]  # fmt: skip
        self.work.many(_INSERT, rows)
        self.nodes.save_next_log(run_id, batch.node, expected + len(fresh))
        skipped = len(batch.entries) - len(fresh)
        self.runs.apply_matches(run, [line for line in matches if line.last >= skipped])
        if self.work.has_readers(run.experiment_id, of_all=True):
            last = self.work.connection.scalar(
                select(logs.c.id).where(logs.c.run_id == run_id).order_by(logs.c.id.desc()).limit(1)
            )
            assert last is not None
            self.work.touch("log", run.experiment_id, (last - len(fresh) + 1, last))
        size = run.log_bytes + sum(_LINE_BYTES + len(text.encode()) for text in texts)
        if size > self.work.settings.limits.log_bytes:
            self._drop_oldest(run, size)
        else:
            self.work.run("UPDATE runs SET log_bytes = ? WHERE id = ?", (size, run_id))
        return expected + len(fresh)

    def _drop_oldest(self, run: RunRow, size: int) -> None:
        """Drop the oldest lines of a run until its log fits, and insert a note.

        Args:
            run: Row of the run from before the new lines.
            size: Size of all stored lines in bytes, including the new ones.
        """
        limit = self.work.settings.limits.log_bytes
        length = "length(CAST(text AS BLOB))" if self.work.sqlite else "octet_length(text)"
        marker = run.log_first or 0
        oldest = self.work.raw(
            f"SELECT id, {length} FROM logs WHERE trial_id = ? AND id > ? AND run_id = ? "  # noqa: S608
            "AND stream <> 'server' ORDER BY id LIMIT ?",
            (run.trial_id, marker, run.id, _DROPPED_AT_ONCE),
        )
        count = freed = 0
        last = marker
        for last, text_bytes in oldest:  # noqa: B007 - used after the loop
            count += 1
            freed += text_bytes + _LINE_BYTES
            if size - freed <= limit:
                break
        lines = run.log_dropped_lines + count
        dropped = run.log_dropped_bytes + freed
        self.work.run(
            "DELETE FROM logs WHERE trial_id = ? AND id >= ? AND id < ? AND run_id = ? "
            "AND (stream <> 'server' OR id = ?)",
            (run.trial_id, marker, last, run.id, marker),
        )
        text = (
            f"{lines:,} older lines of run {run.id} ({dropped / 2**20:,.1f} MB) "
            "were dropped here: "
            f"the log of a run has at most {limit / 2**20:,.0f} MB in the database "
            "(--log-megabytes)"
        )
        self.work.run(
            "UPDATE logs SET stream = 'server', level = 'WARNING', rank = NULL, text = ? "
            "WHERE id = ?",
            (text, last),
        )
        self.work.save(
            runs, run.id, log_bytes=size - freed, log_first=last,
            log_dropped_lines=lines, log_dropped_bytes=dropped,
        )  # fmt: skip

    def expire(self) -> bool:
        """Remove some expired log lines of one trial; return whether there were any.

        Call it until it returns False.
        """
        for (trial_id,) in self.work.raw(_EXPIRED, (self.work.clock(),)):
            self.work.run(_DELETE, (trial_id, _EXPIRED_LINES))
            return True
        return False


def split_logs(batch: LogBatch) -> Iterator[LogBatch]:
    """Split a batch into parts small enough for one database transaction each."""
    first, size = 0, 0
    for index, entry in enumerate(batch.entries):
        size += len(entry.text)
        if size >= _BYTES or index + 1 - first >= _LINES:
            yield LogBatch(batch.first + first, batch.entries[first : index + 1], batch.node)
            first, size = index + 1, 0
    if first < len(batch.entries) or not batch.entries:
        yield LogBatch(batch.first + first, batch.entries[first:], batch.node)


def _is_over(orchestrator: Orchestrator, run: RunRow) -> bool:
    """Check whether a run ended too long ago to accept late lines."""
    ended, late_s = run.ended_at, orchestrator.settings.timings.late_logs_s
    return (
        run.state == RunState.EXITED and ended is not None and ended + late_s < orchestrator.clock()
    )
