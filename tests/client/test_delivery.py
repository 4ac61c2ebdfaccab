"""Delivery of reports to a real server; crashes are in tests/faults."""

import logging
import time
from pathlib import Path

import msgspec
import pytest

from tests.client.helpers import make_spec
from tests.faults.helpers import KillableServer, make_runs, stored_points
from tests.waiting import until
from zerolab.client.http import Client
from zerolab.contract.messages import MetricsRecord, RunExit
from zerolab.errors import ConfigError, StaleRunError
from zerolab.reports.reporter import METRICS_FILE, SPOOL_DIR, Reporter
from zerolab.reports.sender import deliver
from zerolab.reports.spool import Spool
from zerolab.storage.store import new_uuid

pytestmark = pytest.mark.processes


def test_reports_arrive_in_order(server: KillableServer, client: Client, tmp_path: Path) -> None:
    (spec,) = make_runs(server, 1, tmp_path / "runs")
    reporter, uuid = Reporter(spec), new_uuid()
    for step in range(1, 20_001):
        reporter.report_metrics("training", step, {"loss": 1 / step, "nan": float("nan")})
    reporter.report_metrics("validation", 20_000, {"loss": 0.5})
    reporter.report_checkpoint(uuid, 20_000, {"model.bin": 10, "state": 5}, {"note": [1, "x"]})
    reporter.report_progress(0.25)
    assert reporter.close(240)
    points = stored_points(client, spec, group="training")
    assert points == {step: 1 / step for step in range(1, 20_001)}
    trial = client.trial(spec.trial_id)
    assert (trial["steps_completed"], trial["progress"]) == (20_000, 0.25)
    assert (trial["latest_validation"], trial["latest_checkpoint"]) == (0.5, uuid)
    checkpoint = client.checkpoint(uuid)
    assert checkpoint["resources"] == {"model.bin": 10, "state": 5}
    assert checkpoint["size_bytes"] == 15
    assert checkpoint["metadata"] == {"note": [1, "x"]}
    names = {(metric["group"], metric["name"]) for metric in client.metric_names(spec.trial_id)}
    assert names == {("training", "loss"), ("training", "nan"), ("validation", "loss")}


def test_reports_arrive_during_run(server: KillableServer, client: Client, tmp_path: Path) -> None:
    (spec,) = make_runs(server, 1, tmp_path / "runs")
    reporter = Reporter(spec)
    for step in (1, 2):
        reporter.report_metrics("training", step, {"loss": 1.0})
        until(
            "the report has arrived",
            lambda: client.trial(spec.trial_id),
            lambda trial, step=step: trial["steps_completed"] == step,
        )
    reporter.close(240)


def test_reports_arrive_after_outage(server: KillableServer, tmp_path: Path) -> None:
    first, second = make_runs(server, 2, tmp_path / "runs")
    server.kill()
    ended, lasting = Reporter(first), Reporter(second, longest_pause_s=0.1)
    for step in range(1, 5001):
        for reporter in (ended, lasting):
            reporter.report_metrics("training", step, {"loss": step / 8})
    assert not ended.close(0)  # a complete run without a server: its agent delivers later
    server.start()
    assert lasting.close(240)
    with server.client as client:
        assert deliver(Path(first.run_dir), client, first.run_id) == 5000
        for spec in (first, second):
            expected = {step: step / 8 for step in range(1, 5001)}
            assert stored_points(client, spec) == expected


def test_acknowledged_reports_are_deleted(server: KillableServer, tmp_path: Path) -> None:
    (spec,) = make_runs(server, 1, tmp_path / "runs")
    directory = Path(spec.run_dir) / SPOOL_DIR
    spool = Spool(directory, segment_bytes=1000)
    for step in range(1, 201):
        record = MetricsRecord("training", step, {"loss": 1.0}, time.time())
        spool.append(msgspec.msgpack.encode(record))
    spool.close()
    assert len(list(directory.iterdir())) > 5
    with server.client as client:
        assert deliver(Path(spec.run_dir), client, spec.run_id) == 200
        assert len(list(directory.iterdir())) == 1
        assert deliver(Path(spec.run_dir), client, spec.run_id) == 200
        assert len(stored_points(client, spec)) == 200


