"""Metric points: stored exactly once, roll-ups, downsampled charts; on both databases."""

import csv
import io
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.server.helpers import Server, checkpoint, metrics, training, validation
from zeroserver.store.database import Transaction
from zeroserver.store.points import SHIFTS, forget_after, read_curve, store_points


def running(server: Server, **changes: Any) -> int:
    """Submit an experiment and start its trial; return the run."""
    server.submit(**changes)
    server.add_agent()
    return server.begin().run_id


def curve(server: Server, trial_id: int = 1, **params: Any) -> dict[str, Any]:
    (points_row,) = server.get(f"/trials/{trial_id}/metrics", **params)["metrics"]
    curve: dict[str, Any] = points_row
    return curve


def test_repeated_batch_is_stored_once(server: Server) -> None:
    run_id = running(server)
    records = [training(step, float(step)) for step in range(1, 7)]
    assert server.send(run_id, 1, records[:3]).json() == {"stored": 3}
    assert server.send(run_id, 1, records[:3]).json() == {"stored": 3}
    assert server.send(run_id, 2, records[1:5]).json() == {"stored": 5}
    assert server.send(run_id, 6, records[5:]).json() == {"stored": 6}
    assert curve(server)["points"] == [[step, float(step)] for step in range(1, 7)]
    assert server.sql("SELECT sum(count), sum(total) FROM rollups WHERE shift = 18") == [(6, 21.0)]


def test_batch_after_gap_is_rejected(server: Server) -> None:
    run_id = running(server)
    assert server.send(run_id, 2, [training(2, 1.0)]).json() == {"stored": 0}
    assert server.get("/trials/1/metrics")["metrics"] == []
    assert server.send(run_id, 0, [training(2, 1.0)]).json() == {"stored": 0}


def test_superseded_run_cannot_report(server: Server) -> None:
    stale = running(server)
    server.exit(stale, -9)
    server.tick(2)
    current = server.begin().run_id
    response = server.send(stale, 1, [training(1, 1.0), checkpoint(1)])
    assert (response.status_code, response.json()["error"]["type"]) == (409, "stale_run")
    directive = server.http.get(f"/api/v1/runs/{stale}/directive", params={"wait_s": 0})
    assert (directive.status_code, directive.json()["error"]["type"]) == (409, "stale_run")
    assert server.get("/trials/1/checkpoints")["checkpoints"] == []
    server.report(current, training(1, 3.0))
    assert curve(server)["points"] == [[1, 3.0]]


def test_invalid_record_rejects_its_batch(server: Server) -> None:
    run_id = running(server)
    bad = [metrics("training", 2, loss="a lot"), metrics("", 2, loss=1.0), training(-1, 1.0)]
    for record in bad:
        response = server.send(run_id, 1, [training(1, 1.0), record])
        assert (response.status_code, response.json()["error"]["type"]) == (422, "config")
    assert server.get("/trials/1/metrics")["metrics"] == []
    server.report(run_id, training(1, 1.0))
    assert curve(server)["points"] == [[1, 1.0]]


@pytest.mark.needs_extension("metrics_export")
def test_non_finite_numbers_are_stored(server: Server) -> None:
    run_id = running(server)
    values: list[float | str] = [math.nan, math.inf, "-Infinity", -0.0, 1e308, 5e-324, "NaN"]
    server.report(run_id, *(training(step, value) for step, value in enumerate(values)))
    expected = ["NaN", "Infinity", "-Infinity", -0.0, 1e308, 5e-324, "NaN"]
    assert [value for _, value in curve(server)["points"]] == expected
    assert curve(server, max_points=1)["band"] == [[6, "-Infinity", "Infinity", 1e308 / 3]]
    exported = server.http.get("/api/v1/experiments/1/metrics/export").text.splitlines()
    assert [json.loads(line)["value"] for line in exported] == expected


def test_nan_is_never_best(server: Server) -> None:
    run_id = running(server)
    server.report(run_id, validation(10, math.nan))
    assert server.trial()["best_validation"] is None
    server.report(run_id, validation(20, 0.5), validation(30, "NaN"), validation(40, 0.7))
    trial = server.trial()
    assert (trial["best_validation"], trial["best_steps"]) == (0.5, 20)
    assert trial["latest_validation"] == 0.7
    server.report(run_id, metrics("validation", 50, accuracy=1.0))
    server.exit(run_id, 0)
    assert server.experiment()["state"] == "COMPLETED"


