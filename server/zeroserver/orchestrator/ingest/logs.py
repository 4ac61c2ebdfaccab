"""Lines of logs, by their numbers: each is stored once."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import RowMapping, select

from zerolab.contract.wire import LogBatch, LogEntry
from zeroserver.orchestrator.desk import World, find, touch
from zeroserver.orchestrator.ingest.values import check_times
from zeroserver.orchestrator.log_policies import Match, apply_matches
from zeroserver.orchestrator.nodes import next_log, save_next_log
from zeroserver.store.database import Transaction
from zeroserver.store.schema import logs, runs

__all__ = ["store_logs"]


def store_logs(
    world: World,
    transaction: Transaction,
    run_id: int,
    batch: LogBatch,
    matches: Sequence[Match] = (),
) -> int:
    """Store the lines of a batch that are new; return the number of the next one wanted.

    Lines are taken from a run that has ended too: they came late, but they are what it said.

    Args:
        world: The orchestrator's memory.
        transaction: Of the writer.
        run_id: Whose lines.
        batch: Numbered lines.
        matches: What the log policies found in the batch.

    Raises:
        NotFoundError: If there is no such run.
    """
    run = find(transaction, runs, run_id)
    wanted = next_log(transaction.connection, run, batch.node)
    if batch.first > wanted or batch.first < 0:
        return wanted
    fresh = batch.entries[wanted - batch.first :]
    if not fresh:
        return wanted
    check_times(entry.time for entry in fresh)
    rows = [_log_row(run, entry) for entry in fresh]
    names = ", ".join(rows[0])
    marks = ", ".join("?" * len(rows[0]))
    transaction.many(
        f"INSERT INTO logs ({names}) VALUES ({marks})",  # noqa: S608 - our own column names
        [tuple(row.values()) for row in rows],
    )
    save_next_log(transaction, run_id, batch.node, wanted + len(fresh))
    skipped = len(batch.entries) - len(fresh)
    apply_matches(transaction, run, [each for each in matches if each.last >= skipped])
    if world.journal.followed(run["experiment_id"]):
        last = transaction.connection.scalar(
            select(logs.c.id).where(logs.c.run_id == run_id).order_by(logs.c.id.desc()).limit(1)
        )
        assert last is not None
        touch(transaction, "log", run["experiment_id"], (last - len(fresh) + 1, last))
    return wanted + len(fresh)


def _log_row(run: RowMapping, entry: LogEntry) -> dict[str, Any]:
    return {
        "experiment_id": run["experiment_id"],
        "trial_id": run["trial_id"],
        "run_id": run["id"],
        "rank": entry.rank,
        "stream": entry.stream,
        "level": entry.level,
        "text": entry.text.replace("\0", "\ufffd"),
        "time": entry.time,
    }