def test_damaged_record_is_skipped_with_warning(
    server: KillableServer, client: Client, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (spec,) = make_runs(server, 1, tmp_path / "runs")
    directory = Path(spec.run_dir) / SPOOL_DIR
    spool = Spool(directory, segment_bytes=5000)
    for step in range(1, 301):
        record = MetricsRecord("training", step, {"loss": 1.0}, time.time())
        spool.append(msgspec.msgpack.encode(record))
    spool.close()
    (first, *_) = sorted(directory.iterdir())
    content = bytearray(first.read_bytes())
    content[len(content) // 2] ^= 0x10
    first.write_bytes(content)
    messages: list[str] = []
    assert deliver(Path(spec.run_dir), client, spec.run_id, messages.append) == 300
    points = stored_points(client, spec)
    assert len(points) == 299
    (lost,) = set(range(1, 301)) - set(points)
    assert f"lost (records {lost} to {lost})" in caplog.text
    assert messages == ["reports of this run that were lost because their file was damaged: 1"]


def test_run_without_spool_delivers_nothing(client: Client, tmp_path: Path) -> None:
    assert deliver(tmp_path, client, 1) == 0


def test_rejected_record_does_not_block_others(
    server: KillableServer, client: Client, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (spec,) = make_runs(server, 1, tmp_path / "runs")
    reporter = Reporter(spec)
    for step in range(1, 101):
        beyond = 2**60 if step in {40, 77} else 0  # a step that the server cannot store
        reporter.report_metrics("training", step + beyond, {"loss": 1.0})
    assert reporter.close(240)
    assert set(stored_points(client, spec)) == set(range(1, 101)) - {40, 77}
    refused = [line.getMessage() for line in caplog.records if line.levelno == logging.ERROR]
    assert [text.split(" is discarded")[0] for text in refused] == [
        f"record 40 of run {spec.run_id}",
        f"record 77 of run {spec.run_id}",
    ]


def test_superseded_run_is_stale(
    server: KillableServer, client: Client, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (spec,) = make_runs(server, 1, tmp_path / "runs")
    reporter = Reporter(spec)
    reporter.report_metrics("training", 1, {"loss": 1.0})
    until(
        "it has arrived",
        lambda: client.trial(spec.trial_id),
        lambda trial: trial["steps_completed"] == 1,
    )
    assert not reporter.stale.is_set()
    client.run_exited(spec.run_id, RunExit(-9))
    reporter.report_metrics("training", 2, {"loss": 2.0})
    until("the reporter knows", reporter.stale.is_set)
    assert not reporter.close(240)
    assert "the server rejects the reports of this run" in caplog.text
    with pytest.raises(StaleRunError):
        deliver(Path(spec.run_dir), client, spec.run_id)
    assert set(stored_points(client, spec)) <= {1}


def test_import_of_run_without_server(client: Client, tmp_path: Path) -> None:
    searcher = {"name": "single", "metric": "loss", "max_length": {"batches": 30}}
    spec = make_spec(tmp_path, config={"name": "alone", "searcher": searcher}, hparams={"lr": 0.5})
    for first, last in ((1, 20), (11, 30)):  # killed at 20, continued from a checkpoint at 10
        reporter = Reporter(spec)
        for step in range(first, last + 1):
            reporter.report_metrics("training", step, {"loss": first + 1 / step})
        reporter.report_metrics("validation", last, {"loss": 1 / last, "x": float("-inf")})
        reporter.close()
    imported = client.import_metrics((tmp_path / METRICS_FILE).read_bytes() + b'{"kind":"me')
    assert (imported["name"], imported["state"]) == ("alone", "COMPLETED")
    assert imported["best_validation"] == 1 / 30
    (trial,) = client.trials(imported["id"])
    assert trial["hparams"] == {"lr": 0.5}
    (loss,) = client.metrics(trial["id"], "training")
    expected = [[step, (1 if step < 11 else 11) + 1 / step] for step in range(1, 31)]
    assert loss["points"] == expected
    curves = client.metrics(trial["id"], "validation", names=["x"])
    assert [curve["points"] for curve in curves] == [[[20, "-Infinity"], [30, "-Infinity"]]]
    with pytest.raises(ConfigError, match="metrics file"):
        client.import_metrics(b"{}")
