"""Who waits for what: long polls by topic, and the journal behind the event streams.

Everything here lives on the event loop's thread; the writer hands its changes over.
"""

import asyncio
import itertools
import secrets
import time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from zeroserver.store.database import Change

__all__ = ["ALL", "LISTED_KINDS", "RELOAD", "Entry", "Hub", "Journal"]

ALL = 0
"""Stands for every experiment, in the stream of the list."""

LISTED_KINDS = frozenset({"experiment", "trial", "cluster"})
"""Events of that stream."""

RELOAD = "reload"
"""Kind of a change whose events are missing from the journal; readers read everything again."""

_ENTRY_BYTES = 400
"""What an event takes beside its data."""


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

    @property
    def size(self) -> int:
        """About how many bytes it takes in memory."""
        return _ENTRY_BYTES + (len(self.resource) if isinstance(self.resource, bytes) else 0)


@dataclass
class Journal:
    """The last events, so that a stream that was cut goes on where it was.

    Events of an experiment are kept from the first reader on until the last one has been gone for
    a minute; a reader whose cursor lies before what is kept is told so and reads everything again.
    Cursors are ``boot-number``: those of an earlier start of the server are never taken for ours.
    """

    hub: Hub
    size: int = 20_000
    """Most events that are kept."""
    most_bytes: int = 16 * 1024**2
    """Most that they take together."""
    linger_s: float = 60.0
    """For how long a reader that has gone may come back to its cursor."""
    held_bytes: int = 0
    boot: str = field(default_factory=lambda: secrets.token_hex(4))
    _entries: deque[Entry] = field(default_factory=deque)
    _last: int = 0
    _kept_after: dict[int, int] = field(default_factory=dict)
    """Experiment (or :data:`ALL`) that has a reader to the number before its first event."""
    _forgotten: int = 0
    """Number of the last event that had to make room, or is missing."""
    _readers: Counter[int] = field(default_factory=Counter)
    _left: dict[int, float] = field(default_factory=dict)
    """When the last reader of an experiment went, in monotonic seconds."""

    def wanted(self, experiment_id: int) -> bool:
        """Whether anyone reads the experiment and trial events of this experiment."""
        return experiment_id in self._kept_after or ALL in self._kept_after

    def followed(self, experiment_id: int) -> bool:
        """Whether anyone reads all events of this experiment: its metrics and logs too."""
        return experiment_id in self._kept_after

    def tidy(self) -> None:
        """Forget the events of experiments that nobody has read for a while."""
        end = time.monotonic() - self.linger_s
        gone = [experiment_id for experiment_id, left in self._left.items() if left <= end]
        for experiment_id in gone:
            del self._left[experiment_id], self._kept_after[experiment_id]
        if gone:
            self._last += 1  # whoever comes back now has a cursor before what is kept
            self._entries = deque(entry for entry in self._entries if self._keeps(entry))
            self.held_bytes = sum(entry.size for entry in self._entries)

    def _keeps(self, entry: Entry) -> bool:
        listed = entry.kind in LISTED_KINDS
        return (self.wanted if listed else self.followed)(entry.experiment_id)

    def publish(self, changes: list[Change]) -> None:
        """Keep the events among ``changes`` and wake the readers; once each for a batch."""
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
        """Name an event for ``Last-Event-ID``."""
        return f"{self.boot}-{number}"

    async def follow(
        self, experiment_id: int, last_event_id: str | None, pause_s: float
    ) -> AsyncGenerator[list[Entry] | None, None]:
        """Yield the events of an experiment as they come, in groups.

        Yields:
            None first when events may have been missed (the reader must read everything again),
            then lists of events; an empty list every ``pause_s`` seconds of silence.
        """
        after = self._resume(experiment_id, last_event_id)
        with self._reading(experiment_id), self.hub.listen(_topic(experiment_id)) as bell:
            if after is None:
                after = self._last
                yield None
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

    @contextmanager
    def _reading(self, experiment_id: int) -> Iterator[None]:
        self._readers[experiment_id] += 1
        self._left.pop(experiment_id, None)
        try:
            yield
        finally:
            self._readers[experiment_id] -= 1
            if not self._readers[experiment_id]:
                del self._readers[experiment_id]
                self._left[experiment_id] = time.monotonic()

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