def test_missing_searcher_metric_is_logged(server: Server) -> None:
    run_id = running(server)
    server.report(run_id, metrics("validation", 50, accuracy=1.0))
    (line,) = server.get("/trials/1/logs")["logs"]
    assert (line["stream"], line["level"]) == ("server", "ERROR")
    assert "got 'loss'; there are: accuracy" in line["text"]


def test_larger_is_better_changes_best(server: Server) -> None:
    searcher = {
        "name": "single", "metric": "loss", "max_length": 9, "smaller_is_better": False,
    }  # fmt: skip
    run_id = running(server, searcher=searcher)
    server.report(run_id, validation(1, 0.5), validation(2, 0.9), validation(3, 0.7))
    assert server.trial()["best_validation"] == 0.9
    assert server.experiment()["best_validation"] == 0.9


def test_repeated_step_replaces_value_and_roll_ups(server: Server) -> None:
    run_id = running(server)
    server.report(run_id, training(1, 100.0), training(2, 1.0), training(1, 3.0))
    assert curve(server)["points"] == [[1, 3.0], [2, 1.0]]
    assert curve(server, max_points=1)["band"] == [[2, 1.0, 3.0, 2.0]]


def test_restart_leaves_no_gap_or_duplicate(server: Server) -> None:
    run_id = running(server)
    first = [training(step, float(step)) for step in range(1, 200)]
    assert server.send(run_id, 1, [*first[:100], checkpoint(100), *first[100:]]).is_success
    server.exit(run_id, -9)
    server.tick(2)
    spec = server.begin()
    assert curve(server)["points"] == [[step, float(step)] for step in range(1, 101)]
    again = [training(step, -float(step)) for step in range(101, 301)]
    assert server.send(spec.run_id, 1, list(again)).is_success
    expected = [[s, float(s)] for s in range(1, 101)] + [[s, -float(s)] for s in range(101, 301)]
    assert curve(server)["points"] == expected
    assert server.trial()["steps_completed"] == 300


def test_repeated_validation_reaches_searcher_once(
    server: Server,
) -> None:
    run_id = running(server)
    server.report(run_id, validation(10, 1.0), checkpoint(10), validation(20, 0.5))
    server.exit(run_id, 1)
    server.tick(2)
    server.report(server.begin().run_id, validation(20, 0.5), validation(30, 0.4))
    lengths = server.sql("SELECT length FROM searcher_events WHERE kind = 'validated' ORDER BY id")
    assert lengths == [(10,), (20,), (30,)]


def test_downsampled_chart_keeps_spikes(server: Server) -> None:
    run_id = running(server)
    records = [training(step, 1.0) for step in range(20_000)]
    records[12_345] = training(12_345, 99.0)
    for start in range(0, 20_000, 5000):
        assert server.send(run_id, start + 1, list(records[start : start + 5000])).is_success
    long = curve(server, max_points=500)
    assert 100 <= len(long["points"]) <= 500
    (spike,) = [row for row in long["band"] if row[2] == 99.0]
    assert spike[1] == 1.0
    zoom = curve(server, max_points=500, first=12_300, last=12_400)
    assert zoom["band"] is None
    assert len(zoom["points"]) == 101
    assert [12_345, 99.0] in zoom["points"]


def test_curves_filter_by_group_and_name(server: Server) -> None:
    run_id = running(server)
    server.report(run_id, metrics("training", 1, loss=1.0, lr=0.1), validation(1, 2.0))
    names = server.get("/trials/1/metric-names")["names"]
    assert names == [
        {"group": "training", "name": "loss"},
        {"group": "training", "name": "lr"},
        {"group": "validation", "name": "loss"},
    ]
    assert curve(server, group="training", names="lr,other")["points"] == [[1, 0.1]]
    assert server.get("/trials/1/metrics", group="system")["metrics"] == []


