"""Limits for a trial: metric names, log volume, retention, transaction size."""

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.server.helpers import Server, metrics, serve, training, validation
from zerolab.contract.messages import MSGPACK, LogBatch, LogEntry
from zeroserver.settings import Limits

DAY_S = 86400.0


@pytest.fixture
def limited_server(server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """Server with low limits for names and logs."""
    limits = Limits(metric_names=20, log_bytes=20_000)
    msgspec.structs.force_setattr(server.services.settings, "limits", limits)
    return server


def running(server: Server, **changes: Any) -> int:
    server.submit(**changes)
    server.add_agent()
    return server.begin().run_id


def log_of(server: Server) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = server.get("/trials/1/logs", limit=1000)["logs"]
    return lines


def warnings_of(server: Server) -> list[str]:
    return [line["text"] for line in log_of(server) if line["stream"] == "server"]


def names_of(server: Server) -> set[str]:
    return {row["name"] for row in server.get("/trials/1/metric-names")["names"]}


def send_log(server: Server, run_id: int, first: int, lines: list[str]) -> int:
    entries = [LogEntry(line, time.time(), 0) for line in lines]
    response = server.http.post(
        f"/api/v1/runs/{run_id}/logs",
        content=msgspec.msgpack.encode(LogBatch(first, entries)),
        headers={"Content-Type": MSGPACK},
    )
    assert response.is_success, response.text
    stored: int = response.json()["stored"]
    return stored


def test_metric_names_over_limit_are_discarded(limited_server: Server) -> None:
    run_id = running(limited_server)
    many = {f"sample_{number}": 1.0 for number in range(100)}
    limited_server.report(run_id, metrics("training", 1, lr=0.5, **many), training(2, 0.25))
    limited_server.report(run_id, metrics("training", 3, lr=0.125, **many), validation(3, 0.75))
    names = names_of(limited_server)
    assert len(names) == 21  # the searcher's metric is stored in any case
    assert {"lr", "sample_18", "loss"} <= names
    (warning,) = warnings_of(limited_server)
    assert "metric names: must be at most 20 in a trial, got 81 more in one report" in warning
    assert "--metric-names" in warning
    assert limited_server.trial()["best_validation"] == 0.75
    points = limited_server.get("/trials/1/metrics", group="training", names="lr")["metrics"][0][
        "points"
    ]
    assert points == [[1, 0.5], [3, 0.125]]


def test_empty_name_is_discarded_without_searcher_metric(limited_server: Server) -> None:
    limited_server.submit(entrypoint="echo x", searcher={"name": "single"})
    limited_server.add_agent(slots=2)
    spec = limited_server.begin(1)
    limited_server.report(spec.run_id, metrics("validation", 1, **{"": 1.0, "loss": 0.5}))
    assert names_of(limited_server) == {"loss"}


def test_huge_report_keeps_searcher_metric(limited_server: Server) -> None:
    run_id = running(limited_server)
    limited_server.report(run_id, training(1, 0.5))
    many = {f"sample_{number}": 1.0 for number in range(30_000)}
    last = metrics("training", 2, **many, loss=0.25)
    limited_server.report(run_id, last, metrics("validation", 2, **many, loss=0.125))
    assert limited_server.trial()["best_validation"] == 0.125
    assert len(names_of(limited_server)) == 20  # "loss" is a name of both groups
    curves = limited_server.get("/trials/1/metrics", names="loss")["metrics"]
    assert {curve["group"]: curve["points"] for curve in curves} == {
        "training": [[1, 0.5], [2, 0.25]], "validation": [[2, 0.125]]
    }  # fmt: skip
    assert "got 29981 more in one report" in warnings_of(limited_server)[0]


def test_limit_of_names_outlives_server(tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        msgspec.structs.force_setattr(server.services.settings, "limits", Limits(metric_names=2))
        run_id = running(server)
        server.report(run_id, metrics("training", 1, a=1.0, b=2.0))
    with serve(tmp_path) as server:
        msgspec.structs.force_setattr(server.services.settings, "limits", Limits(metric_names=2))
        assert server.send(run_id, 2, [metrics("training", 2, a=3.0, c=4.0)]).is_success
        assert names_of(server) == {"a", "b"}


@pytest.mark.parametrize("name", ["", "x" * 201, "a\0b", "a\nb", "\x1b[31m"])
def test_invalid_metric_name_is_discarded_alone(sqlite_server: Server, name: str) -> None:
    server = sqlite_server
    run_id = running(server)
    server.report(run_id, validation(1, 0.5, **{name: 1.0}))
    assert names_of(server) == {"loss"}
    assert server.trial()["best_validation"] == 0.5
    (warning,) = warnings_of(server)
    assert "metric name: must have" in warning


def test_deleted_experiment_takes_its_metric_names(server: Server) -> None:
    run_id = running(server)
    server.report(run_id, metrics("training", 1, kept=1.0, gone=1.0), validation(1, 0.5))
    server.exit(run_id, 0)
    server.submit()
    second = server.run_of(2)
    server.report(second.run_id, metrics("training", 1, kept=1.0, own=1.0))
    server.request("DELETE", "/experiments/1")
    assert server.http.portal is not None
    server.http.portal.call(server.services.purge_names)
    assert {name for (name,) in server.sql("SELECT name FROM metric_keys")} == {"kept", "own"}
    server.report(second.run_id, metrics("training", 2, kept=2.0, gone=3.0), validation(2, 0.5))
    curves = server.get("/trials/2/metrics")["metrics"]
    assert {curve["name"]: curve["points"] for curve in curves} == {
        "kept": [[1, 1.0], [2, 2.0]], "own": [[1, 1.0]], "gone": [[2, 3.0]], "loss": [[2, 0.5]]
    }  # fmt: skip


def test_large_report_is_stored_in_parts(sqlite_server: Server) -> None:
    server = sqlite_server
    run_id = running(server)
    before = server.services.database.jobs
    records = [metrics("training", step, a=1.0, b=2.0) for step in range(1, 10_001)]
    assert server.send(run_id, 1, [*records]).json() == {"stored": 10_000}
    assert server.services.database.jobs - before >= 5
    assert server.send(run_id, 1, [*records]).json() == {"stored": 10_000}
    assert server.sql("SELECT count(*) FROM points") == [(20_000,)]


def test_large_log_batch_is_stored_in_parts(sqlite_server: Server) -> None:
    server = sqlite_server
    run_id = running(server)
    before = server.services.database.jobs
    lines = [str(number) for number in range(10_000)]
    assert send_log(server, run_id, 0, lines) == 10_000
    assert server.services.database.jobs - before >= 5
    assert send_log(server, run_id, 0, lines) == 10_000
    assert send_log(server, run_id, 9_999, ["9999", "10000"]) == 10_001
    stored = server.sql("SELECT text FROM logs WHERE stream <> 'server' ORDER BY id")
    assert [text for (text,) in stored] == [*lines, "10000"]


def test_log_over_limit_drops_oldest_lines(limited_server: Server) -> None:
    run_id = running(limited_server)
    sent = 0
    for _ in range(20):
        sent = send_log(
            limited_server, run_id, sent, [f"{sent + at} " + "x" * 90 for at in range(50)]
        )
    lines = log_of(limited_server)
    ((size,),) = limited_server.sql(
        "SELECT sum(length(text) + 64) FROM logs WHERE stream <> 'server'"
    )
    assert size <= 20_000
    marker, oldest, newest = lines[0], lines[1], lines[-1]
    first = int(oldest["text"].split()[0])
    assert marker["stream"] == "server"
    assert f"{first} older lines of run {run_id} (0.1 MB) were dropped here" in marker["text"]
    assert newest["text"].startswith("999 ")
    assert [int(line["text"].split()[0]) for line in lines[1:]] == [*range(first, 1000)]


def test_log_of_ended_run_is_closed_after_a_day(server: Server) -> None:
    run_id = running(server)
    server.log(run_id, 0, "in time")
    server.exit(run_id, 0)
    assert server.log(run_id, 1, "late, as an agent that was offline") == 2
    server.clock.now += DAY_S + 1
    assert server.log(run_id, 2, "far too late") == 3
    texts = [line["text"] for line in log_of(server)]
    assert texts == ["in time", "late, as an agent that was offline"]


def test_ended_run_cannot_add_log_lines(server: Server) -> None:
    run_id = running(server)
    token = {"Authorization": f"Bearer {server.work()[0].spec.token}"}
    server.exit(run_id, 0)
    body = {"first": 0, "entries": [{"text": "mine", "time": 1.0}]}
    response = server.http.post(f"/api/v1/runs/{run_id}/logs", json=body, headers=token)
    assert response.status_code in {401, 403, 409}
    assert server.log(run_id, 0, "late, by its agent") == 1
    assert [line["text"] for line in log_of(server)] == ["late, by its agent"]


@pytest.mark.parametrize(("days", "retained"), [(None, True), (-1, True), (3, False), (5, True)])
def test_log_retention_days_removes_logs(server: Server, days: int | None, retained: bool) -> None:
    policy = {} if days is None else {"retention_policy": {"log_retention_days": days}}
    run_id = running(server, **policy)
    server.log(run_id, 0, *map(str, range(6000)))
    assert not server.write(lambda work: work.logs.expire())
    server.exit(run_id, 0)
    assert server.trial()["state"] == "COMPLETED"
    server.clock.now += 4 * DAY_S
    while server.write(lambda work: work.logs.expire()):
        pass
    assert bool(log_of(server)) == retained


def test_number_of_log_policies_is_limited(sqlite_server: Server) -> None:
    policies = [{"name": f"p{number}", "pattern": f"y{number}$"} for number in range(101)]
    response = sqlite_server.try_submit(log_policies=policies)
    assert response.status_code == 422
    assert "log_policies: " in response.json()["error"]["message"]
    assert "at most 100" in response.json()["error"]["message"]
    run_id = running(sqlite_server, log_policies=policies[:100])
    sqlite_server.log(run_id, 0, "none", "y7", "or y99", "y7 then z")
    assert sqlite_server.trial()["labels"] == ["p7", "p99"]
