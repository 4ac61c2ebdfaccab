"""In-memory caches of the services, which outlive a unit of work.

Each cache is an attribute of :class:`~zeroserver.orchestrator.state.Orchestrator`. Only the writer
thread may use a cache, unless its docstring allows any thread. A unit of work that changes a cache
appends the reversal to its ``undo``.
"""

import time
from collections import deque
from collections.abc import Iterable
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
_LOAD_S = 60.0
"""Time after which the load of an agent that sent no newer one is unknown."""
_HISTORY_MINUTES = 60
"""Length of the history of the load of slots."""


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


class LoadMinutes(msgspec.Struct):
    """Measured loads, summed by minute."""

    gpu: bool = False
    """Whether they are the utilization of a GPU, else CPU time."""
    sums: deque[tuple[int, float, int]] = msgspec.field(
        default_factory=lambda: deque(maxlen=_HISTORY_MINUTES)
    )
    """Number of the minute, sum and count of its measurements in percent; oldest first."""

    def add(self, minute: int, percent: float) -> None:
        """Add a measurement."""
        if self.sums and self.sums[-1][0] == minute:
            _, total, count = self.sums[-1]
            self.sums[-1] = minute, total + percent, count + 1
        else:
            self.sums.append((minute, percent, 1))

    def by_minute(self) -> dict[int, tuple[float, int]]:
        """Return sum and count of the measurements of each minute."""
        return {minute: (total, count) for minute, total, count in self.sums.copy()}


class LoadHistory(msgspec.Struct):
    """Load of the slots in the last hour, lost at a restart of the server.

    The event loop writes it; any thread reads it.
    """

    agents: dict[int, LoadMinutes] = msgspec.field(default_factory=dict)
    """Agent to the CPU load of its machine."""
    slots: dict[int, dict[int, LoadMinutes]] = msgspec.field(default_factory=dict)
    """Agent to the loads of its slots."""

    def add(self, agent_id: int, load: AgentLoad, at_s: float) -> None:
        """Add a measurement of an agent, made at a monotonic time."""
        minute = int(at_s // 60)
        self.agents.setdefault(agent_id, LoadMinutes()).add(minute, load.cpu_percent)
        slots = self.slots.setdefault(agent_id, {})
        for slot in load.slots:
            gpu = slot.gpu_percent is not None
            percent = slot.gpu_percent if gpu else slot.cpu_percent
            if percent is None or (slot.id not in slots and len(slots) >= SLOTS):
                continue
            if slot.id not in slots or slots[slot.id].gpu != gpu:
                slots[slot.id] = LoadMinutes(gpu)
            slots[slot.id].add(minute, percent)
        oldest = minute - _HISTORY_MINUTES + 1
        for slot_id in [key for key, loads in slots.items() if loads.sums[-1][0] < oldest]:
            del slots[slot_id]

    def hour(self, agent_id: int, slot_id: int, at_s: float) -> tuple[bool, list[float | None]]:
        """Return the load of a slot in the hour before a monotonic time.

        Returns:
            Whether it is the utilization of the GPU, and the mean of each minute in percent, oldest
            first; None for a minute without a measurement. No means if the slot had no load.
        """
        loads = self.slots.get(agent_id, {}).get(slot_id)
        if loads is None:
            return False, []
        sums = loads.by_minute()
        # An agent does not report a slot without a GPU while it is free: its load is 0 then.
        counted = loads if loads.gpu else self.agents.get(agent_id, loads)
        counts = {minute: count for minute, (_, count) in counted.by_minute().items()}
        last = int(at_s // 60)
        hour = range(last - _HISTORY_MINUTES + 1, last + 1)
        if not any(minute in hour for minute in sums):
            return loads.gpu, []
        totals = {minute: total for minute, (total, _) in sums.items()}
        return loads.gpu, [
            round(totals.get(minute, 0.0) / counts[minute], 1) if minute in counts else None
            for minute in hour
        ]


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
    """Loads of the last hour."""

    def note_request(self, agent_id: int, load: AgentLoad | None) -> None:
        """Record a request of an agent for work, with its load if that is new."""
        now = self.seen[agent_id] = time.monotonic()
        if load is not None:
            self.loads[agent_id] = now, load
            self.history.add(agent_id, load, now)

    def forget(self, agent_id: int) -> None:
        """Drop everything about a deleted agent, whose id may be used again."""
        history = self.history
        by_agent: tuple[dict[int, Any], ...] = (
            self.seen, self.loads, history.agents, history.slots,
        )  # fmt: skip
        for values in by_agent:
            values.pop(agent_id, None)

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
