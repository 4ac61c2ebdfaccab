"""The registry: models, their versions, and checkpoints that are kept for them."""

from typing import Any

import pytest

from tests.server.helpers import Server, checkpoint, validation

GONE = "00000000-0000-4000-8000-000000000000"


@pytest.fixture
def trained(server: Server) -> Server:
    """A trial with three checkpoints, of which the first is registered as soon as it is there."""
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


def there(server: Server) -> list[int]:
    page = server.get("/trials/1/checkpoints", state="COMPLETED")
    return [each["steps_completed"] for each in page["checkpoints"]]


def refusal(answer: Any, status: int) -> str:
    assert answer.status_code == status, answer.text
    message: str = answer.json()["error"]["message"]
    return message


def test_registered_checkpoint_survives_retention(
    trained: Server,
) -> None:
    assert there(trained) == [10, 30]
    mine = checkpoint(10).uuid
    told = refusal(trained.http.delete(f"/api/v1/checkpoints/{mine}"), 409)
    assert "is version 1 of model digits; `zerolab model remove-version digits 1` first" in told
    body = {"uuids": [mine], "globs": ["*"]}
    assert "version 1 of model" in refusal(
        trained.http.post("/api/v1/checkpoints/remove", json=body), 409
    )
    assert "a checkpoint of it is version 1 of model digits" in refusal(
        trained.http.delete("/api/v1/experiments/1"), 409
    )
    assert trained.http.delete("/api/v1/models/digits/versions/1").status_code == 204
    assert trained.http.delete(f"/api/v1/checkpoints/{mine}").status_code == 204
    assert there(trained) == [30]
    assert trained.http.delete("/api/v1/experiments/1").is_success


def test_version_numbers_are_never_reused(trained: Server) -> None:
    newest = checkpoint(30).uuid
    model = register(trained, newest, "the better one").json()["model"]
    assert [version["version"] for version in model["versions"]] == [1, 2]
    assert model["versions"][1]["checkpoint"] == newest
    assert model["versions"][1]["notes"] == "the better one"
    assert model["versions"][1]["trial_id"] == 1
    assert [version["metrics"] for version in model["versions"]] == [{"loss": 0.3}, {"loss": 0.1}]
    assert register(trained, newest).json()["model"] == model, "it is a version already"
    assert trained.http.delete("/api/v1/models/digits/versions/2").status_code == 204
    again = register(trained, newest).json()["model"]
    assert [version["version"] for version in again["versions"]] == [1, 3]
    assert trained.get("/models")["models"] == [again]


def test_missing_model_or_version_is_404(trained: Server) -> None:
    assert "digits: is there already" in refusal(
        trained.http.post("/api/v1/models", json={"name": "digits"}), 409
    )
    assert trained.http.post("/api/v1/models", json={"name": "a b"}).status_code == 422
    told = refusal(register(trained, GONE), 422)
    assert f"checkpoint: must be a checkpoint that is there, whole, got {GONE}" in told
    assert "there is no model other" in refusal(
        register(trained, checkpoint(30).uuid, name="other"), 404
    )
    for path in ("models/other", "models/digits/versions/7"):
        assert "there is no" in refusal(trained.http.delete(f"/api/v1/{path}"), 404)
    assert "there is no model other" in refusal(trained.http.get("/api/v1/models/other"), 404)


def test_delete_model_keeps_checkpoints(trained: Server) -> None:
    assert trained.http.delete("/api/v1/models/digits").status_code == 204
    assert trained.get("/models")["models"] == []
    assert there(trained) == [10, 30]
    assert trained.http.delete("/api/v1/experiments/1").is_success
