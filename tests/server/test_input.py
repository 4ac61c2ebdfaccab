"""Invalid input of any caller: one clear error, never an internal server error."""

import csv
import io
import json
import math
from typing import Any
from urllib.parse import quote

import msgspec
import pytest

from tests.server.helpers import Server, checkpoint, experiment_config, metrics, model_archive
from zerolab.contract.messages import MSGPACK, LogBatch, LogEntry
from zeroserver.api.runs import FastRoutes
from zeroserver.store.points import store_points


def nested(depth: int) -> dict[str, Any]:
    inner: dict[str, Any] = {"deepest": 1}
    for _ in range(depth):
        inner = {"a": inner}
    return inner


def send(server: Server, engine: Any = None, **changes: Any) -> Any:
    archive = model_archive(server.directory / "model", engine)
    text = json.dumps(experiment_config(**changes))
    files = {"archive": ("model.tar.gz", archive)}
    return server.http.post("/api/v1/experiments", data={"config": text}, files=files)


def problems(response: Any) -> str:
    assert response.status_code == 422, response.text
    error = response.json()["error"]
    return " ".join([error["message"], *error["problems"]])


@pytest.mark.parametrize("depth", [70, 300, 900])
def test_deeply_nested_values_are_rejected(sqlite_server: Server, depth: int) -> None:
    space = {"deepspeed_config": "ds_config.json", "x": nested(depth)}
    errors = problems(send(sqlite_server, hyperparameters=space))
    assert "hyperparameters.x.a...: must be nested at most 64 deep" in errors
    assert "at most 64 deep" in problems(send(sqlite_server, data=nested(depth)))
    engine = {"train_batch_size": 4, "x": nested(depth)}
    assert "x.a.a...: must be nested at most 64 deep" in problems(send(sqlite_server, engine))
    sqlite_server.submit(data=nested(50))
    fork = sqlite_server.http.post("/api/v1/experiments/1/fork", json={"config": nested(depth)})
    problems(fork)


@pytest.mark.parametrize(
    "value", ["NaN", "Infinity", "-Infinity", "1e999", '"\\ud800"', '"\\u0000"']
)
def test_fork_rejects_non_finite_numbers_and_surrogates(sqlite_server: Server, value: str) -> None:
    sqlite_server.submit()
    headers = {"Content-Type": "application/json"}
    body = '{"config": {"hyperparameters": {"lr": VALUE}}}'.replace("VALUE", value)
    path = "/api/v1/experiments/1/fork"
    problems(sqlite_server.http.post(path, content=body, headers=headers))
    changed = sqlite_server.http.patch(
        "/api/v1/experiments/1", content='{"name": VALUE}'.replace("VALUE", value), headers=headers
    )
    problems(changed)
    assert len(sqlite_server.get("/experiments")["experiments"]) == 1


@pytest.mark.parametrize("time", [math.nan, math.inf, -math.inf, 1e300, -1.0])
def test_invalid_time_is_rejected(server: Server, time: float) -> None:
    server.submit()
    server.add_agent()
    run_id = server.begin().run_id
    replace = msgspec.structs.replace
    for record in (metrics("training", 1, loss=1.0), checkpoint(1)):
        response = server.send(run_id, 1, [replace(record, time=time)])
        assert "time: must be in seconds since 1970" in problems(response)
    body = msgspec.msgpack.encode(LogBatch(0, [LogEntry("hello", time)]))
    headers = {"Content-Type": MSGPACK}
    response = server.http.post(f"/api/v1/runs/{run_id}/logs", content=body, headers=headers)
    assert "time: must be in seconds since 1970" in problems(response)
    assert server.send(run_id, 1, [metrics("training", 1, loss=1.0)]).json() == {"stored": 1}
    assert server.log(run_id, 0, "hello") == 1


