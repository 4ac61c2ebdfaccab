"""docs/reference/rest.md, the OpenAPI document and the responses agree."""

import importlib
import os
import pkgutil
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import select

from tests.server.helpers import Server, checkpoint, training, validation
from tests.server.processes import LiveServer
from tests.waiting import DEADLINE_S
from tools.api_types import generated
from zeroserver.api import resources
from zeroserver.api.rows import Resource
from zeroserver.extensions.analysis import resources as analysis
from zeroserver.extensions.queue import resources as queue
from zeroserver.process import _parser
from zeroserver.store.schema import logs

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "rest.md"
EXAMPLE = re.compile(r"^```sh\n(.*?)^```", re.DOTALL | re.MULTILINE)
ROWS = {
    (method, path): row_text
    for method, path, row_text in re.findall(
        r"^\| `(GET|POST|PUT|PATCH|DELETE) (/\S+)` \| (.*) \|$", PAGE.read_text(), re.MULTILINE
    )
}
"""Text of the row of each route."""
PAGED = {"after", "limit"}
AT_THE_ROOT = {"/healthz", "/metrics"} | {
    f"/login{end}" for end in ("", "/methods", "/oidc", "/oidc/callback", "/share")
}


def test_documented_routes_equal_actual_routes(
    sqlite_server: Server,
) -> None:
    document = sqlite_server.get("/openapi.json")
    served = {
        (method.upper(), path)
        for path, operations in document["paths"].items()
        for method in operations
    }
    documented = {
        (method, path if path in AT_THE_ROOT else f"/api/v1{path}") for method, path in ROWS
    }
    assert documented == served


def test_generated_types_and_tables_are_current() -> None:
    files = generated(ROOT)
    assert {path.name for path in files} == {"resources.ts", "rest.md", "life_cycle.md"}
    for path, text in files.items():
        assert path.read_text(encoding="utf-8") == text, "run: python -m tools.api_types"


def test_every_declared_resource_is_documented() -> None:
    room = f"{resources.__name__}."
    for file in pkgutil.iter_modules(resources.__path__, room):
        importlib.import_module(file.name)
    declared = {
        class_ for class_ in Resource.__subclasses__() if class_.__module__.startswith(room)
    }
    assert {class_.__name__ for class_ in declared} == set(resources.__all__)


def test_new_resource_field_is_one_line(server: Server) -> None:
    class Wider(resources.Log, frozen=True):
        experiment_id: int

    server.submit()
    server.add_agent()
    server.log(server.begin().run_id, 0, "hello")
    with server.services.database.read() as connection:
        row = connection.execute(select(logs)).mappings().first()
    assert row is not None
    read = Wider.of(row)
    assert (read.experiment_id, read.text) == (1, "hello")


def test_every_parameter_is_in_the_row_of_its_route(sqlite_server: Server) -> None:
    missing = []
    for path, operations in sqlite_server.get("/openapi.json")["paths"].items():
        for method, operation in operations.items():
            row = ROWS[method.upper(), path.removeprefix("/api/v1")]
            queried = {
                parameter["name"]
                for parameter in operation.get("parameters", ())
                if parameter["in"] == "query"
            }
            if queried >= PAGED and "Page" in str(operation["responses"]["200"]):
                queried -= PAGED - set(
                    re.findall(r"`(\w+)`", row)
                )  # documented once, under "Lists"
            missing += [f"{method} {path}: {name}" for name in queried if f"`{name}`" not in row]
    assert missing == []


def test_every_operation_declares_response_and_errors(sqlite_server: Server) -> None:
    names = set()
    for path, operations in sqlite_server.get("/openapi.json")["paths"].items():
        for method, operation in operations.items():
            assert operation["operationId"] not in names
            names.add(operation["operationId"])
            assert operation.get("description"), (method, path)
            assert {"401", "404", "422", "503"} <= set(operation["responses"]), (method, path)
            code, good = next(pair for pair in operation["responses"].items() if pair[0] < "400")
            assert good.get("content") or code == "204", (method, path)


def test_every_server_option_is_documented() -> None:
    (section,) = re.findall(
        r"^## Running the server\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    documented = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", section))
    options = {name for action in _parser()._actions for name in action.option_strings}
    assert documented == {name for name in options if name.startswith("--")} - {"--help"}


def test_responses_match_their_models(server: Server) -> None:
    server.submit()
    server.add_agent()
    spec = server.begin()
    nan = validation(3, "NaN", acc="Infinity")
    server.report(spec.run_id, training(1, 1.0), validation(2, 1.0), checkpoint(2), nan)
    server.log(spec.run_id, 0, "hello")
    expected: dict[str, type[Resource]] = {
        "/experiments": resources.ExperimentPage,
        "/experiments/1": resources.ExperimentAnswer,
        "/experiments/1/trials": resources.TrialPage,
        "/experiments/1/trials?sort=-slot_seconds": resources.TrialPage,
        "/experiments/1/columns": analysis.TrialColumns,
        "/experiments/1/search-progress": analysis.SearchProgress,
        "/experiments/1/importance": analysis.Importance,
        "/experiments/1/checkpoints": resources.CheckpointPage,
        "/experiments/1/logs": resources.LogPage,
        "/trials/1": resources.TrialAnswer,
        "/trials/1/metrics": resources.Metrics,
        "/trials/1/metrics?max_points=1": resources.Metrics,
        "/trials/1/metric-names": resources.MetricNames,
        "/trials/1/checkpoints": resources.CheckpointPage,
        "/trials/1/logs": resources.LogPage,
        f"/checkpoints/{checkpoint(2).uuid}": resources.CheckpointAnswer,
        "/info": resources.Info,
        "/agents": resources.AgentPage,
        "/jobs": queue.JobPage,
    }
    for path, model in expected.items():
        response: Any = server.http.get(f"/api/v1{path}")
        assert response.status_code == 200, path
        msgspec.json.decode(response.content, type=model)
    (saved,) = server.get("/trials/1/checkpoints")["checkpoints"]
    assert saved["metrics"] == {"loss": 1.0}
    assert (saved["size_bytes"], saved["metadata"]) == (10, {"note": "x"})
    missing = server.http.get("/api/v1/trials/99")
    assert missing.status_code == 404
    msgspec.json.decode(missing.content, type=resources.ErrorAnswer)
    assert missing.json()["error"]["message"] == "there is no trial 99"


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("curl") is None, reason="the examples call curl")
def test_documentation_examples_work(tmp_path: Path) -> None:
    live = LiveServer(tmp_path / "home")
    live.start()
    try:
        script = "set -e\n" + "\n".join(EXAMPLE.findall(PAGE.read_text()))
        script = script.replace("/tmp/zerolab-rest", str(tmp_path / "example"))
        names = ("ZEROLAB_TOKEN", "ZEROLAB_MASTER", "http_proxy", "HTTP_PROXY", "all_proxy")
        environment = {name: value for name, value in os.environ.items() if name not in names}
        ended = subprocess.run(
            ["bash", "-c", script],
            env={**environment, "ZEROLAB_HOME": str(live.home)},
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert '"name":"by hand"' in ended.stdout
        assert '"labels":["baseline"]' in ended.stdout
        assert "trial_id,group,name,step,value,time_s" in ended.stdout
    finally:
        live.close()
