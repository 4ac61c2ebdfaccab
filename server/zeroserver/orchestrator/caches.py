"""In-memory caches of the services, which outlive a unit of work.

Each cache is an attribute of :class:`~zeroserver.orchestrator.state.Orchestrator`. Only the writer
thread may use a cache, unless its docstring allows any thread. A unit of work that changes a cache
appends the reversal to its ``undo``.
"""

import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from zerolab.contract.limits import SLOTS
from zerolab.contract.messages import AgentLoad
from zerolab.scheduler import Job, RecentUsage
from zerolab.searcher import Deferred
from zeroserver.orchestrator.cluster.wait_reasons import Waiting
from zeroserver.store.points import MetricKeys

if TYPE_CHECKING:  # imported with the first experiment: saves 0.1 s at startup
    from zerolab.config.experiment.experiment_config import ExperimentConfig
    from zerolab.searcher import Operation, Searcher

__all__ = [
    "HISTORY_MINUTES",
    "AgentHeartbeats",
    "ConfigCache",
    "Deletions",
    "LoadHistory",
    "MetricCache",
    "QueueCache",
    "SearchCache",
]

_PARSING_COST = 4
"""Cost of a change whose configuration must be parsed first, relative to other changes."""
_LATE = 1.5
"""Delay of a tick, in periods, above which the server is assumed to have been suspended."""
HISTORY_MINUTES = 60
"""Length of the history of the load of slots."""
SlotPercents = tuple[int, int, list[float | None]]
"""Agent, slot, and its load in percent in each minute."""

_LOAD_S = 60.0
"""Time after which the load of an agent that sent no newer one is unknown."""


class ConfigCache(msgspec.Struct):
    """Parsed configurations of experiments that have not ended."""

    configs: dict[int, "ExperimentConfig"] = msgspec.field(default_factory=dict)
    secrets: dict[int, tuple[str, ...]] = msgspec.field(default_factory=dict)
    """Experiment to the secret values of its configuration."""

    def affordable(self, experiment_ids: Iterable[int], most: int) -> int:
        """Return how many changes one transaction should make.

        After a start of the server no configuration is cached, and parsing one costs as much as
        several changes.

        Args:
            experiment_ids: Experiment of each change, in order.
            most: Number of changes if all configurations are cached.
        """
        cost = number = 0
        parsed: set[int] = set()
        for experiment_id in experiment_ids:
            known = experiment_id in self.configs or experiment_id in parsed
            cost += 1 if known else _PARSING_COST
            if cost > most and number:
                break
            parsed.add(experiment_id)
            number += 1
        return number

    def forget(self, experiment_id: int) -> None:
        """Drop an experiment's cached configuration; the next use reads it again."""
        self.configs.pop(experiment_id, None)
        self.secrets.pop(experiment_id, None)


class SearchCache(msgspec.Struct):
    """Searchers and their operations."""

    searchers: dict[int, "Searcher"] = msgspec.field(default_factory=dict)
    backlog: dict[int, "tuple[Operation, ...]"] = msgspec.field(default_factory=dict)
    """Experiment to the operations that did not fit into one transaction, or are deferred."""
    in_progress: "dict[int, deque[Operation]]" = msgspec.field(default_factory=dict)
    """Experiment to the pending operations of the current transaction; empty between them."""
    lost: dict[int, str] = msgspec.field(default_factory=dict)
    """Experiment to the reason why its replay failed; the next tick ends the experiment."""
    replays: dict[int, Any] = msgspec.field(default_factory=dict)
    """Experiment to a replay of its search for a later transaction; used by any thread."""
    ended_views: dict[int, tuple[int, Any]] = msgspec.field(default_factory=dict)
    """Ended experiment to its last event and the view of its search; used by any thread."""
    custom: set[int] | None = None
    """Experiments with a custom searcher; None until they are read."""
    served: dict[int, float] = msgspec.field(default_factory=dict)
    """Experiment to the steady time of the last request for its searcher's events."""

    @property
    def has_deferred(self) -> bool:
        """Whether a backlog begins with a deferred operation; used by any thread."""
        return any(isinstance(backlog[0], Deferred) for backlog in list(self.backlog.values()))


class QueueCache(msgspec.Struct):
    """Queue entries and the results of the last scheduling round."""

    jobs: dict[int, Job] = msgspec.field(default_factory=dict)
    """Experiment to its queue entry."""
    waiting: Waiting = msgspec.field(default_factory=Waiting)
    """Why trials wait; immutable, replaced after each round, so any thread may read it."""
    unfinished: bool = False
    """Whether the next tick must start or end more runs."""
    unapplied: set[int] = msgspec.field(default_factory=set)
    """Experiments with trials that do not follow the experiment's state yet."""
    usage: RecentUsage | None = None
    """Recent usage by user; None until it is read from the runs. It is immutable and replaced after
    each round, so any thread may read it."""
    point_budget: int = 0
    """Number of points of former runs that the current transaction may still delete."""

    def drop(self, experiment_ids: Iterable[int]) -> None:
        """Drop the cached queue entries of experiments; the next use reads them again."""
        for experiment_id in experiment_ids:
            self.jobs.pop(experiment_id, None)


