"""Retention of metrics: old points are removed, curves and summaries stay; on both databases."""

import math
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.server.helpers import PLAYED, Server, checkpoint, metrics, serve, validation
from tests.waiting import until
from zeroserver.orchestrator.ingest import metric_retention
from zeroserver.store.points import SHIFTS

DAY_S = 86400.0
STEPS = 5000
SAVED = 2500
BUCKET = 1024
POLICY = {"retention_policy": {"metric_retention_days": 3}}
COLUMNS = ("last.training.loss", "min.training.loss", "max.training.loss", "min.validation.loss")


def loss(step: int) -> float:
    return math.sin(step)


def train(server: Server, run_id: int, first: int, last: int) -> None:
    """Report each step, and a validation every 1,000."""
    records: list[Any] = [
        metrics("training", step, loss=loss(step)) for step in range(first, last + 1)
    ]
    records += [validation(step, 1 / step) for step in range(1000, last + 1, 1000) if step >= first]
    if first <= SAVED <= last:
        records.append(checkpoint(SAVED))
    assert server.send(run_id, 1, records).json() == {"stored": len(records)}


def begin(server: Server, **changes: Any) -> int:
    server.submit(**POLICY, max_restarts=0, **changes)
    server.add_agent()
    return server.begin().run_id


def expire(server: Server) -> int:
    """Remove what is due; return the number of transactions."""
    count = 0
    while server.write(lambda work: work.metric_retention.expire()):
        count += 1
    return count


def curves(server: Server, **params: Any) -> dict[str, Any]:
    rows = server.get("/trials/1/metrics", max_points=10_000, **params)["metrics"]
    return {row["group"]: row for row in rows if row["name"] == "loss"}


def summaries(server: Server) -> Any:
    columns = server.get("/experiments/1/columns", column=COLUMNS)
    names = server.get("/trials/1/metric-names")
    saved = server.get("/trials/1/checkpoints")
    rollups = (
        f"SELECT * FROM rollups WHERE shift > {SHIFTS[0]} ORDER BY trial_id, shift, key_id, bucket"
    )
    return columns, names, saved, server.trial()["best_validation"], server.sql(rollups)


@pytest.mark.needs_extension("analysis")
def test_old_points_are_removed_in_parts(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_retention, "_POINTS", 1500)
    run_id = begin(server)
    train(server, run_id, 1, STEPS)
    assert expire(server) == 0
    server.exit(run_id, 0)
    server.clock.now += 2.9 * DAY_S
    assert expire(server) == 0
    before, summary = curves(server), summaries(server)
    assert server.experiment()["metrics_expired_at"] is None
    server.clock.now += 0.2 * DAY_S
    assert server.write(lambda work: work.metric_retention.expire())
    assert curves(server)["training"]["values_removed"]
    assert expire(server) > 0
    assert expire(server) == 0
    assert server.experiment()["metrics_expired_at"] is not None
    assert summaries(server) == summary
    now = curves(server)
    assert now["validation"] == before["validation"]
    assert not now["validation"]["values_removed"]
    assert now["training"]["values_removed"]
    thinned = [range(1, BUCKET), range(BUCKET, 2 * BUCKET), range(3 * BUCKET, 4 * BUCKET)]
    complete = [*range(2 * BUCKET, 3 * BUCKET), *range(4 * BUCKET, STEPS + 1)]
    buckets = [
        range(max(first, 1), min(first + BUCKET, STEPS + 1)) for first in range(0, STEPS, BUCKET)
    ]
    band = now["training"]["band"]
    assert [row[:3] for row in band] == [[steps[-1], *extremes(steps)] for steps in buckets]
    timed = curves(server, times=True)["training"]["time_s"]
    assert timed == [1_800_000_000.0 + steps[-1] for steps in buckets]
    zoomed = curves(server, first=2500, last=2502)["training"]
    assert zoomed["points"] == [[step, loss(step)] for step in (2500, 2501, 2502)]
    exported = server.http.get("/api/v1/experiments/1/metrics/export", params={"format": "csv"})
    assert exported.text.count(",training,") == len(thinned) + len(complete)
    assert len(server.get("/trials/1/metrics", max_points=2)["metrics"][0]["points"]) == 2


def extremes(steps: range) -> tuple[float, float]:
    values = [loss(step) for step in steps]
    return min(values), max(values)


@pytest.mark.needs_extension("analysis", "continued_experiments")
def test_continued_trial_adds_to_removed_points(server: Server) -> None:
    run_id = begin(server)
    train(server, run_id, 1, STEPS)
    server.exit(run_id, 1)
    assert server.experiment()["state"] == "ERROR"
    server.clock.now += 4 * DAY_S
    assert expire(server) == 1
    server.post("/trials/1/continue")
    server.tick()
    run_id = server.begin().run_id
    assert curves(server)["training"]["points"][-1][0] == SAVED
    train(server, run_id, SAVED + 1, STEPS + 100)
    steps = [step for step, _ in curves(server)["training"]["points"]]
    assert steps == [*range(BUCKET - 1, STEPS, BUCKET), STEPS + 100]
    zoomed = curves(server, first=2 * BUCKET)["training"]["points"]
    assert zoomed == [[step, loss(step)] for step in range(2 * BUCKET, STEPS + 101)]
    continued = summaries(server)[-1]
    server.clock.now += 60
    server.exit(run_id, 0)
    assert expire(server) == 0
    server.clock.now += 4 * DAY_S
    assert expire(server) == 1
    assert curves(server, first=2 * BUCKET)["training"]["points"] != zoomed
    assert summaries(server)[-1] == continued
    counts = (
        "SELECT sum(r.count) FROM rollups r JOIN metric_keys k ON k.id = r.key_id "
        f"WHERE r.shift = {SHIFTS[1]} AND k.group_name = 'training'"
    )
    assert server.sql(counts) == [(STEPS + 100,)]


def test_removal_may_take_longer_than_its_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next search for old experiments does not begin the current one again."""
    monkeypatch.setattr(metric_retention, "_POINTS", 1500)
    with serve(tmp_path, timings=replace(PLAYED, tick_s=0.01, expiry_s=0.0)) as server:
        run_id = begin(server)
        train(server, run_id, 1, STEPS)
        server.exit(run_id, 0)
        server.clock.now += 4 * DAY_S
        done = "SELECT metrics_expired_at > ended_at FROM experiments"
        until("all is removed", lambda: server.sql(done), lambda rows: rows == [(1,)])


def test_other_groups_keep_all_points(sqlite_server: Server) -> None:
    """Such as ``test``, which ``report_metrics`` of the Core API stores."""
    server = sqlite_server
    run_id = begin(server)
    records: list[Any] = [
        metrics(group, step, loss=loss(step))
        for step in range(1, STEPS + 1)
        for group in ("training", "test")
    ]
    assert server.send(run_id, 1, records).is_success
    server.exit(run_id, 0)
    before = curves(server)
    server.clock.now += 4 * DAY_S
    assert expire(server) > 0
    now = curves(server)
    assert now["test"] == before["test"]
    assert now["training"]["values_removed"]


def test_other_experiments_keep_all_points(sqlite_server: Server) -> None:
    server = sqlite_server
    server.submit()
    server.add_agent()
    run_id = server.begin().run_id
    train(server, run_id, 1, STEPS)
    server.exit(run_id, 0)
    server.clock.now += 400 * DAY_S
    assert expire(server) == 0
    assert len(curves(server)["training"]["points"]) == STEPS
