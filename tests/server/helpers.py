"""Server in the test process, driven by requests of its owner and of an agent."""

import itertools
import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sqlalchemy import text
from sqlalchemy.util import LRUCache

from tests.waiting import DEADLINE_S, until
from zerolab.client.archive import pack
from zerolab.contract.messages import (
    MSGPACK,
    AgentWork,
    CheckpointRecord,
    LogBatch,
    LogEntry,
    MetricsRecord,
    ProgressRecord,
    Record,
    ReportBatch,
    RunExit,
    WorkItem,
)
from zerolab.contract.spec import RunSpec
from zeroserver.app import create_app
from zeroserver.orchestrator.unit_of_work import UnitOfWork
from zeroserver.services import Services
from zeroserver.settings import Limits, Settings, Timings
from zeroserver.store.database import Transaction

PREFIX = "/api/v1"

PLAYED = Timings(tick_s=3600.0, storage_check_s=3600.0, agent_silent_s=1e7, agent_dead_s=1e8)
"""Timings for tests that control the clock and the agents: no periodic ticks, no silent agents."""
SILENT_S, GONE_S = 2e7, 2e8
"""Seconds until an agent is silent and until it is lost, with :data:`PLAYED`."""
ENGINE = {"train_batch_size": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
on_sqlite = pytest.mark.parametrize("server", ["sqlite"], indirect=True)
"""A test of ``server`` on SQLite alone: other tests run its SQL statements on PostgreSQL."""


def experiment_config(**changes: Any) -> dict[str, Any]:
    """Return a valid experiment config with changes to its top level."""
    return {
        "name": "digits",
        "entrypoint": "model_def:Trial",
        "hyperparameters": {"deepspeed_config": "ds_config.json"},
        "searcher": {"name": "single", "metric": "loss", "max_length": 100},
        **changes,
    }


def model_archive(directory: Path, engine: Mapping[str, Any] | str | None = None) -> bytes:
    """Return the archive of a model directory with an engine file."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "model_def.py").write_text(
        "import zerotrial\n\n\nclass Trial(zerotrial.ZeroTrial): ...\n"
    )
    content = engine if isinstance(engine, str) else json.dumps(engine or ENGINE)
    (directory / "ds_config.json").write_text(content)
    return pack(directory)


class Clock:
    """Manual clock that a test advances."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0
        self.set_back = 0.0
        """Seconds by which the wall clock was set back."""

    def __call__(self) -> float:
        return self.now - self.set_back

    def steady(self) -> float:
        """Return monotonic time, which no administrator can set."""
        return self.now


@dataclass
class Server:
    """A server and its owner."""

    app: FastAPI
    http: TestClient
    token: str
    directory: Path
    clock: Clock
    _numbers: dict[int, Iterator[int]] = field(default_factory=dict)

    @property
    def services(self) -> Services:
        services: Services = self.app.state.services
        return services

    def request(self, method: str, path: str, **content: Any) -> Any:
        """Send a request that must succeed; return the JSON of the response."""
        response = self.http.request(method, PREFIX + path, **content)
        assert response.is_success, f"{method} {path}: {response.status_code} {response.text}"
        return response.json() if response.content else None

    def get(self, path: str, **params: Any) -> Any:
        return self.request("GET", path, params=params)

    def post(self, path: str, body: Any = None) -> Any:
        return self.request("POST", path, json=body)

    def submit(self, activate: bool = True, test: bool = False, **changes: Any) -> dict[str, Any]:
        response = self.try_submit(activate, test, **changes)
        assert response.is_success, response.text
        experiment: dict[str, Any] = response.json()["experiment"]
        return experiment

    def try_submit(self, activate: bool = True, test: bool = False, **changes: Any) -> Any:
        """Submit; return the whole response."""
        archive = model_archive(self.directory / "model")
        files = {"archive": ("model.tar.gz", archive)}
        data = {"config": json.dumps(experiment_config(**changes))}
        params = {"activate": activate, "test": test}
        return self.http.post(f"{PREFIX}/experiments", data=data, files=files, params=params)

    def experiment(self, experiment_id: int = 1) -> dict[str, Any]:
        row: dict[str, Any] = self.get(f"/experiments/{experiment_id}")["experiment"]
        return row

    def trial(self, trial_id: int = 1) -> dict[str, Any]:
        row: dict[str, Any] = self.get(f"/trials/{trial_id}")["trial"]
        return row

    def trials(self, experiment_id: int = 1) -> list[dict[str, Any]]:
        path = f"/experiments/{experiment_id}/trials"
        rows: list[dict[str, Any]] = self.get(path, limit=1000)["trials"]
        return rows

    def act(self, action: str, experiment_id: int = 1) -> dict[str, Any]:
        row: dict[str, Any] = self.post(f"/experiments/{experiment_id}/{action}")["experiment"]
        return row

    def add_agent(
        self,
        slots: int = 1,
        name: str = "agent",
        *,
        pool: str = "default",
        per_node: int = 0,
        up: int | None = None,
        host: str = "here",
    ) -> int:
        devices: list[dict[str, Any]] = [{"id": id_, "device": "cpu"} for id_ in range(slots)]
        for device in devices if up is not None else ():
            device["down"] = device["id"] >= up
        for device in devices if per_node else ():
            device["node"] = device["id"] // per_node
        body = {"name": name, "host": host, "slots": devices, "pool": pool}
        agent_id: int = self.post("/agents", body)["agent_id"]
        return agent_id

    def work(self, agent_id: int = 1) -> list[WorkItem]:
        """Return the runs that the server assigned to an agent."""
        response = self.http.get(f"{PREFIX}/agents/{agent_id}/work", params={"wait_s": 0})
        assert response.is_success, response.text
        return msgspec.json.decode(response.content, type=AgentWork).runs

    def wait_for_runs(self, count: int) -> list[WorkItem]:
        """Wait until the agent has ``count`` runs; a previously silent agent gets them later."""
        return until(f"{count} runs are assigned", self.work, lambda runs: len(runs) == count)

    def run_of(self, trial_id: int = 1, agent_id: int = 1) -> WorkItem:
        return next(item for item in self.work(agent_id) if item.spec.trial_id == trial_id)

    def begin(self, trial_id: int = 1, agent_id: int = 1) -> RunSpec:
        """Start the assigned run of a trial."""
        item = self.run_of(trial_id, agent_id)
        self.post(f"/runs/{item.run_id}/started", {})
        return item.spec

    def send(self, run_id: int, first: int, records: list[Record]) -> Any:
        """Send a batch; return the whole response."""
        body = msgspec.msgpack.encode(ReportBatch(first, records))
        headers = {"Content-Type": MSGPACK}
        return self.http.post(f"{PREFIX}/runs/{run_id}/reports", content=body, headers=headers)

    def report(self, run_id: int, *records: Record) -> None:
        """Send records in order, one batch each."""
        numbers = self._numbers.setdefault(run_id, itertools.count(1))
        for record in records:
            number = next(numbers)
            response = self.send(run_id, number, [record])
            assert response.is_success, response.text
            assert response.json() == {"stored": number}

    def exit(
        self,
        run_id: int,
        code: int,
        reason: str | None = None,
        tail: str = "",
        unread: list[str] | None = None,
    ) -> None:
        body = msgspec.to_builtins(RunExit(code, reason, tail, unread_hparams=unread))
        self.post(f"/runs/{run_id}/exited", body)

    def log(self, run_id: int, first: int, *lines: str, rank: int | None = 0) -> int:
        batch = LogBatch(first, [LogEntry(line, time.time(), rank) for line in lines])
        stored: int = self.post(f"/runs/{run_id}/logs", msgspec.to_builtins(batch))["stored"]
        return stored

    def directive(self, run_id: int) -> str:
        action: str = self.get(f"/runs/{run_id}/directive", wait_s=0)["action"]
        return action

    def tick(self, seconds: float = 0.0) -> None:
        """Advance the clock and run the periodic tick."""
        self.clock.now += seconds
        self.write(lambda work: work.periodic.tick())

    def write(self, job: Callable[[UnitOfWork], Any]) -> Any:
        """Run a job of the orchestrator."""
        orchestrator = self.services.orchestrator
        return self.services.database.write_now(
            lambda transaction: job(UnitOfWork(orchestrator, transaction))
        )

    @contextmanager
    def writer_held(self) -> Iterator[Callable[[], int]]:
        """Block the writer until the block ends; yield a function that counts waiting jobs."""
        # The jobs of the server's start would be counted with those of the test.
        until("the first tick is over", lambda: self.services.ticks)
        begun, let_go = threading.Event(), threading.Event()

        def hold(_transaction: Transaction) -> None:
            begun.set()
            let_go.wait(DEADLINE_S)

        blocked = self.services.database.submit(hold)
        try:
            assert begun.wait(DEADLINE_S)
            yield lambda: self.services.database.waiting
        finally:
            let_go.set()
            blocked.result()

    def execute(self, statement: str, **values: Any) -> None:
        """Change rows directly in the database."""
        self.write(lambda work: work.connection.execute(text(statement), values))

    def sql(self, statement: str) -> list[tuple[Any, ...]]:
        with self.services.database.read() as connection:
            return [tuple(row) for row in connection.execute(text(statement))]


class _Statements(LRUCache[Any, Any]):
    """Compiled SQL statements of all servers, since each would compile the same ones again."""

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(self._shared(key), default)

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(self._shared(key), value)

    @staticmethod
    def _shared(key: Any) -> tuple[Any, ...]:
        dialect, *others = key
        return (dialect.name, *others)


_statements = _Statements(5000)


@contextmanager
def serve(
    directory: Path,
    database_url: str = "",
    timings: Timings | None = None,
    clock: Clock | None = None,
    limits: Limits | None = None,
) -> Iterator[Server]:
    """Run a server in this process until the block ends."""
    home = directory / "home"
    settings = Settings(
        home=home,
        database_url=database_url,
        timings=timings or PLAYED,
        limits=limits or Limits(),
        synchronous="normal",  # no power failure here: a commit waits for no disk
    )
    app = create_app(settings)
    services: Services = app.state.services
    services.url = "http://127.0.0.1"
    database = services.database
    for engine in (database._readers, database._writers):
        engine.update_execution_options(compiled_cache=_statements)
    clock = clock or Clock()
    services.orchestrator.clock, services.orchestrator.steady = clock, clock.steady
    token = services.keys.token
    headers = {"Authorization": f"Bearer {token}"}
    with TestClient(
        app, "http://127.0.0.1", headers=headers, raise_server_exceptions=False
    ) as http:
        yield Server(app, http, token, directory, clock)


def metrics(group: str, steps: int, **values: float | str) -> MetricsRecord:
    return MetricsRecord(group, steps, dict(values), 1_800_000_000.0 + steps)


def validation(steps: int, loss: float | str, **more: float | str) -> MetricsRecord:
    return metrics("validation", steps, loss=loss, **more)


def training(steps: int, loss: float | str) -> MetricsRecord:
    return metrics("training", steps, loss=loss)


def progress(value: float) -> ProgressRecord:
    return ProgressRecord(value, 1_800_000_000.0)


def checkpoint(steps: int, name: str = "") -> CheckpointRecord:
    """Return a checkpoint whose uuid is derived from its steps and ``name``."""
    checkpoint_uuid = str(uuid.uuid5(uuid.NAMESPACE_OID, f"{name}{steps}"))
    return CheckpointRecord(
        checkpoint_uuid, steps, {"weights": 10}, {"note": "x"}, 1_800_000_000.0 + steps
    )
