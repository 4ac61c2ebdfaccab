"""MLflow's REST API: its conventions, the rights of users, and the experiments of its runs."""

import base64
import math
from typing import Any

import pytest

from tests.server.helpers import Server, on_sqlite
from zeroserver.extensions.external_runs.supervisor import LOST_S, ExternalRunWatch
from zeroserver.extensions.mlflow_api.activity import SILENT_S, MlflowActivity
from zeroserver.extensions.mlflow_api.search_grammar import (
    parse_filter,
    parse_order,
    sorted_items,
)

API = "/mlflow/api/2.0/mlflow"
FILES = "/mlflow/api/2.0/mlflow-artifacts/artifacts"


def call(server: Server, method: str, route: str, expect: int = 200, /, **fields: Any) -> Any:
    where = {"params": fields} if method == "GET" else {"json": fields}
    response = server.http.request(method, f"{API}/{route}", **where)
    assert response.status_code == expect, response.text
    return response.json()


def create_run(server: Server, **fields: Any) -> str:
    run = call(server, "POST", "runs/create", experiment_id="0", **fields)["run"]
    run_id: str = run["info"]["run_id"]
    return run_id


def metrics_of(server: Server, run_id: str) -> dict[str, Any]:
    run = call(server, "GET", "runs/get", run_id=run_id)["run"]
    return {item["key"]: item["value"] for item in run["data"]["metrics"]}


def history(server: Server, run_id: str, key: str) -> list[tuple[int, Any, int]]:
    answer = call(server, "GET", "metrics/get-history", run_id=run_id, metric_key=key)
    return [(item["step"], item["value"], item["timestamp"]) for item in answer["metrics"]]


def as_user(server: Server, name: str, role: str = "member") -> str:
    server.post("/users", {"name": name, "role": role})
    secret: str = server.post(f"/users/{name}/tokens", {"expires_s": 3600})["secret"]
    return secret


def test_run_is_a_live_experiment(server: Server) -> None:
    number = call(server, "POST", "experiments/create", name="vision")["experiment_id"]
    tags = [{"key": "team", "value": "a"}, {"key": "mlflow.user", "value": "me"}]
    fields = {"experiment_id": number, "start_time": "1800000000000", "tags": tags}
    run = call(server, "POST", "runs/create", run_name="first", **fields)["run"]
    assert (run["info"]["status"], run["info"]["start_time"]) == ("RUNNING", 1_800_000_000_000)
    run_id = run["info"]["run_id"]
    assert server.experiment()["state"] == "ACTIVE"
    metrics = [
        {"key": "loss", "value": 1 / step, "timestamp": 1_800_000_000_000 + step, "step": step}
        for step in (3, 1, 2)
    ]
    metrics.append({"key": "nan", "value": "NaN", "timestamp": "1800000000000", "step": "7"})
    params = [{"key": "lr", "value": "1e-3"}, {"key": "api_token", "value": "hf_secret"}]
    batch = {"metrics": metrics, "params": params, "tags": [{"key": "k", "value": "v"}]}
    call(server, "POST", "runs/log-batch", run_id=run_id, **batch)
    assert server.trial()["hparams"]["lr"] == 0.001
    assert server.experiment()["labels"] == ["vision", "team=a", "k=v"]
    assert server.experiment()["project"] == "vision"
    call(server, "POST", "runs/delete-tag", run_id=run_id, key="k")
    answer = call(server, "GET", "runs/get", run_id=run_id)
    assert "hf_secret" not in str(answer) + str(server.trial())
    params = {item["key"]: item["value"] for item in answer["run"]["data"]["params"]}
    assert params["lr"] == "1e-3"
    assert metrics_of(server, run_id) == {"loss": 1 / 3, "nan": "NaN"}
    assert [point[0] for point in history(server, run_id, "loss")] == [1, 2, 3]
    assert history(server, run_id, "loss")[0][2] == 1_800_000_000_001
    found = call(
        server, "POST", "runs/search", experiment_ids=[number],
        filter="metrics.loss < 1 AND params.lr = '1e-3' and tags.team LIKE 'a%'",
    )["runs"]  # fmt: skip
    assert [item["info"]["run_id"] for item in found] == [run_id]
    end = {"run_id": run_id, "status": "FINISHED", "end_time": "1800000001000"}
    info = call(server, "POST", "runs/update", **end)["run_info"]
    assert (info["status"], info["end_time"]) == ("FINISHED", 1_800_000_001_000)
    assert server.experiment()["state"] == "COMPLETED"
    # Clients evaluate after the end, and continue runs.
    call(server, "POST", "runs/log-metric", run_id=run_id, key="final", value=5)
    assert server.experiment()["state"] == "COMPLETED"
    call(server, "POST", "runs/update", run_id=run_id, status="RUNNING")
    assert server.experiment()["state"] == "ACTIVE"
    call(server, "POST", "runs/update", run_id=run_id, status="FAILED")
    assert server.experiment()["state"] == "ERROR"
    server.request("DELETE", "/experiments/1")
    call(server, "GET", "runs/get", 404, run_id=run_id)


