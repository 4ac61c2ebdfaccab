"""Reporting without a responding server; delivery is tested in tests/faults."""

import json
import logging
import math
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.client.helpers import closed_port, make_spec
from tests.waiting import until
from zerolab.contract import messages
from zerolab.contract.spec import RunSpec
from zerolab.core.preemption import DirectivePoller
from zerolab.errors import ConfigError
from zerolab.reports.reporter import METRICS_FILE, SPOOL_DIR, Reporter, json_metadata
from zerolab.reports.spool import SpoolReader


def lines(spec: RunSpec) -> list[dict[str, Any]]:
    content = (Path(spec.run_dir) / METRICS_FILE).read_text(encoding="utf-8")
    return [json.loads(line) for line in content.splitlines()]


def spooled(spec: RunSpec) -> list[messages.Record]:
    _, payloads = SpoolReader(Path(spec.run_dir) / SPOOL_DIR).read(1 << 24)
    return [msgspec.msgpack.decode(payload, type=messages.Record) for payload in payloads]


def test_reports_without_server_go_to_file(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, hparams={"lr": 0.1})
    reporter = Reporter(spec)
    reporter.report_state("training")
    reporter.report_metrics("training", 10, {"loss": 0.5, "bad": math.nan, "worse": -math.inf})
    reporter.report_progress(0.25)
    reporter.report_checkpoint("some-uuid", 10, {"a": 1}, {"note": "x"})
    assert reporter.close()
    header, state, metrics, progress, checkpoint = lines(spec)
    assert header["kind"] == "header"
    assert (header["format"], header["hparams"]) == (1, {"lr": 0.1})
    assert (state["kind"], state["state"]) == ("state", "training")
    assert (metrics["kind"], metrics["group"], metrics["steps"]) == ("metrics", "training", 10)
    assert metrics["values"] == {"loss": 0.5, "bad": "NaN", "worse": "-Infinity"}
    assert progress["value"] == 0.25
    assert (checkpoint["uuid"], checkpoint["resources"]) == ("some-uuid", {"a": 1})
    assert abs(checkpoint["time"] - time.time()) < 600


def test_torn_last_line_is_dropped(
    tmp_path: Path,
) -> None:
    spec = make_spec(tmp_path)
    for step in range(3):
        reporter = Reporter(spec)
        reporter.report_metrics("training", step, {"loss": 1.0})
        reporter.close()
        with (tmp_path / METRICS_FILE).open("a") as file:
            file.write('{"kind":"metr' + "x" * 100_000 * step)
    Reporter(spec).report_metrics("training", 3, {"loss": 1.0})
    assert [line.get("steps") for line in lines(spec)] == [None, 0, 1, 2, 3]


def test_numbers_of_any_type_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import numpy as np
    import torch

    spec = make_spec(tmp_path, master=closed_port())
    reporter = Reporter(spec)
    for _ in range(2):
        reporter.report_metrics(
            "training",
            np.int64(3),  # type: ignore[arg-type]
            {
                "int": 7,
                "bool": True,
                "numpy": np.float32(0.5),
                "array": np.array([2.0]),
                "tensor": torch.tensor(0.25, requires_grad=True),
                "nan": float("nan"),
                "huge": 10**400,
                "text": "0.5",
                "none": None,
                "many": [1, 2],
                5: 1.0,
            },
        )
    reporter.close(0)
    record = spooled(spec)[0]
    assert isinstance(record, messages.MetricsRecord)
    values = dict(record.values)
    assert math.isnan(float(values.pop("nan")))
    assert values == {
        "int": 7.0, "bool": 1.0, "numpy": 0.5, "array": 2.0, "tensor": 0.25, "5": 1.0,
    }  # fmt: skip
    assert record.steps == 3
    for name in ("huge", "text", "none", "many"):
        assert caplog.text.count(f"metric {name!r} is discarded") == 1


BAD_NAMES = ["", "x" * 201, "a\nb", "nul\0", "\x1b[31mred", "\x9b", "lone \udc80 surrogate"]


@pytest.mark.parametrize("served", [True, False])
@pytest.mark.parametrize("name", BAD_NAMES)
def test_bad_metric_name_discards_that_metric_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, served: bool
) -> None:
    spec = make_spec(tmp_path, master=closed_port() if served else "")
    reporter = Reporter(spec)
    for step in (1, 2):
        reporter.report_metrics("validation", step, {"v": 0.5, name: 1.0, "n": 3})
        reporter.report_metrics(name, step, {"v": 0.5})  # a custom group
    reporter.close(0)
    if served:
        records = spooled(spec)
        assert all(isinstance(record, messages.MetricsRecord) for record in records)
        values = [record.values for record in records if isinstance(record, messages.MetricsRecord)]
    else:
        values = [line["values"] for line in lines(spec)[1:]]
    assert values == [{"v": 0.5, "n": 3}] * 2
    assert caplog.text.count("metric name: must ") == 1
    assert caplog.text.count("it is discarded, the others are stored") == 1


