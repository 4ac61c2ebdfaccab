"""Model registry: models, versions, and their retained checkpoints."""

from typing import Any

import pytest

from tests.server.helpers import Server, checkpoint, validation

GONE = "00000000-0000-4000-8000-000000000000"


@pytest.fixture
def trained_trial(server: Server) -> Server:
    """Train a trial with three checkpoints and register the first."""
    keep_one = {"save_experiment_best": 0, "save_trial_best": 0, "save_trial_latest": 1}
    server.submit(checkpoint_storage=keep_one)
    server.add_agent()
    assert server.http.post("/api/v1/models", json={"name": "digits"}).status_code == 201
    spec = server.begin()
    server.report(spec.run_id, validation(10, 0.3), checkpoint(10))
    assert register(server, checkpoint(10).uuid).status_code == 201
    server.report(spec.run_id, validation(20, 0.2), checkpoint(20))
    server.report(spec.run_id, validation(30, 0.1), checkpoint(30))
    server.exit(spec.run_id, 0)
    return server


def register(server: Server, uuid: str, notes: str = "", name: str = "digits") -> Any:
    body = {"checkpoint": uuid, "notes": notes}
    return server.http.post(f"/api/v1/models/{name}/versions", json=body)


def remaining_steps(server: Server) -> list[int]:
    page = server.get("/trials/1/checkpoints", state="COMPLETED")
    return [row["steps_completed"] for row in page["checkpoints"]]


def error_message(response: Any, status: int) -> str:
    assert response.status_code == status, response.text
    message: str = response.json()["error"]["message"]
    return message


@pytest.mark.needs_extension("checkpoint_removal", "model_registry")
def test_registered_checkpoint_survives_retention(
    trained_trial: Server,
) -> None:
    assert remaining_steps(trained_trial) == [10, 30]
    checkpoint_uuid = checkpoint(10).uuid
    message = error_message(
        trained_trial.http.delete(f"/api/v1/checkpoints/{checkpoint_uuid}"), 409
    )
    assert "is version 1 of model digits; `zerolab model delete-version digits 1` first" in message
    body = {"uuids": [checkpoint_uuid], "globs": ["*"]}
    assert "version 1 of model" in error_message(
        trained_trial.http.post("/api/v1/checkpoints/remove", json=body), 409
    )
    assert "a checkpoint of it is version 1 of model digits" in error_message(
        trained_trial.http.delete("/api/v1/experiments/1"), 409
    )
    assert trained_trial.http.delete("/api/v1/models/digits/versions/1").status_code == 204
    assert trained_trial.http.delete(f"/api/v1/checkpoints/{checkpoint_uuid}").status_code == 204
    assert remaining_steps(trained_trial) == [30]
    assert trained_trial.http.delete("/api/v1/experiments/1").is_success


@pytest.mark.needs_extension("model_registry")
def test_version_numbers_are_never_reused(trained_trial: Server) -> None:
    newest = checkpoint(30).uuid
    model = register(trained_trial, newest, "the better one").json()["model"]
    assert [version["version"] for version in model["versions"]] == [1, 2]
    assert model["versions"][1]["checkpoint"] == newest
    assert model["versions"][1]["notes"] == "the better one"
    assert model["versions"][1]["trial_id"] == 1
    assert [version["metrics"] for version in model["versions"]] == [{"loss": 0.3}, {"loss": 0.1}]
    assert register(trained_trial, newest).json()["model"] == model, "it is a version already"
    assert trained_trial.http.delete("/api/v1/models/digits/versions/2").status_code == 204
    again = register(trained_trial, newest).json()["model"]
    assert [version["version"] for version in again["versions"]] == [1, 3]
    assert trained_trial.get("/models")["models"] == [again]