@on_sqlite
def test_repeated_steps(server: Server) -> None:
    run_id = create_run(server)
    first = {"run_id": run_id, "key": "a", "step": 5}
    call(server, "POST", "runs/log-metric", **first, value=1, timestamp=1000)
    call(server, "POST", "runs/log-metric", **first, value=2, timestamp=2000)
    assert history(server, run_id, "a") == [(5, 2, 2000)]
    # Without a step, clients send 0; a request that is sent again counts once.
    for value in (1, 2, 2, 3):
        fields = {"key": "b", "value": value, "timestamp": 1000 * value}
        call(server, "POST", "runs/log-metric", run_id=run_id, **fields)
    expected = [(0, 1, 1000), (1, 2, 2000), (2, 3, 3000)]
    assert history(server, run_id, "b") == expected
    batch = [{"key": "c", "value": value, "timestamp": value} for value in (1, 2, 2)]
    call(server, "POST", "runs/log-batch", run_id=run_id, metrics=batch)
    assert history(server, run_id, "c") == [(0, 1, 1), (1, 2, 2)]


@on_sqlite
def test_artifacts(server: Server) -> None:
    run_id = create_run(server)
    for name in ("model/a.bin", "model/deep/b.txt", "picture.png"):
        response = server.http.put(f"{FILES}/{run_id}/{name}", content=name.encode())
        assert response.status_code == 200, response.text
    listed = server.http.get(FILES, params={"path": f"{run_id}/model"}).json()["files"]
    assert listed == [
        {"path": "a.bin", "is_dir": False, "file_size": 11}, {"path": "deep", "is_dir": True},
    ]  # fmt: skip
    files = call(server, "GET", "artifacts/list", run_id=run_id, path="model")["files"]
    assert [item["path"] for item in files] == ["model/a.bin", "model/deep"]
    assert server.http.get(f"{FILES}/{run_id}/model/a.bin").content == b"model/a.bin"
    assert server.http.get(f"{FILES}/{run_id}/none").json()["error_code"] == (
        "RESOURCE_DOES_NOT_EXIST"
    )
    assert server.get("/trials/1/media/names")["names"][-1]["type"] == "image"
    for path in ("%2e%2e/x", "a/%2e%2e/%2e%2e/x", "%2Fetc/passwd", "a%5Cb", "x" * 300):
        response = server.http.put(f"{FILES}/{run_id}/{path}", content=b"x")
        assert response.json()["error_code"] == "INVALID_PARAMETER_VALUE", path
    assert not list(server.services.orchestrator.home.path.glob("media-*"))


@on_sqlite
def test_logged_model(server: Server) -> None:
    run_id = create_run(server)
    fields = {"name": "net", "source_run_id": run_id, "experiment_id": "0"}
    model = call(server, "POST", "logged-models", **fields)["model"]["info"]
    folder = model["artifact_uri"].removeprefix("mlflow-artifacts:/")
    assert server.http.put(f"{FILES}/{folder}/MLmodel", content=b"x").status_code == 200
    path = f"logged-models/{model['model_id']}"
    call(server, "PATCH", path, status="LOGGED_MODEL_READY")
    assert call(server, "GET", path)["model"]["info"]["status"] == "LOGGED_MODEL_READY"
    query = {"experiment_ids": ["0"], "filter": "name = 'net'"}
    assert len(call(server, "POST", "logged-models/search", **query)["models"]) == 1
    files = call(server, "GET", f"{path}/artifacts/directories")["files"]
    assert files == [{"path": "MLmodel", "is_dir": False, "file_size": 1}]
    call(server, "DELETE", path)
    call(server, "GET", path, 404)