class LoadHistory(msgspec.Struct):
    """Mean load of each slot in each minute of the last hour, lost at a restart of the server."""

    slots: dict[int, dict[int, deque[tuple[int, float, int]]]] = msgspec.field(default_factory=dict)
    """Agent to slot to minutes, oldest first: number of the minute, sum and count of its
    measurements."""

    def add(self, agent_id: int, load: AgentLoad, at_s: float) -> None:
        """Add a measurement of an agent, made at a monotonic time."""
        minute = int(at_s // 60)
        slots = self.slots.setdefault(agent_id, {})
        percents = dict.fromkeys(slots, 0.0)  # an agent reports no idle slots without a GPU
        for slot in load.slots:
            percent = slot.cpu_percent if slot.gpu_percent is None else slot.gpu_percent
            percents[slot.id] = percent or 0.0
        for slot_id, percent in percents.items():
            if slot_id not in slots and len(slots) >= SLOTS:
                continue
            minutes = slots.setdefault(slot_id, deque(maxlen=HISTORY_MINUTES))
            total, count = 0.0, 0
            if minutes and minutes[-1][0] == minute:
                _, total, count = minutes.pop()
            minutes.append((minute, total + percent, count + 1))

    def percents(self, at_s: float, agent_ids: Collection[int]) -> Iterator[SlotPercents]:
        """Yield agent, slot and the mean load in percent of each minute until a monotonic time.

        There is one value for each minute of the last hour, the current one included; None for a
        minute without a measurement. Slots without any are left out, and the loads of agents other
        than ``agent_ids`` are dropped.
        """
        first = int(at_s // 60) - HISTORY_MINUTES + 1
        for agent_id, slots in sorted(self.slots.copy().items()):
            if agent_id not in agent_ids:
                self.slots.pop(agent_id, None)
                continue
            for slot_id, minutes in sorted(slots.copy().items()):
                means = {at: round(total / count, 1) for at, total, count in minutes.copy()}
                values = [means.get(first + index) for index in range(HISTORY_MINUTES)]
                if any(value is not None for value in values):
                    yield agent_id, slot_id, values


class AgentHeartbeats(msgspec.Struct):
    """Last requests of agents for work, and the load that they measured.

    Args:
        tick_s: Seconds between two ticks of the server.
    """

    tick_s: float
    started: float = msgspec.field(default_factory=time.monotonic)
    """Monotonic time of the server's start, plus the time for which it was suspended."""
    seen: dict[int, float] = msgspec.field(default_factory=dict)
    """Agent to the monotonic time of its last request; written by the event loop."""
    ticked: float = msgspec.field(default_factory=time.monotonic)
    """Monotonic time of the last tick."""
    loads: dict[int, tuple[float, AgentLoad]] = msgspec.field(default_factory=dict)
    """Agent to the monotonic time and content of its last measurement; any thread reads it."""
    history: LoadHistory = msgspec.field(default_factory=LoadHistory)
    """Loads of the last hour, written by the event loop; any thread reads them."""

    def note_request(self, agent_id: int, load: AgentLoad | None) -> None:
        """Record a request of an agent for work, with its load if that is new."""
        now = self.seen[agent_id] = time.monotonic()
        if load is not None:
            self.loads[agent_id] = now, load
            self.history.add(agent_id, load, now)

    def load_of(self, agent_id: int) -> AgentLoad | None:
        """Return the load of an agent; None if it did not report any within a minute."""
        at, load = self.loads.get(agent_id, (0.0, None))
        return load if time.monotonic() - at < _LOAD_S else None

    def silence_s(self, agent_id: int) -> float:
        """Return the seconds since an agent's last request, or since the server's start.

        Excludes the time for which the server was suspended and could not receive requests.
        """
        now = time.monotonic()
        return now - self.seen.get(agent_id, self.started) - self._suspended_s(now)

    def note_tick(self) -> None:
        """Record a tick and exclude the time for which the server was suspended before it."""
        now = time.monotonic()
        suspended = self._suspended_s(now)
        if suspended:
            self.started = min(now, self.started + suspended)
            self.seen |= {agent: min(now, at + suspended) for agent, at in list(self.seen.items())}
        self.ticked = now

    def _suspended_s(self, now: float) -> float:
        """Return the seconds by which the next tick is later than on a busy server."""
        return max(0.0, now - self.ticked - _LATE * self.tick_s)


class MetricCache(msgspec.Struct):
    """Metric names and their use by trials."""

    keys: MetricKeys = msgspec.field(default_factory=MetricKeys)
    reported: dict[int, set[int]] = msgspec.field(default_factory=dict)
    """Reporting trial to the ids of its metrics."""
    admitted: set[int] = msgspec.field(default_factory=set)
    """Metrics that trials started to use since the last search for unused names."""
    purge_due: bool = False
    """Whether metric names may be unused, because trials were deleted."""
    thinned: tuple[int, ...] | None = None
    """Position of the removal of old points; None if none is in progress."""
    warned: dict[tuple[int, str], None] = msgspec.field(default_factory=dict)
    """Run and kind of problem of each warning that is already logged."""


class Deletions(msgspec.Struct):
    """Deletions that take several transactions, and trials exempt from them."""

    orphans: deque[int] = msgspec.field(default_factory=deque)
    """Deleted trials whose points and logs are not deleted yet."""
    retention_due: set[int] = msgspec.field(default_factory=set)
    """Experiments whose retention policy must still be applied."""
    archives: set[str] = msgspec.field(default_factory=set)
    """Archives that will be removed after the commit."""
    importing: set[int] = msgspec.field(default_factory=set)
    """Trials that are being imported: they have points but no row yet."""
