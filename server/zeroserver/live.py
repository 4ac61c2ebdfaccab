"""Who waits for what: long polls by topic, and the journal behind the event streams.

Everything here lives on the event loop's thread; the writer hands its changes over.
"""

import asyncio
import itertools
import secrets
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from zeroserver.store.database import Change

__all__ = ["ALL", "Entry", "Hub", "Journal"]

ALL = 0
"""Stands for every experiment, in the stream of the list."""


class Hub:
    """Bells for those who wait; a change rings the bells of its topic."""

    def __init__(self) -> None:
        self._bells: defaultdict[str, set[asyncio.Event]] = defaultdict(set)
        self.closed = False

    @contextmanager
    def listen(self, topic: str) -> Iterator[asyncio.Event]:
        """A bell that rings at every change of ``topic`` from now on."""
        bell = asyncio.Event()
        self._bells[topic].add(bell)
        if self.closed:
            bell.set()
        try:
            yield bell
        finally:
            self._bells[topic].discard(bell)
            if not self._bells[topic]:
                del self._bells[topic]

    def ring(self, topic: str) -> None:
        """Wake everyone who listens to ``topic``."""
        for bell in self._bells.get(topic, ()):
            bell.set()

    def close(self) -> None:
        """Wake everyone, for good: the server stops."""
        self.closed = True
        for bells in self._bells.values():
            for bell in bells:
                bell.set()


@dataclass(frozen=True)
class Entry:
    """One event of the streams."""

    number: int
    experiment_id: int
    kind: str
    resource: Any


@dataclass
class Journal:
    """The last events, so that a stream that was cut goes on where it was.

    Events of an experiment are kept from the first reader on; a reader whose cursor lies before
    what is kept is told so and reads everything again. Cursors are ``boot-number``: those of an
    earlier start of the server are never taken for ours.
    """

    hub: Hub
    size: int = 20_000
    boot: str = field(default_factory=lambda: secrets.token_hex(4))
    _entries: deque[Entry] = field(default_factory=deque)
    _count: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _last: int = 0
    _kept_after: dict[int, int] = field(default_factory=dict)
    """Experiment (or :data:`ALL`) that has had a reader to the number before its first event."""

    def wanted(self, experiment_id: int) -> bool:
        """Whether anyone has asked for the events of this experiment."""
        return experiment_id in self._kept_after or ALL in self._kept_after

    def publish(self, changes: list[Change]) -> None:
        """Keep the events among ``changes`` and wake the readers; once each for a batch."""
        topics = {change.topic for change in changes if change.topic}
        for change in changes:
            if change.kind and self.wanted(change.experiment_id):
                self._last = next(self._count)
                self._entries.append(
                    Entry(self._last, change.experiment_id, change.kind, change.resource)
                )
                topics |= {_topic(change.experiment_id), _topic(ALL)}
        while len(self._entries) > self.size:
            self._entries.popleft()
        for topic in topics:
            self.hub.ring(topic)

    def cursor(self, number: int) -> str:
        """Name an event for ``Last-Event-ID``."""
        return f"{self.boot}-{number}"

    async def follow(
        self, experiment_id: int, last_event_id: str | None, pause_s: float
    ) -> AsyncIterator[list[Entry] | None]:
        """Yield the events of an experiment as they come, in groups.

        Yields:
            None first when events may have been missed (the reader must read everything again),
            then lists of events; an empty list every ``pause_s`` seconds of silence.
        """
        after = self._resume(experiment_id, last_event_id)
        if after is None:
            after = self._last
            yield None
        with self.hub.listen(_topic(experiment_id)) as bell:
            while not self.hub.closed:
                bell.clear()
                if self._dropped(after):
                    yield None
                found = self._after(after, experiment_id)
                after = self._last
                yield found
                try:
                    async with asyncio.timeout(pause_s):
                        await bell.wait()
                except TimeoutError:
                    continue

    def _after(self, number: int, experiment_id: int) -> list[Entry]:
        fresh = itertools.takewhile(lambda entry: entry.number > number, reversed(self._entries))
        return [e for e in fresh if experiment_id in {ALL, e.experiment_id}][::-1]

    def _dropped(self, after: int) -> bool:
        return bool(self._entries) and self._entries[0].number > after + 1

    def _resume(self, experiment_id: int, last_event_id: str | None) -> int | None:
        kept_after = self._kept_after.setdefault(experiment_id, self._last)
        boot, _, number = (last_event_id or "").partition("-")
        if boot != self.boot or not number.isdecimal():
            return None
        after = int(number)
        if not kept_after <= after <= self._last or self._dropped(after):
            return None
        return after


def _topic(experiment_id: int) -> str:
    return f"events:{experiment_id}"