@on_sqlite
def test_access(server: Server) -> None:
    run_id = create_run(server)
    ann, eve = as_user(server, "ann"), as_user(server, "eve", "viewer")
    headers = server.http.headers
    headers["Authorization"] = f"Bearer {ann}"
    refused = call(server, "POST", "runs/set-tag", 403, run_id=run_id, key="k", value="v")
    assert refused["error_code"] == "PERMISSION_DENIED"
    assert "belongs to admin" in refused["message"]
    upload = server.http.put(f"{FILES}/{run_id}/x", content=b"x")
    assert upload.status_code == 403
    call(server, "POST", "experiments/delete", 403, experiment_id="0")
    own_run = create_run(server)
    call(server, "POST", "runs/set-tag", run_id=own_run, key="k", value="v")
    headers["Authorization"] = f"Bearer {eve}"
    call(server, "GET", "runs/get", run_id=run_id)
    refused = call(server, "POST", "runs/create", 403, experiment_id="0")
    assert "role" in refused["message"]
    basic = base64.b64encode(f"anything:{ann}".encode()).decode()
    headers["Authorization"] = f"Basic {basic}"
    call(server, "GET", "runs/get", run_id=run_id)
    assert server.http.get("/api/v1/experiments").status_code == 401
    page = server.http.get(f"{API}/runs/get", headers={"Origin": "http://other"})
    assert page.status_code == 401
    headers["Authorization"] = "Basic %%%"
    assert call(server, "GET", "runs/get", 401)["error_code"] == "UNAUTHENTICATED"
    headers["Authorization"] = f"Bearer {server.token}"
    audit = [row[0] for row in server.sql("SELECT action FROM audit ORDER BY id")]
    assert any("runs/create" in action for action in audit)
    assert not any("runs/set-tag" in action for action in audit)


INVALID: list[tuple[str, dict[str, Any], str]] = [
    ("runs/log-metric", {"key": "a", "value": "x"}, "value: must be a number"),
    ("runs/log-metric", {"key": "a", "value": 1, "step": -1}, "steps: must be 0"),
    ("runs/log-metric", {"key": "a", "value": 1, "timestamp": 1e30}, "timestamp"),
    ("runs/log-metric", {"value": 1}, "Missing value for required parameter 'key'"),
    ("runs/log-batch", {"metrics": [{}] * 1001}, "at most 1000"),
    ("runs/log-batch", {"metrics": [1]}, "list of objects"),
    ("runs/log-batch", {"params": [{"key": "a", "value": "b" * 9000}]}, "8000 characters"),
    ("runs/log-parameter", {"key": "lr", "value": "2"}, "must keep its value '1'"),
    ("runs/update", {"status": "DONE"}, "status: must be"),
    ("runs/search", {"filter": "metrics.a < 1 OR metrics.b < 1"}, "joined by AND"),
    ("runs/search", {"filter": "metrics.a < 'x'"}, "must be compared with a number"),
    ("runs/search", {"filter": "params.a = 1"}, "with a quoted text"),
    ("runs/search", {"order_by": ["color"]}, "attribute: must be"),
    ("runs/search", {"max_results": 10**6}, "max_results: must be"),
    ("experiments/create", {"name": "a\x00b"}, "control characters"),
]


@on_sqlite
def test_printed_links_lead_to_the_page(server: Server) -> None:
    number = call(server, "POST", "experiments/create", name="a b")["experiment_id"]
    run_id = call(server, "POST", "runs/create", experiment_id=number)["run"]["info"]["run_id"]
    links = {"run": run_id}, {"experiment": number}, {"run": "f" * 32}, {"experiment": "9"}
    answers = [server.http.get("/mlflow/links", params=link) for link in links]
    assert [answer.status_code for answer in answers] == [200, 200, 404, 404]
    pages = [answer.json()["page"] for answer in answers[:2]]
    assert pages == ["/#/experiments/1", "/#/experiments?find=a%20b"]
    assert server.get("/experiments")["experiments"][0]["project"] == "a-b"
    headers = server.http.headers
    del headers["Authorization"]
    assert "links.js" in server.http.get("/mlflow/").text
    assert server.http.get("/mlflow/links", params=links[0]).status_code == 401


