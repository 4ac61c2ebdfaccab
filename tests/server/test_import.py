"""A run without a server can be brought in later."""

import re
from pathlib import Path

import pytest

from tests.server.helpers import Server
from zerolab.contract.spec import RunSpec
from zerolab.reports.reporter import METRICS_FILE, Reporter


def written(run_dir: Path) -> bytes:
    """A metrics file as a run without a server writes it."""
    spec = RunSpec(
        experiment_id=0, trial_id=0, run_id=0, trial_seed=5, slots=1, model_dir="",
        config={"name": "alone", "searcher": {"metric": "acc", "smaller_is_better": False}},
        hparams={"lr": 0.1}, run_dir=str(run_dir), checkpoint_dir="",
    )  # fmt: skip
    reporter = Reporter(spec)
    for step in range(1, 4):
        reporter.report_metrics("training", step, {"loss": 1.0 / step})
    reporter.report_metrics("validation", 2, {"acc": 0.75})
    reporter.report_metrics("validation", 3, {"acc": float("nan")})
    reporter.report_progress(1.0)
    reporter.close(10.0)
    return (run_dir / METRICS_FILE).read_bytes()


def test_a_metrics_file_becomes_an_experiment_that_has_ended(
    server: Server, tmp_path: Path
) -> None:
    content = written(tmp_path / "run")
    cut = content + b'{"kind":"metrics","group":"train'
    for number in (1, 2):
        made = server.request("POST", "/import", content=cut)["experiment"]
        assert (made["id"], made["name"], made["state"]) == (number, "alone", "COMPLETED")
        assert (made["best_validation"], made["best_trial_id"]) == (0.75, number)
    trial = server.trial()
    assert (trial["hparams"], trial["seed"], trial["steps_completed"]) == ({"lr": 0.1}, 5, 3)
    assert (trial["best_validation"], trial["best_steps"]) == (0.75, 2)
    curves = {
        (each["group"], each["name"]): each["points"]
        for each in server.get("/trials/1/metrics")["metrics"]
    }
    assert curves["training", "loss"] == [[1, 1.0], [2, 0.5], [3, 1 / 3]]
    assert curves["validation", "acc"] == [[2, 0.75], [3, "NaN"]]
    server.request("DELETE", "/experiments/1")
    assert server.get("/trials/2/metrics", group="training")["metrics"][0]["points"][0] == [1, 1.0]


@pytest.mark.parametrize("content", [b"", b"hello\n", b'{"kind":"header","format":2}\n'])
def test_what_is_no_metrics_file_is_refused(sqlite_server: Server, content: bytes) -> None:
    answer = sqlite_server.http.post("/api/v1/import", content=content)
    assert (answer.status_code, answer.json()["error"]["type"]) == (422, "config")


def test_a_bad_line_is_named_and_nothing_is_stored(sqlite_server: Server, tmp_path: Path) -> None:
    content = written(tmp_path / "run") + b'{"kind":"metrics"}\n'
    answer = sqlite_server.http.post("/api/v1/import", content=content)
    assert answer.status_code == 422
    assert answer.json()["error"]["problems"][0].startswith("line 8: ")
    assert sqlite_server.get("/experiments")["experiments"] == []


def test_a_time_that_is_on_no_calendar_is_named_by_its_line(
    sqlite_server: Server, tmp_path: Path
) -> None:
    lines = written(tmp_path / "run").splitlines(keepends=True)
    lines[2] = re.sub(rb'"time":[0-9.]+', b'"time":1e300', lines[2])
    answer = sqlite_server.http.post("/api/v1/import", content=b"".join(lines))
    assert answer.status_code == 422
    assert answer.json()["error"]["problems"][0].startswith("line 3: time: must be in seconds")