class LostTensor:
    def item(self) -> float:
        raise RuntimeError("the device is gone\nand more")


def test_unreadable_number_is_skipped_with_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reporter = Reporter(make_spec(tmp_path))
    reporter.report_metrics("training", 1, {"loss": LostTensor()})
    assert "got LostTensor, whose float() raises RuntimeError: the device is gone" in caplog.text


@pytest.mark.parametrize("steps", [-1, 1.5, "3", None])
def test_steps_must_be_integer(steps: Any, tmp_path: Path) -> None:
    reporter = Reporter(make_spec(tmp_path))
    with pytest.raises(ConfigError, match=f"steps_completed: must be a whole number.*{steps}"):
        reporter.report_metrics("training", steps, {})


@pytest.mark.parametrize("metrics", [[1.0], [], 0.5, None])
def test_metrics_must_be_mapping(metrics: Any, tmp_path: Path) -> None:
    reporter = Reporter(make_spec(tmp_path))
    with pytest.raises(ConfigError, match="metrics: must be a mapping of names to numbers, got "):
        reporter.report_metrics("training", 1, metrics)


def test_progress_stays_between_0_and_1(tmp_path: Path) -> None:
    spec = make_spec(tmp_path)
    reporter = Reporter(spec)
    for value in (-1, 0.5, 7, math.nan):
        reporter.report_progress(value)
    assert [line["value"] for line in lines(spec)[1:]] == [0.0, 0.5, 1.0, 0.0]


def test_metadata_is_json() -> None:
    import numpy as np

    metadata = {"a": (1, None, math.inf), 3: {"path": Path("x"), "n": np.float64(2.0)}}
    assert json_metadata(metadata) == {"a": [1, None, "Infinity"], "3": {"path": "x", "n": 2.0}}
    with pytest.raises(ConfigError, match="metadata: must hold only what JSON can hold"):
        json_metadata({"a": object()})
    loop: dict[str, Any] = {}
    loop["loop"] = loop
    with pytest.raises(ConfigError, match="metadata"):
        json_metadata(loop)


def test_outage_does_not_stop_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    spec = make_spec(tmp_path, master=closed_port())
    reporter = Reporter(spec)
    for step in range(1000):
        reporter.report_metrics("validation", step, {"loss": 1.0})
    assert not reporter.close(0.5)
    reporter.report_metrics("training", 5, {"loss": 1.0})  # late, from another thread: harmless
    assert len(spooled(spec)) == 1000
    assert not reporter.stale.is_set()
    assert caplog.text.count("cannot upload reports") == 1
    assert "zerolab up" in caplog.text


def test_outage_keeps_random_numbers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    random.seed(1)
    expected = random.getstate()
    spec = make_spec(tmp_path, master=closed_port())
    reporter = Reporter(spec)
    poller = DirectivePoller(spec, reporter.stale)
    reporter.report_progress(0.5)
    until(
        "both have paused",
        lambda: caplog.text,
        lambda text: "cannot upload reports" in text and "no directive" in text,
    )
    poller.close()
    reporter.close(0.0)
    assert random.getstate() == expected


def test_second_reporter_continues_spool(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, master=closed_port())
    for step in range(3):
        reporter = Reporter(spec)
        reporter.report_metrics("training", step, {})
        reporter.close(0)
    assert [r.steps for r in spooled(spec) if isinstance(r, messages.MetricsRecord)] == [0, 1, 2]


FULL_DISK = """
import logging, resource, signal, sys
from pathlib import Path
from tests.client.helpers import make_spec
from zerolab.reports.reporter import Reporter

logging.basicConfig()
directory = Path(sys.argv[1])
reporter = Reporter(make_spec(directory))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
size = (directory / "metrics.jsonl").stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 1000, resource.RLIM_INFINITY))
for step in range(100):
    reporter.report_metrics("training", step, {"loss": 1.0})
assert len((directory / "metrics.jsonl").read_bytes()) <= size + 1000
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
for step in range(100, 200):
    reporter.report_metrics("training", step, {"loss": 1.0})
assert reporter.close()
assert reporter.lost == 0
"""


@pytest.mark.slow
def test_full_disk_delays_reports(tmp_path: Path) -> None:
    # A limit on the file size simulates a full disk: writes fail until it is removed.
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stderr.count("make room on the disk") == 1
    assert "reports can be written again; 0 were lost" in done.stderr
    assert [line.get("steps") for line in lines(make_spec(tmp_path))] == [None, *range(200)]
