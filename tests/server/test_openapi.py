"""Requests of each role generated from the OpenAPI document: documented responses, no secrets."""

import contextlib
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

from tests.server.access.test_users import add_user
from tests.server.helpers import Server
from tests.server.processes import played
from zeroserver.store.user_directory import digest_of

CHECKS = [
    not_a_server_error,
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
]
STREAMS = {"/api/v1/events", "/api/v1/experiments/{experiment_id}/events"}  # they do not end
LAST = "/api/v1/token"  # it would end the test's session
EXAMPLES = 2
SECRET = "hush-of-ann-5f0c"
EXISTING = {"experiment_id": 1, "trial_id": 1, "user": "ann", "project": "vision", "name": "digits"}
"""Resources of another user, which valid requests use."""


@pytest.mark.processes
def test_each_role_gets_documented_responses(tmp_path: Path) -> None:
    """The administrator is last, and may delete what the others have read."""
    with played(tmp_path) as (live, server):
        tokens = {
            "viewer": add_user(server, "vic", "viewer"),
            "member": add_user(server, "bob", "member"),
            "admin": add_user(server, "eve", "admin"),
        }
        secrets = prepare(server)
        document = server.get("/openapi.json")
        del document["security"]  # otherwise the token is sometimes omitted
        schema = schemathesis.openapi.from_dict(document)
        schema.config.update(base_url=live.url)
        operations = [result.ok() for result in schema.get_all_operations()]
        cases, invalid = (
            [
                case
                for operation in operations
                if operation.path not in STREAMS | {LAST}
                for case in generate(operation, mode)
            ]
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
        )
        assert min(len(cases), len(invalid)) > 100
        for role, token in tokens.items():
            # Administrators may read the archive, which contains the secret of the configuration.
            hidden = secrets if role == "admin" else [*secrets, SECRET]
            # Errors of validation are the same for everyone who may call a route.
            for case in [*cases, *(invalid if role == "admin" else ())]:
                send(case, token, hidden)
        assert "Traceback" not in live.log.read_text()


def prepare(server: Server) -> list[str]:
    """Create resources of ann; return the secrets that nobody may read."""
    ann = add_user(server, "ann", "member")
    admin = server.http.headers["Authorization"]
    server.http.headers["Authorization"] = f"Bearer {ann}"
    server.submit(environment={"environment_variables": [f"HF_TOKEN={SECRET}"]})
    server.post("/models", {"name": "digits"})
    server.post("/projects", {"name": "vision"})
    password = "correct horse battery"
    server.request("PUT", "/users/ann/password", json={"password": password})
    server.http.headers["Authorization"] = admin
    return [ann, digest_of(ann), password, "$argon2", server.token]


def generate(operation: Any, mode: GenerationMode) -> list[Any]:
    """Return requests; valid ones are about existing resources."""
    cases = []

    @hypothesis.settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate],
    )
    @hypothesis.given(data=st.data())
    def collect(data: st.DataObject) -> None:
        try:
            case = data.draw(operation.as_strategy(generation_mode=mode))
        except schemathesis.errors.SchemathesisError:
            return  # a request without parameters cannot be invalid
        if mode is GenerationMode.POSITIVE:
            existing = EXISTING.keys() & case.path_parameters.keys()
            case.path_parameters.update({name: EXISTING[name] for name in existing})
        if case.query and "wait_s" in case.query:
            case.query["wait_s"] = 0
        elif operation.path.endswith(("/work", "/directive")):
            case.query = {**(case.query or {}), "wait_s": 0}
        cases.append(case)

    with contextlib.suppress(hypothesis.errors.Unsatisfiable):
        collect()
    return cases


def send(case: Any, token: str, hidden: list[str]) -> None:
    """Send a request, and check its response."""
    headers = {**(case.headers or {}), "Authorization": f"Bearer {token}"}
    response = case.call(headers=headers)
    if response.content == b"Invalid HTTP request received.":
        return  # a URL of 64 kB and more does not reach the application
    leaked = [secret for secret in hidden if secret.encode() in response.content]
    assert not leaked, (case.operation.label, leaked)
    case.validate_response(response, checks=CHECKS)
