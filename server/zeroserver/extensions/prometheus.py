"""Metrics of the server in Prometheus format."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

from fastapi.responses import PlainTextResponse
from sqlalchemy import Connection, func, select

from zeroserver.access.request_times import BOUNDS_S, RequestTimes
from zeroserver.access.routes import ACCESS, VIEWER
from zeroserver.api.cluster.cluster_queries import agent_list
from zeroserver.api.resources import Agent, Slot
from zeroserver.api.strict_route import resource_router
from zeroserver.orchestrator.state import Orchestrator
from zeroserver.services import Services, ServicesDep
from zeroserver.states import RunState, TrialState
from zeroserver.store.schema import agents, experiments, runs, trials

__all__ = ["router"]

router = resource_router("", "server")

ACCESS["GET /metrics"] = VIEWER

Labels = tuple[tuple[str, str], ...]
_MACHINE_LOADS = {
    "cpu_percent": "CPU time of the machine of an agent, of all cores together.",
    "memory_bytes": "Memory in use on the machine of an agent.",
    "disk_bytes": "Used bytes of the disk with the data directory of an agent.",
}
_SLOT_LOADS = {
    "cpu_percent": "CPU time of the run in a slot; 100 is one core.",
    "memory_bytes": "Resident memory of the run in a slot.",
    "gpu_percent": "Utilization of the GPU of a slot.",
    "gpu_memory_bytes": "Used memory of the GPU of a slot.",
}
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


@router.get("/metrics", response_class=PlainTextResponse)
async def get_numbers(services: ServicesDep) -> PlainTextResponse:
    """Read metrics of the server in Prometheus format."""

    def read(connection: Connection) -> list[str]:
        return [
            *_state_lines(connection),
            *_slot_lines(services.orchestrator, connection),
            *_load_lines(services.orchestrator, connection),
            *_queue_lines(services.orchestrator, connection),
            *_server_lines(services, connection),
        ]

    lines = await services.read(read)
    lines += _request_lines(services.request_times)
    return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")


def _metric(
    name: str, kind: str, help_text: str, values: Iterable[tuple[str, Labels, float]]
) -> Iterator[str]:
    """Yield the lines of a metric; each value has a suffix of the name, and labels."""
    yield f"# HELP zerolab_{name} {help_text}"
    yield f"# TYPE zerolab_{name} {kind}"
    for suffix, labels, value in values:
        text = ",".join(f'{label}="{item.translate(_ESCAPES)}"' for label, item in labels)
        yield f"zerolab_{name}{suffix}{f'{{{text}}}' if text else ''} {value}"


def _gauge(name: str, help_text: str, values: Mapping[Labels, float]) -> Iterator[str]:
    items = (("", labels, value) for labels, value in sorted(values.items()))
    return _metric(name, "gauge", help_text, items)


def _state_lines(connection: Connection) -> Iterator[str]:
    for name, table in (("experiments", experiments), ("trials", trials), ("runs", runs)):
        query = select(table.c.state, func.count().label("number")).group_by(table.c.state)
        counts: dict[Labels, float] = {
            (("state", row.state),): row.number for row in connection.execute(query)
        }
        yield from _gauge(name, f"Number of {name} by state.", counts)


def _slot_lines(orchestrator: Orchestrator, connection: Connection) -> Iterator[str]:
    """Yield the slots of live agents by pool, state and user."""
    query = select(runs.c.id, experiments.c.owner_id).join(
        experiments, experiments.c.id == runs.c.experiment_id
    )
    owners = {
        row.id: orchestrator.users.name_of(row.owner_id)
        for row in connection.execute(query.where(runs.c.state != RunState.EXITED))
    }
    slots: Counter[Labels] = Counter()
    for agent in agent_list(orchestrator, connection):
        for slot in agent.slots if agent.alive else ():
            user = "" if slot.run_id is None else owners.get(slot.run_id, "")
            state = _slot_state(agent, slot)
            slots[("pool", agent.pool), ("state", state), ("user", user)] += 1
    return _gauge("slots", "Slots of live agents by pool, state and user.", slots)


def _load_lines(orchestrator: Orchestrator, connection: Connection) -> Iterator[str]:
    """Yield the load of the machines and slots whose agents report it."""
    machines: dict[str, dict[Labels, float]] = {name: {} for name in _MACHINE_LOADS}
    slots: dict[str, dict[Labels, float]] = {name: {} for name in _SLOT_LOADS}
    for agent in agent_list(orchestrator, connection):
        label = ("agent", agent.name)
        for name, machine_values in machines.items() if agent.load else ():
            machine_values[label,] = getattr(agent.load, name)
        for slot in agent.slots:
            for name, values in slots.items():
                value = getattr(slot.load, name, None)
                if value is not None:
                    values[label, ("slot", str(slot.id))] = value
    for name, help_text in _MACHINE_LOADS.items():
        yield from _gauge(f"agent_{name}", help_text, machines[name])
    for name, help_text in _SLOT_LOADS.items():
        yield from _gauge(f"slot_{name}", help_text, slots[name])


def _slot_state(agent: Agent, slot: Slot) -> str:
    if slot.run_id is not None:
        return "used"
    if slot.down:
        return "down"
    return "free" if slot.enabled and agent.state == "ready" else "disabled"


def _queue_lines(orchestrator: Orchestrator, connection: Connection) -> Iterator[str]:
    """Yield the waiting trials and the slots that they need, by pool and user."""
    columns = experiments.c
    query = (
        select(columns.pool, columns.owner_id, func.count(), func.sum(columns.slots))
        .join(trials, trials.c.experiment_id == columns.id)
        .where(trials.c.state == TrialState.QUEUED)
        .group_by(columns.pool, columns.owner_id)
    )
    waiting: dict[Labels, float] = {}
    needed: dict[Labels, float] = {}
    for pool, owner_id, count, slots in connection.execute(query):
        labels = (("pool", pool), ("user", orchestrator.users.name_of(owner_id)))
        waiting[labels], needed[labels] = count, slots
    yield from _gauge("queued_trials", "Trials in the queue by pool and user.", waiting)
    yield from _gauge("queued_slots", "Slots that the trials in the queue need.", needed)


def _server_lines(services: Services, connection: Connection) -> Iterator[str]:
    alive = select(func.count()).select_from(agents).where(agents.c.alive == 1)
    open_runs = select(func.count()).select_from(runs).where(runs.c.state != RunState.EXITED)
    database = services.database
    for name, help_text, value in (
        ("agents", "Agents that are alive.", connection.scalar(alive)),
        ("runs_holding_slots", "Runs that use slots.", connection.scalar(open_runs)),
        ("start_time_seconds", "Unix time of the start of the server.", services.started_at),
        ("write_groups_total", "Database transactions committed.", database.groups),
        ("write_jobs_total", "Changes committed.", database.jobs),
        ("write_jobs_waiting", "Changes in the writer's queue.", database.waiting),
        ("write_stalled_seconds", "Time without a commit while changes are pending.",
         database.stalled_s),
        ("write_longest_job_cpu_seconds", "Maximum CPU time of one change.",
         database.longest_job_s),
    ):  # fmt: skip
        kind = "counter" if name.endswith("_total") else "gauge"
        yield from _metric(name, kind, help_text, [("", (), value or 0)])


def _request_lines(times: RequestTimes) -> Iterator[str]:
    """Yield histograms of the requests by route."""

    def values() -> Iterator[tuple[str, Labels, float]]:
        for (method, path), histogram in sorted(times.histograms.items()):
            labels = (("method", method), ("route", path))
            *counts, total = accumulate(histogram.counts)
            for bound, count in zip(BOUNDS_S, counts, strict=True):
                yield "_bucket", (*labels, ("le", str(bound))), count
            yield "_bucket", (*labels, ("le", "+Inf")), total
            yield "_sum", labels, histogram.total_s
            yield "_count", labels, total

    help_text = "Duration of requests by route, without long polling and event streams."
    return _metric("http_request_duration_seconds", "histogram", help_text, values())
