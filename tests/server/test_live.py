"""Event journal behind the streams: limited, and only for active readers."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable

import pytest

from tests.server.helpers import Server, metrics
from tests.waiting import DEADLINE_S, until
from zerolab.contract.messages import LogBatch, LogEntry, ReportBatch
from zeroserver.event_journal import ALL, Entry, Hub, Journal
from zeroserver.orchestrator.unit_of_work import UnitOfWork
from zeroserver.store.database import Change


def happen(journal: Journal, experiment_id: int, size: int, count: int = 1) -> None:
    change = Change("", experiment_id, "metric", bytes(size))
    journal.publish([change] * count)


def test_journal_is_limited_by_bytes() -> None:
    async def follow() -> None:
        journal = Journal(Hub(), most_bytes=100_000)
        stream = journal.follow(1, None, 60.0)
        assert await anext(stream) is None  # it reads everything first
        assert await anext(stream) == []
        happen(journal, 1, 9_000, 5)
        events = await anext(stream)
        assert events is not None
        assert [entry.number for entry in events] == [1, 2, 3, 4, 5]
        happen(journal, 1, 9_000, 1000)
        assert 80_000 < journal.held_bytes <= 100_000
        assert await anext(stream) is None, "it has missed something and must read all again"
        newest = await anext(stream)
        assert newest is not None
        assert newest[-1].number == 1005
        happen(journal, 1, 200_000)
        assert journal.held_bytes == 0
        assert await anext(stream) is None
        await stream.aclose()

    asyncio.run(follow())


def test_experiment_events_stop_with_last_reader() -> None:
    async def follow() -> None:
        journal = Journal(Hub(), linger_s=0.0)
        first, second = (journal.follow(1, None, 60.0) for _ in range(2))
        for stream in (first, second):
            assert await anext(stream) is None
        happen(journal, 1, 1000, 3)
        await first.aclose()
        journal.tidy()
        assert journal.followed(1)
        assert journal.held_bytes > 3000
        await second.aclose()
        assert journal.followed(1), "a reader that was cut off may come back"
        journal.tidy()
        assert not journal.followed(1)
        assert not journal.wanted(1)
        assert journal.held_bytes == 0
        happen(journal, 1, 1000)
        assert journal.held_bytes == 0
        third = journal.follow(1, journal.cursor(3), 60.0)
        assert await anext(third) is None, "what came meanwhile was not kept"
        await third.aclose()

    asyncio.run(follow())


def test_list_readers_store_no_metrics() -> None:
    async def follow() -> None:
        journal = Journal(Hub())
        stream = journal.follow(ALL, None, 60.0)
        assert await anext(stream) is None
        happen(journal, 7, 1000, 100)
        journal.publish([Change("", 7, "trial", 1)])
        entries = await anext(stream)
        assert entries is not None
        assert [entry.kind for entry in entries] == ["trial"]
        assert journal.held_bytes < 1000
        await stream.aclose()

    asyncio.run(follow())


@pytest.mark.parametrize("value", [0.5, float("nan"), float("inf")])
def test_followed_experiment_streams_metrics(server: Server, value: float) -> None:
    server.submit()
    server.add_agent()
    spec = server.begin()
    journal = server.services.journal
    portal = server.http.portal
    assert portal is not None
    stream = portal.call(_open, journal)
    server.report(spec.run_id, *(metrics("training", step, loss=value) for step in (1, 2)))
    until("both are in the journal", lambda: journal._last >= 4)
    payloads = [entry.resource for entry in journal._entries if entry.kind == "metric"]
    points = [json.loads(content)["metrics"][0]["points"] for content in payloads]
    wire = {0.5: 0.5, float("inf"): "Infinity"}.get(value, "NaN")
    assert points == [[[1, wire]], [[2, wire]]]
    portal.call(stream.aclose)
    server.report(spec.run_id, metrics("training", 3, loss=value))


async def _open(journal: Journal):  # type: ignore[no-untyped-def]
    stream = journal.follow(1, None, 60.0)
    assert await anext(stream) is None
    return stream


def _report(work: UnitOfWork) -> None:
    work.reports.store(1, ReportBatch(1, [metrics("training", 1, loss=0.5)]))


def _log(work: UnitOfWork) -> None:
    batch = LogBatch(0, [LogEntry("hello", 1.8e9, 0)])
    work.logs.store(1, batch, [], by_run=True)


def _pause(work: UnitOfWork) -> None:
    work.experiments.act(1, "pause")


def _kill(work: UnitOfWork) -> None:
    work.experiments.act(1, "kill")


@pytest.mark.parametrize("change", [_report, _log, _pause, _kill])
def test_reader_before_commit_reads_again(
    sqlite_server: Server, change: Callable[[UnitOfWork], None]
) -> None:
    """A reader that opens its stream during a transaction must read again."""
    server = sqlite_server
    searcher = {"name": "random", "metric": "loss", "max_length": 10, "max_trials": 3}
    server.submit(searcher=searcher)
    server.add_agent()
    server.begin()
    journal, portal = server.services.journal, server.http.portal
    assert portal is not None
    streams = []

    def job(work: UnitOfWork) -> None:
        change(work)
        streams.append(portal.call(_open, journal))

    server.write(job)
    (stream,) = streams
    assert portal.call(_reads_again, stream)
    portal.call(stream.aclose)


async def _reads_again(stream: AsyncGenerator[list[Entry] | None, None]) -> bool:
    """Wait until a stream requests a full reload."""
    async with asyncio.timeout(DEADLINE_S):
        async for entries in stream:
            if entries is None:
                return True
    return False
