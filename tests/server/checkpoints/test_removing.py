"""Removal of checkpoints by users: files, dry runs, and checkpoints still in use."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.server.helpers import Server, checkpoint, validation
from tests.waiting import until
from zerolab.storage.store import CheckpointStore

Saved = dict[int, str]


def save_checkpoints(server: Server, *losses: float, trial_id: int = 1) -> Saved:
    """Save real checkpoints of a trial after 1, 2, ... batches."""
    spec = server.begin(trial_id)
    store = CheckpointStore.of_run(spec)
    saved = {}
    for steps, loss in enumerate(losses, start=1):
        record = checkpoint(steps, f"trial {trial_id}")
        path = store.begin(record.uuid)
        (path / "model0").mkdir()
        (path / "model0" / "weights").write_bytes(b"w" * 1000)
        (path / "notes.txt").write_text("x" * steps)
        stored = store.commit(record.uuid, steps, {"steps_completed": steps})
        record = msgspec.structs.replace(record, resources=stored.resources)
        server.report(spec.run_id, validation(steps, loss), record)
        saved[steps] = record.uuid
    return saved


def policy(latest: int, best: int = 0, experiment: int = 0) -> dict[str, int]:
    return {
        "save_trial_latest": latest,
        "save_trial_best": best,
        "save_experiment_best": experiment,
    }


def root_of(server: Server) -> Path:
    path: Path = server.services.orchestrator.home.checkpoints
    return path


def remaining(server: Server) -> set[str]:
    return {path.name for path in root_of(server).iterdir()}


def error_message(server: Server, path: str, body: dict[str, Any]) -> Any:
    response = server.http.post(f"/api/v1{path}", json=body)
    assert response.status_code == 409, response.text
    return response.json()["error"]["message"]


@pytest.mark.needs_extension("checkpoint_removal")
def test_dry_run_lists_and_removes_nothing(server: Server) -> None:
    server.submit(checkpoint_storage=policy(10))
    server.add_agent()
    saved = save_checkpoints(server, 0.5, 0.1, 0.9)
    server.exit(server.run_of().run_id, 0)
    for path, body in (
        ("/checkpoints/remove", {"uuids": list(saved.values())}),
        ("/experiments/1/gc", {"save_trial_latest": 0}),
    ):
        plan = server.post(path, body | {"dry_run": True})
        assert [row["uuid"] for row in plan["checkpoints"]] == list(saved.values())
        assert plan["size_bytes"] == 3 * 1000 + 1 + 2 + 3
        assert plan["dry_run"]
    assert remaining(server) == set(saved.values())
    assert server.experiment()["config"]["checkpoint_storage"]["save_trial_latest"] == 10
    page = server.get("/experiments/1/checkpoints")
    assert (page["count"], page["size_bytes"]) == (3, 3006)


@pytest.mark.needs_extension("checkpoint_removal")
def test_new_policy_is_applied_and_stored(server: Server) -> None:
    server.submit(checkpoint_storage=policy(10))
    server.add_agent()
    saved = save_checkpoints(server, 0.5, 0.1, 0.9)
    done = server.post("/experiments/1/gc", {"save_trial_latest": 1, "save_trial_best": 1})
    assert [row["steps_completed"] for row in done["checkpoints"]] == [1]
    until("its files go", lambda: remaining(server) == {saved[2], saved[3]})
    spec = server.run_of().spec
    server.report(spec.run_id, checkpoint(4, "trial 1"))
    page = server.get("/experiments/1/checkpoints", state="COMPLETED")
    assert [row["steps_completed"] for row in page["checkpoints"]] == [2, 4]
    stored = server.experiment()["config"]["checkpoint_storage"]
    assert (stored["save_trial_latest"], stored["save_trial_best"]) == (1, 1)


@pytest.mark.needs_extension("checkpoint_removal")
def test_remove_files_by_pattern(server: Server) -> None:
    server.submit(checkpoint_storage=policy(10))
    server.add_agent()
    saved = save_checkpoints(server, 0.5, 0.1)
    server.exit(server.run_of().run_id, 0)
    body = {"uuids": [saved[2]], "globs": ["model0/*"]}
    (removed,) = server.post("/checkpoints/remove", body)["checkpoints"]
    assert (removed["files"], removed["whole"], removed["size_bytes"]) == (
        ["model0/weights"],
        False,
        1000,
    )
    until("the file goes", lambda: not (root_of(server) / saved[2] / "model0").exists())
    row = server.get(f"/checkpoints/{saved[2]}")["checkpoint"]
    assert (row["state"], row["resources"], row["size_bytes"]) == (
        "PARTIAL",
        {"notes.txt": 2},
        2,
    )
    store = CheckpointStore(root_of(server))
    assert store.describe(saved[2]).resources == {"notes.txt": 2}
    assert store.describe(saved[1]).resources == {"model0/weights": 1000, "notes.txt": 1}
    trial = server.trial()
    assert saved[2] not in (trial["latest_checkpoint"], trial["best_checkpoint"])
    server.request("DELETE", f"/checkpoints/{saved[2]}")
    server.request("DELETE", f"/checkpoints/{saved[2]}")
    until("the rest goes", lambda: remaining(server) == {saved[1]})


@pytest.mark.needs_extension("checkpoint_removal")
@pytest.mark.parametrize("state", ["RUNNING", "PAUSED"])
def test_removal_of_resume_checkpoint_is_rejected(server: Server, state: str) -> None:
    server.submit(checkpoint_storage=policy(10))
    server.add_agent()
    saved = save_checkpoints(server, 0.5, 0.1)
    if state == "PAUSED":
        server.act("pause")
        server.exit(server.run_of().run_id, 66)
    assert server.trial()["state"] == state
    everything = {"uuids": list(saved.values())}
    for body in (everything, everything | {"globs": ["*.txt"]}, everything | {"dry_run": True}):
        message = error_message(server, "/checkpoints/remove", body)
        assert f"checkpoint {saved[2]}: trial 1, which is {state}, continues from it" in message
    assert remaining(server) == set(saved.values())
    plan = server.post("/experiments/1/gc", {"save_trial_latest": 0})
    assert [row["uuid"] for row in plan["checkpoints"]] == [saved[1]]


@pytest.mark.needs_extension("checkpoint_removal")
def test_removal_of_warm_start_source_is_rejected(server: Server) -> None:
    server.submit(checkpoint_storage=policy(10))
    server.add_agent()
    saved = save_checkpoints(server, 0.5)
    server.exit(server.run_of().run_id, 0)
    searcher = {"name": "single", "metric": "loss", "max_length": 10, "source_trial_id": 1}
    server.submit(activate=False, searcher=searcher)
    message = error_message(server, "/checkpoints/remove", {"uuids": [saved[1]]})
    assert "a trial will start with its weights" in message
    assert server.post("/experiments/1/gc", {"save_trial_latest": 0})["checkpoints"] == []
    server.act("kill", 2)
    server.post("/checkpoints/remove", {"uuids": [saved[1]]})
    until("it goes", lambda: remaining(server) == set())


@pytest.mark.needs_extension("checkpoint_removal")
def test_missing_checkpoint_is_named(server: Server) -> None:
    uuid = "00000000-0000-4000-8000-000000000000"
    response = server.http.post("/api/v1/checkpoints/remove", json={"uuids": [uuid]})
    assert response.status_code == 404
    assert uuid in response.json()["error"]["message"]


def test_file_download_supports_ranges(server: Server) -> None:
    server.submit(checkpoint_storage=policy(10))
    server.add_agent()
    saved = save_checkpoints(server, 0.5)
    path = f"/api/v1/checkpoints/{saved[1]}/file"
    content = server.http.get(path, params={"name": "model0/weights"})
    assert content.content == b"w" * 1000
    assert server.http.get(path, params={"name": "model0/weights", "first": 990}).content == (
        b"w" * 10
    )
    for name in ("../../token", "nothing"):
        assert server.http.get(path, params={"name": name}).status_code == 404
    (root_of(server) / saved[1] / "notes.txt").unlink()
    response = server.http.get(path, params={"name": "notes.txt"})
    assert (response.status_code, "is missing" in response.text) == (404, True)


def test_partial_checkpoint_is_deleted_with_trial(server: Server) -> None:
    server.submit()
    server.add_agent()
    spec = server.begin()
    CheckpointStore.of_run(spec).begin(checkpoint(1).uuid)
    assert len(remaining(server)) == 1
    server.act("kill")
    server.exit(spec.run_id, 137)
    assert server.trial()["state"] == "CANCELED"
    until("nothing is left", lambda: remaining(server) == set())