@pytest.mark.needs_extension("metrics_export")
def test_export_has_every_point_as_jsonl_or_csv(server: Server) -> None:
    run_id = running(server)
    name = 'a "quoted", name'
    server.report(run_id, metrics("training", 3, **{name: 1.5}), validation(5, 0.25))
    text = server.http.get("/api/v1/experiments/1/metrics/export").text
    lines = [json.loads(line) for line in text.splitlines()]
    assert lines[0] == {
        "trial_id": 1, "group": "training", "name": name, "step": 3, "value": 1.5,
        "time_s": 1_800_000_003.0,
    }  # fmt: skip
    table = server.http.get("/api/v1/experiments/1/metrics/export?format=csv&group=training").text
    rows = list(csv.DictReader(io.StringIO(table)))
    assert [(row["name"], row["value"]) for row in rows] == [(name, "1.5")]


step_lists = st.lists(
    st.tuples(
        st.one_of(st.integers(0, 300), st.integers(0, 2**22)),
        st.one_of(st.none(), st.floats(allow_nan=False, width=32)),
    ),
    max_size=60,
)


@settings(max_examples=30)
@given(batches=st.lists(step_lists, max_size=4), cut=st.integers(-1, 2**22))
def test_roll_ups_equal_recount(
    shared_server: Server, batches: list[list[tuple[int, float | None]]], cut: int
) -> None:
    def job(transaction: Transaction) -> None:
        for table in ("points", "rollups"):
            transaction.run(f"DELETE FROM {table}")
        values: dict[int, float | None] = {}
        for batch in batches:
            store_points(transaction, 1, [(7, step, value, 0.0) for step, value in batch])
            values |= dict(batch)
        _check(transaction, values)
        for _ in range(300):
            if forget_after(transaction, 1, cut, limit=7) is not None:
                break
            _check(transaction, _stored(transaction))
        assert forget_after(transaction, 1, cut) == 0
        _check(transaction, {step: value for step, value in values.items() if step <= cut})

    shared_server.services.database.write_now(job)


def _stored(transaction: Transaction) -> dict[int, float | None]:
    return dict(transaction.raw("SELECT step, value FROM points"))  # type: ignore[arg-type]


def _check(transaction: Transaction, reported: dict[int, float | None]) -> None:
    stored = transaction.raw("SELECT step, value FROM points")
    assert dict(stored) == reported  # type: ignore[arg-type]
    expected: dict[tuple[int, int], list[float | None]] = {}
    for step, value in reported.items():
        for shift in SHIFTS:
            expected.setdefault((shift, step >> shift), []).append(value)
    rows = transaction.raw("SELECT shift, bucket, least, most, total, finite, count FROM rollups")
    assert {row[:2] for row in rows} == set(expected)
    for shift, bucket, least, most, total, finite, count in rows:
        values = expected[shift, bucket]
        numbers = [value for value in values if value is not None]
        real = [value for value in numbers if math.isfinite(value)]
        assert (least, most) == (min(numbers, default=None), max(numbers, default=None))
        assert (finite, count) == (len(real), len(values))
        assert total == pytest.approx(math.fsum(real), rel=1e-6, abs=1e30)
    read = read_curve(transaction.connection, 1, (7, "training", "loss"), 10)
    numbers = [value for value in reported.values() if value is not None]
    if read.band is not None and numbers and all(map(math.isfinite, numbers)):
        extremes = [float(row[1]) for row in read.band if row[1] != "NaN"]
        assert min(extremes) == min(numbers)
        assert max(float(row[2]) for row in read.band if row[2] != "NaN") == max(numbers)


def test_curves_have_report_times(server: Server) -> None:
    server.submit()
    server.add_agent()
    run = server.begin().run_id
    server.report(run, *(training(step, 1.0) for step in range(1, 41)))
    assert server.get("/trials/1/metrics")["metrics"][0]["time_s"] is None
    for most in (1000, 7):
        (curve,) = server.get("/trials/1/metrics", times=True, max_points=most)["metrics"]
        steps = [point[0] for point in curve["points"]]
        assert len(steps) <= most
        assert curve["time_s"] == [1_800_000_000.0 + step for step in steps]
