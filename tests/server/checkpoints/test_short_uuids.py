"""Checkpoints are found by the first characters of their uuid, on every route that takes one."""

from typing import Any

import pytest

from tests.server.checkpoints.test_removing import keeping, save_some
from tests.server.helpers import Server, checkpoint


@pytest.fixture
def saved(server: Server) -> list[str]:
    """Uuids of four checkpoints, of which none shares four characters with another."""
    server.submit(checkpoint_storage=keeping(10))
    server.add_agent()
    uuids = list(save_some(server, 0.4, 0.3, 0.2, 0.1).values())
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


def test_change_by_prefix(server: Server, saved: list[str]) -> None:
    first, second, third, fourth = saved
    server.http.post("/api/v1/models", json={"name": "m"})
    made = server.http.post("/api/v1/models/m/versions", json={"checkpoint": fourth[:8]})
    assert made.json()["model"]["versions"][0]["checkpoint"] == fourth
    searcher: dict[str, Any] = {"name": "single", "metric": "loss", "max_length": 10}
    searcher["source_checkpoint_uuid"] = third[:6]
    warm = server.submit(searcher=searcher)
    assert warm["source_checkpoint"] == third
    assert server.http.delete(f"/api/v1/checkpoints/{first[:8]}").status_code == 204
    body = {"uuids": [second[:8]]}
    assert server.http.post("/api/v1/checkpoints/remove", json=body).status_code == 200
    states = {each["uuid"]: each["state"] for each in _all(server)}
    assert [states[uuid] for uuid in saved] == ["DELETED", "DELETED", "COMPLETED", "COMPLETED"]


def _all(server: Server) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = server.get("/trials/1/checkpoints")["checkpoints"]
    return found


def test_ambiguous_prefix_is_rejected(server: Server) -> None:
    known: dict[str, int] = {}
    first, second, prefix = next(
        (known[start], steps, start)
        for steps in range(1, 5000)
        if known.setdefault(start := checkpoint(steps).uuid[:4], steps) != steps
    )
    server.submit()
    server.add_agent()
    server.report(server.begin().run_id, checkpoint(first), checkpoint(second))
    answer = server.http.get(f"/api/v1/checkpoints/{prefix}")
    assert answer.status_code == 422
    message = answer.json()["error"]["message"]
    assert checkpoint(first).uuid in message
    assert checkpoint(second).uuid in message
    uuid = checkpoint(first).uuid
    assert server.get(f"/checkpoints/{uuid[:12]}")["checkpoint"]["uuid"] == uuid


@pytest.mark.parametrize("text", ["zzzz", "xyz", "%", "____"])
def test_unknown_prefix_is_404(server: Server, saved: list[str], text: str) -> None:
    del saved
    assert server.http.get(f"/api/v1/checkpoints/{text}").status_code == 404


@pytest.mark.parametrize("length", [1, 2, 3])
def test_prefix_under_four_characters_is_rejected(
    server: Server, saved: list[str], length: int
) -> None:
    short = saved[0][:length]
    wanted = f"uuid: must have at least the first four characters, got '{short}'"
    read = server.http.get(f"/api/v1/checkpoints/{short}")
    removed = server.http.post("/api/v1/checkpoints/remove", json={"uuids": [short]})
    for answer in (read, removed):
        assert answer.status_code == 422
        assert wanted in answer.json()["error"]["message"]
