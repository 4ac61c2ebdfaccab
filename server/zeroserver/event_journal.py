"""Notification of long polls by topic, and the journal behind the event streams.

All code here runs on the event loop's thread; the writer sends its changes to it.
"""

import asyncio
import itertools
import secrets
import time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from zeroserver.store.database import Change

__all__ = ["ALL", "LISTED_KINDS", "RELOAD", "Entry", "Hub", "Journal"]

ALL = 0
"""Id of the stream of all experiments."""

LISTED_KINDS = frozenset({"experiment", "trial", "cluster"})
"""Kinds of events in that stream."""

RELOAD = "reload"
"""Kind of a change without events in the journal; readers must reload everything."""

_ENTRY_BYTES = 400
"""Memory of an event without its data."""


class Hub:
    """Topics with waiting coroutines that are woken by changes."""

    def __init__(self) -> None:
        self._listeners: defaultdict[str, set[asyncio.Event]] = defaultdict(set)
        self.closed = False

    @contextmanager
    def listen(self, topic: str) -> Iterator[asyncio.Event]:
        """Yield an event that every change of ``topic`` sets."""
        changed = asyncio.Event()
        self._listeners[topic].add(changed)
        if self.closed:
            changed.set()
        try:
            yield changed
        finally:
            self._listeners[topic].discard(changed)
            if not self._listeners[topic]:
                del self._listeners[topic]

    def ring(self, topic: str) -> None:
        """Wake all listeners of ``topic``."""
        for changed in self._listeners.get(topic, ()):
            changed.set()

    def close(self) -> None:
        """Wake all listeners permanently, at shutdown."""
        self.closed = True
        for events in self._listeners.values():
            for changed in events:
                changed.set()


class Entry(msgspec.Struct, frozen=True):
    """Event of the streams."""

    number: int
    experiment_id: int
    kind: str
    resource: Any

    @property
    def size(self) -> int:
        """Approximate size in memory, in bytes."""
        return _ENTRY_BYTES + (len(self.resource) if isinstance(self.resource, bytes) else 0)


class Journal(msgspec.Struct):
    """Journal of recent events, from which an interrupted stream can resume.

    Events of an experiment are kept from its first reader until a minute after its last one. A
    reader with an older cursor must reload everything. Cursors have the form ``boot-number``, which
    identifies cursors of earlier server processes.
    """

    hub: Hub
    size: int = 20_000
    """Maximum number of events."""
    most_bytes: int = 16 * 1024**2
    """Maximum memory of all events."""
    linger_s: float = 60.0
    """Seconds for which a disconnected reader may resume."""
    held_bytes: int = 0
    boot: str = msgspec.field(default_factory=lambda: secrets.token_hex(4))
    _entries: deque[Entry] = msgspec.field(default_factory=deque)
    _last: int = 0
    _kept_after: dict[int, int] = msgspec.field(default_factory=dict)
    """Number before the first kept event, by experiment (or :data:`ALL`) with a reader."""
    _forgotten: int = 0
    """Number of the last event that was dropped or is missing."""
    _readers: Counter[int] = msgspec.field(default_factory=Counter)
    _idle_since: dict[int, float] = msgspec.field(default_factory=dict)
    """Monotonic time at which the last reader of an experiment disconnected."""

    def wanted(self, experiment_id: int) -> bool:
        """Check whether the experiment and trial events of an experiment have a reader."""
        return experiment_id in self._kept_after or ALL in self._kept_after

    def followed(self, experiment_id: int) -> bool:
        """Check whether all events of an experiment, including metrics and logs, have a reader."""
        return experiment_id in self._kept_after

    def tidy(self) -> None:
        """Drop the events of experiments without a recent reader."""
        cutoff = time.monotonic() - self.linger_s
        idle = [
            experiment_id for experiment_id, since in self._idle_since.items() if since <= cutoff
        ]
        for experiment_id in idle:
            del self._idle_since[experiment_id], self._kept_after[experiment_id]
        if idle:
            self._last += 1  # invalidates the cursors of readers that return later
            self._entries = deque(entry for entry in self._entries if self._keeps(entry))
            self.held_bytes = sum(entry.size for entry in self._entries)

    def _keeps(self, entry: Entry) -> bool:
        listed = entry.kind in LISTED_KINDS
        return (self.wanted if listed else self.followed)(entry.experiment_id)

    def publish(self, changes: list[Change]) -> None:
        """Add the events of ``changes`` and wake each reader once."""
        topics = {change.topic for change in changes if change.topic}
        for change in changes:
            if change.kind == RELOAD:
                self._last += 1
                self._forgotten = self._last
                topics |= {_topic(change.experiment_id), _topic(ALL)}
                continue
            entry = Entry(self._last + 1, change.experiment_id, change.kind, change.resource)
            if change.kind and self._keeps(entry):
                self._last = entry.number
                self._entries.append(entry)
                self.held_bytes += entry.size
                topics |= {_topic(change.experiment_id), _topic(ALL)}
        while len(self._entries) > self.size or self.held_bytes > self.most_bytes:
            oldest = self._entries.popleft()
            self.held_bytes -= oldest.size
            self._forgotten = oldest.number
        for topic in topics:
            self.hub.ring(topic)

    def cursor(self, number: int) -> str:
        """Return the cursor of an event for ``Last-Event-ID``."""
        return f"{self.boot}-{number}"

    async def follow(
        self, experiment_id: int, last_event_id: str | None, pause_s: float
    ) -> AsyncGenerator[list[Entry] | None, None]:
        """Yield the events of an experiment in groups as they arrive.

        Yields:
            None if events may have been missed, so that the reader must reload everything. Then
            lists of events; an empty list after ``pause_s`` seconds without events.
        """
        after = self._resume(experiment_id, last_event_id)
        with self._count_reader(experiment_id), self.hub.listen(_topic(experiment_id)) as changed:
            if after is None:
                after = self._last
                yield None
            while not self.hub.closed:
                changed.clear()
                if self._dropped(after):
                    yield None
                entries = self._after(after, experiment_id)
                after = self._last
                yield entries
                try:
                    async with asyncio.timeout(pause_s):
                        await changed.wait()
                except TimeoutError:
                    continue

    @contextmanager
    def _count_reader(self, experiment_id: int) -> Iterator[None]:
        self._readers[experiment_id] += 1
        self._idle_since.pop(experiment_id, None)
        try:
            yield
        finally:
            self._readers[experiment_id] -= 1
            if not self._readers[experiment_id]:
                del self._readers[experiment_id]
                self._idle_since[experiment_id] = time.monotonic()

    def _after(self, number: int, experiment_id: int) -> list[Entry]:
        fresh = itertools.takewhile(lambda entry: entry.number > number, reversed(self._entries))
        return [e for e in fresh if experiment_id in {ALL, e.experiment_id}][::-1]

    def _dropped(self, after: int) -> bool:
        return after < self._forgotten

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
