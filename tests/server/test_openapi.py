"""Requests generated from the OpenAPI document: responses are documented and no server errors."""

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
        del document["security"]  # otherwise the token is sometimes omitted
        schema = schemathesis.openapi.from_dict(document)
        schema.config.update(base_url=live.url)
        count = 0
        for result in schema.get_all_operations():
            operation = result.ok()
            if (
                operation.path in STREAMS or operation.path == "/api/v1/token"
            ):  # it would end the test's session
                continue
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                ask(operation, mode, headers)
                count += 1
        assert count > 60
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
            return  # a request without parameters cannot be invalid
        if case.query and "wait_s" in case.query:
            case.query["wait_s"] = 0
        elif operation.path.endswith(("/work", "/directive")):
            case.query = {**(case.query or {}), "wait_s": 0}
        response = case.call(headers={**(case.headers or {}), **headers})
        if response.content == b"Invalid HTTP request received.":
            return  # a URL of 64 kB and more does not reach the application
        case.validate_response(response, checks=CHECKS)

    try:
        send()
    except hypothesis.errors.Unsatisfiable:
        return