@on_sqlite
def test_invalid_requests(server: Server) -> None:
    run_id = create_run(server)
    call(server, "POST", "runs/log-parameter", run_id=run_id, key="lr", value="1")
    for path, fields, message in INVALID:
        answer = call(server, "POST", path, 422, run_id=run_id, **fields)
        assert answer["error_code"] == "INVALID_PARAMETER_VALUE"
        assert message in answer["message"]


@on_sqlite
def test_errors_that_clients_expect(server: Server) -> None:
    twice = [call(server, "POST", "experiments/create", status, name="a") for status in (200, 400)]
    assert twice[1]["error_code"] == "RESOURCE_ALREADY_EXISTS"
    missing = call(server, "GET", "experiments/get-by-name", 404, experiment_name="b")
    assert missing["error_code"] == "RESOURCE_DOES_NOT_EXIST"
    unknown = call(server, "POST", "registered-models/create", 404)
    assert unknown["error_code"] == "ENDPOINT_NOT_FOUND"


@on_sqlite
def test_canceled_run_refuses_reports(server: Server) -> None:
    run_id = create_run(server)
    server.act("cancel")
    for _ in range(2):
        answer = call(server, "POST", "runs/log-metric", 409, run_id=run_id, key="a", value=1)
        assert "canceled" in answer["message"]
    assert server.experiment()["state"] == "CANCELED"
    assert call(server, "GET", "runs/get", run_id=run_id)["run"]["info"]["status"] == "KILLED"


@on_sqlite
def test_silent_run_stays_open_for_a_day(server: Server) -> None:
    run_id = create_run(server)
    watch, activity = ExternalRunWatch(server.services), MlflowActivity(server.services)

    def wait(seconds: float) -> str:
        server.clock.now += seconds
        assert server.http.portal is not None
        server.http.portal.call(activity.tick)
        server.http.portal.call(watch.tick)
        state: str = server.trial()["state"]
        return state

    assert [wait(LOST_S) for _ in range(3)] == ["RUNNING"] * 3
    assert wait(SILENT_S) == "ERROR"
    call(server, "POST", "runs/log-metric", run_id=run_id, key="a", value=1)
    assert server.trial()["state"] == "RUNNING"
    assert metrics_of(server, run_id) == {"a": 1}


VALUES = {
    ("metric", "val/loss"): 0.5,
    ("param", "optimizer"): "Adam",
    ("tag", "mlflow.runName"): "first run",
    ("attribute", "status"): "FINISHED",
    ("attribute", "start_time"): 1000,
}
ATTRIBUTES = ("status", "start_time", "run_name")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", True),
        ("metrics.`val/loss` < 1", True),
        ('metrics."val/loss" >= 0.6', False),
        ("metric.missing > 0", False),
        ("params.optimizer = 'Adam' and status != 'RUNNING'", True),
        ("params.optimizer LIKE 'adam'", False),
        ("params.optimizer ILIKE 'a_M%'", False),
        ("params.optimizer ILIKE 'aDa%'", True),
        ("tags.mlflow.runName = 'first run'", True),
        ("tags.`mlflow.runName` IN ('x', 'first run')", True),
        ("attributes.status NOT IN ('FINISHED')", False),
        ("attr.start_time > 999 AND Metrics.`val/loss` = 5e-1", True),
        ("params.none IS NULL AND params.optimizer IS NOT NULL", True),
    ],
)
def test_filter(text: str, expected: bool) -> None:
    comparisons = parse_filter(text, ATTRIBUTES)
    assert all(comparison.matches(VALUES) for comparison in comparisons) is expected


def test_order_puts_missing_values_last() -> None:
    items = [({("metric", "a"): value}, value) for value in (2.0, math.nan, 1.0, 3.0)]
    items.append(({}, -1.0))
    ordered = sorted_items(items, parse_order(["metrics.a DESC"], ATTRIBUTES))
    assert ordered[:3] == [3.0, 2.0, 1.0]