def test_experiment_texts_have_a_size_limit(sqlite_server: Server) -> None:
    server = sqlite_server
    server.submit(labels=["x" * 255] * 100, max_restarts=1_000_000)
    for change in (
        {"labels": ["x"] * 100_000},
        {"labels": ["x" * 256]},
        {"name": "a\0b"},
        {"name": "x" * 256},
    ):
        (key,) = change
        assert key in problems(send(server, **change))
        changed = server.http.patch("/api/v1/experiments/1", json=change)
        assert key in problems(changed)
    assert "max_restarts" in problems(send(server, max_restarts=2**70))
    assert "resources.weight" in problems(send(server, resources={"weight": 1e308}))
    assert "description" in problems(send(server, description="a\0b"))


def test_trial_restarts_after_1000_failures(sqlite_server: Server) -> None:
    server = sqlite_server
    server.submit(max_restarts=1_000_000)
    server.add_agent()
    server.write(lambda work: work.run("UPDATE trials SET restarts = 5000"))
    server.exit(server.begin().run_id, 1)
    assert (server.trial()["state"], server.trial()["restarts"]) == ("QUEUED", 5001)


@pytest.mark.parametrize(
    "text", ["1.0", "%201", "1%0a", "01", "+1", "1_0", "\N{BENGALI DIGIT ONE}"]
)
def test_id_has_one_spelling(sqlite_server: Server, text: str) -> None:
    server = sqlite_server
    server.submit()
    for path in ("experiments/{}", "experiments/{}/trials", "trials/{}", "runs/{}/directive"):
        response = server.http.get(f"/api/v1/{path.format(text)}")
        assert response.status_code in {404, 422}, (path, response.text)
    for method, path in (("DELETE", "experiments/{}"), ("POST", "experiments/{}/kill")):
        response = server.http.request(method, f"/api/v1/{path.format(text)}")
        assert response.status_code in {404, 422}, (path, response.text)
    assert server.experiment()["state"] == "ACTIVE"


@pytest.mark.parametrize("text", ["1.0", "01", "1_0", " 1", "+1", "1e0", "\N{BENGALI DIGIT ONE}"])
def test_query_number_has_one_spelling(sqlite_server: Server, text: str) -> None:
    server = sqlite_server
    server.submit()
    for path, name in (
        ("experiments", "limit"),
        ("trials/1/logs", "after"),
        ("trials/1/logs", "rank"),
        ("trials/1/metrics", "first"),
    ):
        response = server.http.get(f"/api/v1/{path}", params={name: text})
        assert response.status_code == 422, (path, name, response.text)
        assert response.json()["error"]["problems"] == [
            f"{name}: must be a whole number, got {text!r}"
        ]
    assert server.get("/experiments", limit=1)["experiments"][0]["id"] == 1


@pytest.mark.needs_extension("metrics_export")
def test_export_of_old_rows_is_json(server: Server) -> None:
    server.submit()
    server.add_agent()
    server.report(server.begin().run_id, metrics("training", 1, loss=1.0))
    server.write(
        lambda work: store_points(
            work,
            1,
            [
                (
                    work.orchestrator.metrics.keys.find(work, "training", "loss"),
                    2,
                    math.inf,
                    math.inf,
                )
            ],
        )
    )
    text = server.http.get("/api/v1/experiments/1/metrics/export").text

    def refuse(name: str) -> float:
        raise AssertionError(name)

    lines = [json.loads(line, parse_constant=refuse) for line in text.splitlines()]
    assert [(line["value"], line["time_s"]) for line in lines] == [
        (1.0, 1_800_000_001.0),
        ("Infinity", "Infinity"),
    ]


@pytest.mark.needs_extension("metrics_export")
def test_export_escapes_formulas(sqlite_server: Server) -> None:
    server = sqlite_server
    server.submit()
    server.add_agent()
    names = ["=1+1", "+1", "-1", "@x", "plain", "a=b"]
    values = dict.fromkeys(names, -1.0)
    server.report(server.begin().run_id, metrics("training", 1, **values))
    table = server.http.get("/api/v1/experiments/1/metrics/export?format=csv").text
    rows = list(csv.DictReader(io.StringIO(table, newline="")))
    assert {row["name"] for row in rows} == {
        name if name in {"plain", "a=b"} else f"'{name}" for name in names
    }
    assert {row["value"] for row in rows} == {"-1.0"}


