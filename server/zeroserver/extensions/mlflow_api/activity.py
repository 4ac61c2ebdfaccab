"""Heartbeats for MLflow's runs, whose clients send none."""

from sqlalchemy import Connection, select

from zeroserver.extensions.external_runs.service import open_external_runs
from zeroserver.extensions.external_runs.supervisor import Heartbeats
from zeroserver.extensions.mlflow_api.tables import mlflow_experiments, mlflow_runs, tables
from zeroserver.services import Services

__all__ = ["LastRequests", "MlflowActivity"]

SILENT_S = 24 * 3600.0
"""Time without a request after which a run of MLflow may count as lost."""


class LastRequests:
    """Time of the last request about each run."""

    def __init__(self) -> None:
        self.times: dict[int, float] = {}


class MlflowActivity:
    """Keeps MLflow's runs open, since an epoch can take longer than other runs may be silent.

    Args:
        services: Services of the server.
    """

    def __init__(self, services: Services) -> None:
        self._services = services
        self._requests = services.part(LastRequests)
        services.database.write_now(lambda transaction: self._prepare(transaction.connection))

    def _prepare(self, connection: Connection) -> None:
        """Create the tables, and note the open runs after a restart of the server."""
        tables.create_all(connection)
        columns = mlflow_experiments.c
        if connection.scalar(select(columns.id).where(columns.id == 0)) is None:
            now = self._services.orchestrator.clock()
            default = {"id": 0, "name": "Default", "owner_id": 1, "stage": "active", "tags": "{}"}
            row = {**default, "created_at": now, "updated_at": now}
            connection.execute(mlflow_experiments.insert().values(row))
        now = self._services.orchestrator.steady()
        open_ids = {row[0] for row in open_external_runs(connection)}
        of_mlflow = connection.execute(select(mlflow_runs.c.run_id))
        self._requests.times.update({row[0]: now for row in of_mlflow if row[0] in open_ids})

    async def tick(self) -> None:
        """Send heartbeats for runs with a request in the last day."""
        now = self._services.orchestrator.steady()
        times, heartbeats = self._requests.times, self._services.part(Heartbeats)
        for run_id, time in list(times.items()):
            if now - time < SILENT_S:
                heartbeats.add(run_id)
            else:
                del times[run_id]

    def close(self) -> None:
        """Do nothing: there is no background work."""
