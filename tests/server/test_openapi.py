"""Requests made from the OpenAPI document: no answer is a server error, each is as documented."""

from pathlib import Path
from typing import Any

import hypothesis
import pytest
import schemathesis
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.server.processes import LiveServer

CHECKS = [
    not_a_server_error,
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
]
STREAMS = {"/api/v1/events", "/api/v1/experiments/{experiment_id}/events"}  # they do not end
EXAMPLES = 3


@pytest.mark.processes
def test_responses_match_openapi_document(tmp_path: Path) -> None:
    live = LiveServer(tmp_path / "home")
    live.start()
    try:
        headers = {"Authorization": f"Bearer {live.token}"}
        document = live.client().get("/openapi.json")
        del document["security"]  # or the token would be left out now and then
        schema = schemathesis.openapi.from_dict(document)
        schema.config.update(base_url=live.url)
        asked = 0
        for found in schema.get_all_operations():
            operation = found.ok()
            if operation.path in STREAMS or operation.path == "/api/v1/token":  # ours would be void
                continue
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                ask(operation, mode, headers)
                asked += 1
        assert asked > 60
        assert "Traceback" not in live.log.read_text()
    finally:
        live.close()


def ask(operation: Any, mode: GenerationMode, headers: dict[str, str]) -> None:
    @hypothesis.settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate],
    )
    @hypothesis.given(data=st.data())
    def send(data: st.DataObject) -> None:
        try:
            case = data.draw(operation.as_strategy(generation_mode=mode))
        except schemathesis.errors.SchemathesisError:
            return  # nothing can be wrong with a request that has no parts
        if case.query and "wait_s" in case.query:
            case.query["wait_s"] = 0
        elif operation.path.endswith(("/work", "/directive")):
            case.query = {**(case.query or {}), "wait_s": 0}
        answer = case.call(headers={**(case.headers or {}), **headers})
        if answer.content == b"Invalid HTTP request received.":
            return  # a URL of 64 kB and more does not reach the application
        case.validate_response(answer, checks=CHECKS)

    try:
        send()
    except hypothesis.errors.Unsatisfiable:
        return