@pytest.mark.parametrize(
    ("method", "path", "body", "message"),
    [
        ("GET", "/experiments/1.0", None, "experiment_id: must be an id, a whole number "),
        ("PATCH", "/experiments/1", {"name": "a\0b"}, "name: must have no control characters, "),
    ],
)
def test_error_states_rule_and_value_once(
    sqlite_server: Server, method: str, path: str, body: Any, message: str
) -> None:
    sqlite_server.submit()
    response = sqlite_server.http.request(method, f"/api/v1{path}", json=body)
    assert response.status_code == 422
    problems_ = response.json()["error"]["problems"]  # a missing extension may have the route
    (problem,) = (line for line in problems_ if not line.endswith("which is not installed"))
    assert problem.startswith(message)
    assert problem.count("got ") == 1


@pytest.mark.parametrize(
    ("method", "path", "problem"),
    [
        ("GET", "?stat=ERROR&limit=1", "stat: unknown parameter; did you mean 'state'?"),
        ("POST", "?paused=true", "paused: unknown parameter; there are: activate, test"),
        ("POST", "/1/kill?dry_run=true", "dry_run: unknown parameter; there are none"),
        ("GET", "/1/trials?after=0&a=1&b=2", "a: unknown parameter"),
    ],
)
def test_unknown_parameter_is_rejected(
    sqlite_server: Server, method: str, path: str, problem: str
) -> None:
    sqlite_server.submit()
    response = sqlite_server.http.request(method, f"/api/v1/experiments{path}")
    assert response.status_code == 422
    assert response.json()["error"]["problems"][0].startswith(problem)
    assert sqlite_server.get("/experiments/1")["experiment"]["state"] == "ACTIVE"


@pytest.mark.needs_extension("queue")
@pytest.mark.parametrize("bad", ["a\nb", "a\x1b[2Jb", "a\rb", "a\x7f", "\x9b1m", "a\u202eb"])
def test_control_characters_in_names_are_rejected(sqlite_server: Server, bad: str) -> None:
    server = sqlite_server
    server.submit()
    responses = [send(server, name=bad), send(server, labels=[bad])]
    responses += [
        server.http.patch("/api/v1/experiments/1", json=change)
        for change in ({"name": bad}, {"labels": [bad]})
    ]
    responses += [
        server.http.post("/api/v1/experiments/1/fork", json={"config": {"name": bad}}),
        server.http.post("/api/v1/models", json={"name": bad}),
        send(server, description="a\x1b[2J"),
        server.http.patch("/api/v1/experiments/1", json={"notes": "a\n\tb\x1b[2J"}),
        server.http.post("/api/v1/models", json={"name": "m", "description": "a\x1bb"}),
    ]
    agent = {"name": "a", "host": "h", "slots": [{"id": 0, "device": "cpu"}]}
    for change in (
        {"name": bad},
        {"host": bad},
        {"pool": bad},
        {"identity": bad},
        {"slots": [{"id": 0, "device": bad}]},
    ):
        responses.append(server.http.post("/api/v1/agents", json=agent | change))
    for response in responses:
        problems(response)
    for path, body in (("quotas/label", {"max_slots": 1}), ("pools", {"policy": "fifo"})):
        response = server.http.put(f"/api/v1/{path}/{quote(bad)}", json=body)
        assert response.status_code in {404, 422}, response.text
    assert server.experiment()["name"] == "digits"
    assert server.get("/agents")["agents"] == []


