"""Checkpoints are addressed by a prefix of their uuid on every route."""

from typing import Any

import pytest

from tests.server.checkpoints.test_removing import policy, save_checkpoints
from tests.server.helpers import Server, checkpoint


@pytest.fixture
def saved(server: Server) -> list[str]:
    """Save four checkpoints whose uuids differ in the first four characters."""
    server.submit(checkpoint_storage=policy(10))
    server.add_agent()
    uuids = list(save_checkpoints(server, 0.4, 0.3, 0.2, 0.1).values())
    server.exit(server.run_of().run_id, 0)
    assert len({uuid[:4] for uuid in uuids}) == len(uuids)
    return uuids


@pytest.mark.parametrize("length", [4, 8, 9, 30, 36])
def test_read_by_prefix(server: Server, saved: list[str], length: int) -> None:
    for uuid in saved:
        assert server.get(f"/checkpoints/{uuid[:length]}")["checkpoint"]["uuid"] == uuid
        file = server.http.get(
            f"/api/v1/checkpoints/{uuid[:length].upper()}/file", params={"name": "notes.txt"}
        )
        assert file.status_code == 200


@pytest.mark.needs_extension("checkpoint_removal", "model_registry")
def test_change_by_prefix(server: Server, saved: list[str]) -> None:
    first, second, third, fourth = saved
    server.http.post("/api/v1/models", json={"name": "m"})
    response = server.http.post("/api/v1/models/m/versions", json={"checkpoint": fourth[:8]})
    assert response.json()["model"]["versions"][0]["checkpoint"] == fourth
    searcher: dict[str, Any] = {"name": "single", "metric": "loss", "max_length": 10}
    searcher["source_checkpoint_uuid"] = third[:6]
    warm = server.submit(searcher=searcher)
    assert warm["source_checkpoint"] == third
    assert server.http.delete(f"/api/v1/checkpoints/{first[:8]}").status_code == 204
    body = {"uuids": [second[:8]]}
    assert server.http.post("/api/v1/checkpoints/remove", json=body).status_code == 200
    states = {row["uuid"]: row["state"] for row in _all(server)}
    assert [states[uuid] for uuid in saved] == ["DELETED", "DELETED", "COMPLETED", "COMPLETED"]


def _all(server: Server) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = server.get("/trials/1/checkpoints")["checkpoints"]
    return rows


def test_ambiguous_prefix_is_rejected(server: Server) -> None:
    prefixes: dict[str, int] = {}
    first, second, prefix = next(
        (prefixes[start], steps, start)
        for steps in range(1, 5000)
        if prefixes.setdefault(start := checkpoint(steps).uuid[:4], steps) != steps
    )
    server.submit()
    server.add_agent()
    server.report(server.begin().run_id, checkpoint(first), checkpoint(second))
    response = server.http.get(f"/api/v1/checkpoints/{prefix}")
    assert response.status_code == 422
    message = response.json()["error"]["message"]
    assert checkpoint(first).uuid in message
    assert checkpoint(second).uuid in message
    uuid = checkpoint(first).uuid
    assert server.get(f"/checkpoints/{uuid[:12]}")["checkpoint"]["uuid"] == uuid


@pytest.mark.parametrize("text", ["zzzz", "xyz", "%", "____"])
def test_unknown_prefix_is_404(server: Server, saved: list[str], text: str) -> None:
    del saved
    assert server.http.get(f"/api/v1/checkpoints/{text}").status_code == 404


@pytest.mark.needs_extension("checkpoint_removal")
@pytest.mark.parametrize("length", [1, 2, 3])
def test_prefix_under_four_characters_is_rejected(
    server: Server, saved: list[str], length: int
) -> None:
    short = saved[0][:length]
    message = f"uuid: must have at least the first four characters, got '{short}'"
    read = server.http.get(f"/api/v1/checkpoints/{short}")
    removed = server.http.post("/api/v1/checkpoints/remove", json={"uuids": [short]})
    for response in (read, removed):
        assert response.status_code == 422
        assert message in response.json()["error"]["message"]