@pytest.mark.needs_extension("model_registry")
def test_missing_model_or_version_is_404(trained_trial: Server) -> None:
    assert "digits: exists already" in error_message(
        trained_trial.http.post("/api/v1/models", json={"name": "digits"}), 409
    )
    assert trained_trial.http.post("/api/v1/models", json={"name": "a b"}).status_code == 422
    message = error_message(register(trained_trial, GONE), 422)
    assert f"checkpoint: must be a complete checkpoint, got {GONE}" in message
    assert "there is no model other" in error_message(
        register(trained_trial, checkpoint(30).uuid, name="other"), 404
    )
    for path in ("models/other", "models/digits/versions/7"):
        assert "there is no" in error_message(trained_trial.http.delete(f"/api/v1/{path}"), 404)
    assert "there is no model other" in error_message(
        trained_trial.http.get("/api/v1/models/other"), 404
    )


@pytest.mark.needs_extension("model_registry")
def test_delete_model_keeps_checkpoints(trained_trial: Server) -> None:
    assert trained_trial.http.delete("/api/v1/models/digits").status_code == 204
    assert trained_trial.get("/models")["models"] == []
    assert remaining_steps(trained_trial) == [10, 30]
    assert trained_trial.http.delete("/api/v1/experiments/1").is_success


@pytest.mark.needs_extension("model_registry")
def test_aliases_of_a_version_are_replaced_together(trained_trial: Server) -> None:
    server = trained_trial
    register(server, checkpoint(30).uuid)

    def put(version: int, *aliases: object) -> Any:
        path = f"/api/v1/models/digits/versions/{version}/aliases"
        return server.http.put(path, json={"aliases": aliases})

    def aliases() -> list[list[str]]:
        return [version["aliases"] for version in server.get("/models")["models"][0]["versions"]]

    assert put(1, "production", "candidate", "production").is_success
    assert aliases() == [["candidate", "production"], []]
    invalid = error_message(put(2, "production", "7", "a/b", 1), 422)
    for problem in ("'7'", "'a/b'", "aliases.1", "aliases.2", "aliases.3"):
        assert problem in invalid
    assert aliases() == [["candidate", "production"], []]  # none of them was saved
    assert put(2, "production", "best").json()["model"]["versions"][1]["aliases"] == [
        "best", "production",
    ]  # fmt: skip
    assert aliases() == [["candidate"], ["best", "production"]]
    assert put(2).is_success
    assert aliases() == [["candidate"], []]
    assert "there is no version 7 of model digits" in error_message(put(7, "best"), 404)


@pytest.mark.needs_extension("model_registry")
def test_alias_names_one_version(trained_trial: Server) -> None:
    server = trained_trial
    register(server, checkpoint(30).uuid)

    def put(alias: str, version: object, model: str = "digits") -> Any:
        path = f"/api/v1/models/{model}/aliases/{alias}"
        return server.http.put(path, json={"version": version})

    def aliases() -> list[list[str]]:
        return [version["aliases"] for version in server.get("/models")["models"][0]["versions"]]

    assert aliases() == [[], []]
    for alias in ("production", "candidate"):
        assert put(alias, 1).is_success
    assert aliases() == [["candidate", "production"], []]
    (_, newest) = put("production", 2).json()["model"]["versions"]
    assert newest["aliases"] == ["production"]
    assert aliases() == [["candidate"], ["production"]]
    for response, message in (
        (put("production", 7), "there is no version 7 of model digits"),
        (put("production", 1, "other"), "there is no model other"),
        (server.http.delete("/api/v1/models/digits/aliases/old"), "no alias old of model digits"),
    ):
        assert message in error_message(response, 404)
    assert "must have a character that is no digit" in error_message(put("2", 1), 422)
    assert "must be 1 to 64 letters, digits" in error_message(put("a b", 1), 422)
    for version in (0, "1", None):
        assert "version: " in error_message(put("production", version), 422)
    assert aliases() == [["candidate"], ["production"]]
    assert server.http.delete("/api/v1/models/digits/aliases/candidate").status_code == 204
    assert server.http.delete("/api/v1/models/digits/versions/2").status_code == 204
    assert aliases() == [[]]
    assert put("production", 1).is_success
    assert server.http.delete("/api/v1/models/digits").status_code == 204
    assert server.sql("SELECT alias FROM model_aliases") == []
