"""Import of metrics files from runs without a server."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.client.helpers import make_spec
from tests.server.conftest import new_database
from tests.server.helpers import Server, metrics, serve
from tests.waiting import until
from zerolab.contract.spec import RunSpec
from zerolab.reports.metrics_file import MetricsFile
from zerolab.reports.reporter import METRICS_FILE, Reporter
from zeroserver.store.points import store_points


def written(run_dir: Path) -> bytes:
    """Return a metrics file written by a run without a server."""
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


@pytest.mark.needs_extension("run_import")
def test_import_creates_completed_experiment(server: Server, tmp_path: Path) -> None:
    content = written(tmp_path / "run")
    cut = content + b'{"kind":"metrics","group":"train'
    for number in (1, 2):
        experiment = server.request("POST", "/import", content=cut)["experiment"]
        assert (experiment["id"], experiment["name"], experiment["state"]) == (
            number,
            "alone",
            "COMPLETED",
        )
        assert (experiment["best_validation"], experiment["best_trial_id"]) == (0.75, number)
    trial = server.trial()
    assert (trial["hparams"], trial["seed"], trial["steps_completed"]) == ({"lr": 0.1}, 5, 3)
    assert (trial["best_validation"], trial["best_steps"]) == (0.75, 2)
    curves = {
        (curve["group"], curve["name"]): curve["points"]
        for curve in server.get("/trials/1/metrics")["metrics"]
    }
    assert curves["training", "loss"] == [[1, 1.0], [2, 0.5], [3, 1 / 3]]
    assert curves["validation", "acc"] == [[2, 0.75], [3, "NaN"]]
    server.request("DELETE", "/experiments/1")
    assert server.get("/trials/2/metrics", group="training")["metrics"][0]["points"][0] == [1, 1.0]


@pytest.mark.needs_extension("run_import")
@pytest.mark.parametrize("content", [b"", b"hello\n", b'{"kind":"header","format":2}\n'])
def test_invalid_metrics_file_is_rejected(sqlite_server: Server, content: bytes) -> None:
    response = sqlite_server.http.post("/api/v1/import", content=content)
    assert (response.status_code, response.json()["error"]["type"]) == (422, "config")


@pytest.mark.needs_extension("run_import")
def test_invalid_line_stores_nothing(sqlite_server: Server, tmp_path: Path) -> None:
    content = written(tmp_path / "run") + b'{"kind":"metrics"}\n'
    response = sqlite_server.http.post("/api/v1/import", content=content)
    assert response.status_code == 422
    assert response.json()["error"]["problems"][0].startswith("line 8: ")
    assert sqlite_server.get("/experiments")["experiments"] == []


@pytest.mark.needs_extension("run_import")
def test_invalid_time_names_its_line(sqlite_server: Server, tmp_path: Path) -> None:
    lines = written(tmp_path / "run").splitlines(keepends=True)
    lines[2] = re.sub(rb'"time":[0-9.]+', b'"time":1e300', lines[2])
    response = sqlite_server.http.post("/api/v1/import", content=b"".join(lines))
    assert response.status_code == 422
    assert response.json()["error"]["problems"][0].startswith("line 3: time: must be in seconds")


def long_file(directory: Path, steps: int) -> bytes:
    file = MetricsFile(directory / "long.jsonl", make_spec(directory))
    for step in range(1, steps + 1):
        file.append(file.encode(metrics("training", step, loss=step / 2)))
    file.close()
    return (directory / "long.jsonl").read_bytes()


@pytest.mark.slow
def test_large_import_yields_to_other_writes(server: Server, tmp_path: Path) -> None:
    content = long_file(tmp_path, 60_000)
    database = server.services.database
    before = database.jobs
    with ThreadPoolExecutor() as pool:
        importing = pool.submit(server.http.post, "/api/v1/import", content=content)
        until("the import has begun to store", lambda: database.jobs > before + 2)
        agent_id = server.add_agent()  # a write that waits for one part at most
        assert importing.result().status_code == 201
    assert agent_id == 1
    assert database.jobs - before >= 60_000 / 4_000
    points = server.get("/trials/1/metrics", first=59_999)["metrics"][0]["points"]
    assert points == [[59_999, 59_999 / 2], [60_000, 30_000.0]]


BREAK = {
    "sqlite": (
        "CREATE TRIGGER broken BEFORE INSERT ON points WHEN NEW.step = 15000 "
        "BEGIN SELECT RAISE(ABORT, 'broken'); END",
        "DROP TRIGGER broken",
    ),
    "postgresql": (
        "ALTER TABLE points ADD CONSTRAINT broken CHECK (step <> 15000) NOT VALID",
        "ALTER TABLE points DROP CONSTRAINT broken",
    ),
}


@pytest.mark.needs_extension("run_import")
def test_failed_import_leaves_nothing(server: Server, tmp_path: Path) -> None:
    content = long_file(tmp_path, 20_000)
    spoil, mend = BREAK["sqlite" if server.services.database.sqlite else "postgresql"]
    server.execute(spoil)
    assert server.http.post("/api/v1/import", content=content).status_code == 500
    assert server.get("/experiments")["experiments"] == []
    assert server.sql("SELECT count(*) FROM points") == [(0,)]
    assert server.sql("SELECT count(*) FROM rollups") == [(0,)]
    server.execute(mend)
    experiment = server.request("POST", "/import", content=content)["experiment"]
    (trial,) = server.trials(experiment["id"])
    assert trial["steps_completed"] == 20_000
    assert server.services.orchestrator.deletions.importing == set()


@pytest.mark.needs_extension("run_import")
@pytest.mark.parametrize(
    "kind", ["sqlite", pytest.param("postgresql", marks=pytest.mark.processes)]
)
def test_start_removes_points_of_interrupted_import(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = new_database(request.getfixturevalue("postgresql")) if kind == "postgresql" else ""
    with serve(tmp_path, url) as server:
        server.request("POST", "/import", content=written(tmp_path / "run"))
        count = server.sql("SELECT count(*) FROM points")
        for trial_id in (5, 900):
            server.write(lambda work, of=trial_id: store_points(work, of, [(1, 1, 0.5, 1.0)]))
        assert server.sql("SELECT count(DISTINCT trial_id) FROM rollups") == [(3,)]
    with serve(tmp_path, url) as again:
        until(
            "they are gone",
            lambda: again.sql("SELECT count(DISTINCT trial_id) FROM rollups"),
            lambda rows: rows == [(1,)],
        )
        assert again.sql("SELECT count(*) FROM points") == count