@pytest.mark.parametrize(
    "change",
    [
        {"slots": [{"id": n, "device": "cpu"} for n in range(100_000)]},
        {"slots": [{"id": 0, "device": "cpu", "node": -1}]},
        {"slots": [{"id": 0, "device": "x" * 300}]},
        {"host": "x" * 300},
    ],
)
def test_invalid_agents_are_rejected(sqlite_server: Server, change: dict[str, Any]) -> None:
    agent = {"name": "a", "host": "h", "slots": [{"id": 0, "device": "cpu"}]}
    problems(sqlite_server.http.post("/api/v1/agents", json=agent | change))
    problems(send(sqlite_server, resources={"slots_per_trial": 100_000}))


def test_unknown_nodes_are_rejected(sqlite_server: Server) -> None:
    server = sqlite_server
    server.submit()
    server.add_agent()
    run_id = server.begin().run_id
    for node in (1, -1, 10**9):
        response = server.http.post(
            f"/api/v1/runs/{run_id}/exited", json={"exit_code": 0, "node": node}
        )
        assert response.status_code == 404, response.text
        lines = {"first": 0, "entries": [], "node": node}
        assert server.http.post(f"/api/v1/runs/{run_id}/logs", json=lines).status_code == 404
    assert server.trial()["state"] == "RUNNING"


def test_names_of_earlier_versions_are_accepted(sqlite_server: Server) -> None:
    server = sqlite_server
    server.submit()
    server.execute("UPDATE experiments SET config = replace(config, '\"digits\"', '\"di\\ngits\"')")
    server.services.orchestrator.configs.forget(1)
    server.add_agent()
    assert server.begin().run_id


@pytest.mark.needs_extension("custom_search")
@pytest.mark.parametrize(
    ("space", "key"),
    [
        ({"a\tb": 1}, "hyperparameters: names"),
        ({"net": [{"x\x1b[2J": 1}]}, "hyperparameters.net[0]: names"),
        ({"l\u202er": {"type": "double", "minval": 0, "maxval": 1}}, "hyperparameters: names"),
    ],
)
def test_control_characters_in_hyperparameter_names(
    server: Server, space: dict[str, Any], key: str
) -> None:
    errors = problems(
        server.try_submit(hyperparameters={"deepspeed_config": "ds_config.json"} | space)
    )
    assert f"{key} must have no control characters, got" in errors
    assert server.get("/experiments")["experiments"] == []
    searcher = {"name": "custom", "metric": "loss", "max_length": 10}
    server.submit(searcher=searcher)
    create = {"kind": "create", "trial_id": 1, "hparams": space}
    body = {"after": -1, "handled": 0, "operations": [create]}
    response = server.http.post("/api/v1/experiments/1/searcher/operations", json=body)
    assert response.status_code == 422
    assert "must have no control characters" in response.text
    assert server.trials() == []


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/runs/1/reports", 422),
        ("POST", "/runs/7/reports", 404),
        ("POST", "/runs/0x1/reports", 404),
        ("POST", "/runs/ /logs", 404),
        ("POST", "/runs//reports", 404),
        ("POST", "/runs/1/reports/", 307),
        ("GET", "/runs/1/reports", 405),
        ("GET", "/runs/1/directive?wait_s=x", 422),
        ("POST", "/runs/1/unknown", 404),
        ("GET", "/agents/9/work", 404),
    ],
)
def test_fast_routes_answer_as_router_does(
    sqlite_server: Server, monkeypatch: pytest.MonkeyPatch, method: str, path: str, status: int
) -> None:
    server = sqlite_server
    server.submit()
    server.add_agent()
    server.begin()
    body = b'{"first": 1, "records": []}' if path.startswith("/runs/7") else b"{"

    def send_request() -> tuple[int, dict[str, str], bytes]:
        response = server.http.request(
            method, f"/api/v1{path}", content=body, follow_redirects=False
        )
        return response.status_code, dict(response.headers), response.content

    direct = send_request()
    assert direct[0] == status

    async def pass_on(layer: FastRoutes, scope: Any, receive: Any, send: Any) -> None:
        await layer._app(scope, receive, send)

    monkeypatch.setattr(FastRoutes, "__call__", pass_on)
    assert send_request() == direct
