"""Metrics of the server in Prometheus format."""

from fastapi.responses import PlainTextResponse
from sqlalchemy import Connection, func, select

from zeroserver.access.routes import ACCESS, VIEWER
from zeroserver.api.strict_route import resource_router
from zeroserver.services import ServicesDep
from zeroserver.states import RunState
from zeroserver.store.schema import agents, experiments, runs, trials

__all__ = ["router"]

router = resource_router("", "server")

ACCESS["GET /metrics"] = VIEWER


@router.get("/metrics", response_class=PlainTextResponse)
async def get_numbers(services: ServicesDep) -> PlainTextResponse:
    """Read metrics of the server in Prometheus format."""

    def read(connection: Connection) -> PlainTextResponse:
        lines: list[str] = []
        for name, table in (("experiments", experiments), ("trials", trials), ("runs", runs)):
            query = select(table.c.state, func.count().label("number")).group_by(table.c.state)
            counts = {row.state: row.number for row in connection.execute(query)}
            lines += [
                f"# HELP zerolab_{name} Number of {name} by state.",
                f"# TYPE zerolab_{name} gauge",
            ]
            lines += [
                f'zerolab_{name}{{state="{state}"}} {n}' for state, n in sorted(counts.items())
            ]
        living = connection.scalar(
            select(func.count()).select_from(agents).where(agents.c.alive == 1)
        )
        used_slots = connection.scalar(
            select(func.count()).select_from(runs).where(runs.c.state != RunState.EXITED)
        )
        for name, help_text, value in (
            ("agents", "Agents that are alive.", living),
            ("runs_holding_slots", "Runs that hold slots.", used_slots),
            ("start_time_seconds", "Start of the server since 1970.", services.started_at),
            ("write_groups_total", "Database transactions committed.", services.database.groups),
            ("write_jobs_total", "Changes committed.", services.database.jobs),
            ("write_jobs_waiting", "Changes in the writer's queue.", services.database.waiting),
            (
                "write_stalled_seconds",
                "Time without a commit while changes are pending.",
                services.database.stalled_s,
            ),
            (
                "write_longest_job_cpu_seconds",
                "Maximum CPU time of one change.",
                services.database.longest_job_s,
            ),
        ):
            kind = "counter" if name.endswith("_total") else "gauge"
            full = f"zerolab_{name}"
            lines += [f"# HELP {full} {help_text}", f"# TYPE {full} {kind}", f"{full} {value}"]
        return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")

    return await services.read(read)
