"""Media of trials: index, list, download, deletion and limits."""

import hashlib
from pathlib import Path
from typing import Any

import pytest

from tests.server.helpers import Server, checkpoint, on_sqlite, validation
from tests.waiting import until
from zerolab.contract.media import MediaRecord
from zerolab.contract.spec import RunSpec
from zerolab.storage.media import MediaStore

CONTENT = b"\x89PNG\r\n\x1a\n and pixels"


def medium(
    name: str, steps: int, position: int = 0, content: bytes = CONTENT, **changes: Any
) -> MediaRecord:
    digest = hashlib.sha256(content).hexdigest()
    fields: dict[str, Any] = {"type": "image", "suffix": ".png", "metadata": {"caption": "x"}}
    fields |= {"position": position, "time": 1_800_000_000.0}
    return MediaRecord(name, steps, digest=digest, size=len(content), **fields | changes)


def stored(server: Server, spec: RunSpec, content: bytes = CONTENT) -> Path:
    """Store a content as a run does; return its file."""
    source = server.directory / "content"
    source.write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    store = MediaStore.of_run(spec)
    store.put(source, digest)
    return Path(store.address.root, "media", spec.storage_owner, digest)


def listed(server: Server, **query: Any) -> list[tuple[str, int, int]]:
    media = server.get("/trials/1/media", **query)["media"]
    return [(row["name"], row["step"], row["position"]) for row in media]


@pytest.fixture
def spec(server: Server) -> RunSpec:
    """The run of a trial that reports."""
    server.submit(max_restarts=1)
    server.add_agent()
    return server.begin()


def test_media_are_listed_by_name_step_and_page(server: Server, spec: RunSpec) -> None:
    text = medium("b", 5, content=b"text", type="text", suffix=".txt", metadata={})
    records = [medium("a", 10, 1), text, medium("a", 9), medium("a", 10), medium("a", 10)]
    server.report(spec.run_id, *records)
    everything = [("a", 9, 0), ("a", 10, 0), ("a", 10, 1), ("b", 5, 0)]
    assert listed(server) == everything
    assert listed(server, name="a", step=10) == [("a", 10, 0), ("a", 10, 1)]
    assert listed(server, type="text") == [("b", 5, 0)]
    after, pages = None, []
    while after is not None or not pages:
        page = server.get("/trials/1/media", limit=1, **({"after": after} if after else {}))
        pages += [(row["name"], row["step"], row["position"]) for row in page["media"]]
        after = page["next_after"]
    assert pages == everything
    (row,) = server.get("/trials/1/media", name="a", step=9)["media"]
    assert (row["file_name"], row["metadata"], row["size"]) == (
        "a-9.png", {"caption": "x"}, len(CONTENT),
    )  # fmt: skip
    first, second = server.get("/trials/1/media/names")["names"]
    assert first == {
        "name": "a", "type": "image", "count": 3, "first_step": 9, "last_step": 10,
        "size": 3 * len(CONTENT),
    }  # fmt: skip
    assert (second["name"], second["count"]) == ("b", 1)


@on_sqlite
def test_page_cursor_must_be_valid(server: Server, spec: RunSpec) -> None:
    response = server.http.get("/api/v1/trials/1/media", params={"after": "x.y"})
    assert response.status_code == 422
    assert "after: must be next_after of the previous page" in response.text


@on_sqlite
def test_image_is_shown_and_other_files_are_attachments(server: Server, spec: RunSpec) -> None:
    page = b"<script>alert(1)</script>"
    evil = medium(
        "evil", 1, content=page, type="file", suffix=".html", metadata={"file": 'a"\r\nb.html'}
    )
    svg = medium("svg", 1, content=b"<svg/>", suffix=".svg")
    server.report(spec.run_id, medium("a", 1), evil, svg)
    for content in (CONTENT, page, b"<svg/>"):
        stored(server, spec, content)
    responses = [
        server.http.get(f"/api/v1/trials/1/media/{record.digest}")
        for record in (medium("a", 1), evil, svg)
    ]
    assert [response.content for response in responses] == [CONTENT, page, b"<svg/>"]
    types = [response.headers["content-type"] for response in responses]
    assert types == ["image/png", "application/octet-stream", "application/octet-stream"]
    dispositions = [response.headers["content-disposition"] for response in responses]
    assert dispositions == [
        'inline; filename="a-1.png"',
        'attachment; filename="a_b.html"',
        'attachment; filename="svg-1.svg"',
    ]
    for response in responses:
        assert response.headers["x-content-type-options"] == "nosniff"
        assert "default-src 'none'" in response.headers["content-security-policy"]
        assert "immutable" in response.headers["cache-control"]


@on_sqlite
def test_unknown_or_missing_file_is_not_found(server: Server, spec: RunSpec) -> None:
    server.report(spec.run_id, medium("a", 1))
    get = server.http.get
    digest = medium("a", 1).digest
    response = get(f"/api/v1/trials/1/media/{digest}")
    assert response.status_code == 404
    assert "its run uploads it soon" in response.json()["error"]["message"]
    assert response.headers["cache-control"] == "no-store"
    assert get(f"/api/v1/trials/1/media/{'0' * 64}").status_code == 404
    for wrong in ("..%2F..%2Ftoken", "A" * 64, "0" * 63):
        assert get(f"/api/v1/trials/1/media/{wrong}").status_code in {404, 422}


@on_sqlite
def test_invalid_media_are_rejected(server: Server, spec: RunSpec) -> None:
    fields = {"name": "a", "steps": 1, "type": "image", "digest": "", "size": 1, "time": 1e9}
    invalid: list[tuple[dict[str, Any], str]] = [
        ({"digest": "../../token"}, "digest: must be a SHA-256"),
        ({"suffix": "/x"}, "suffix: must be a file suffix"),
        ({"position": 1000}, "position: must be 0 to 999"),
        ({"steps": -1}, "steps: must be 0 to 2^53"),
        ({"name": "a\n"}, "name: must be a text"),
        ({"size": -1}, "size: must be 0 to"),
        ({"metadata": {"x": "y" * 40_000}}, "metadata: must have at most 32768 bytes"),
    ]
    for changes, problem in invalid:
        response = server.send(spec.run_id, 1, [MediaRecord(**fields | changes)])
        assert response.status_code == 422
        assert problem in response.text
    assert listed(server) == []


def test_media_over_limit_are_discarded_with_one_warning(
    server: Server, spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zeroserver.orchestrator.ingest.media_service.MAX_MEDIA", 2)
    server.report(spec.run_id, *(medium("a", step) for step in range(1, 6)))
    assert listed(server) == [("a", 1, 0), ("a", 2, 0)]
    lines = [line["text"] for line in server.get("/trials/1/logs")["logs"]]
    assert len([line for line in lines if line.startswith("media: must be at most 2")]) == 1


def test_restarted_trial_loses_media_after_its_checkpoint(server: Server, spec: RunSpec) -> None:
    server.report(spec.run_id, medium("a", 5), medium("a", 10), checkpoint(10), medium("a", 15))
    server.exit(spec.run_id, 1)
    server.tick(100)
    server.begin()
    assert listed(server) == [("a", 5, 0), ("a", 10, 0)]


def test_deleted_media_and_their_files_are_removed(server: Server, spec: RunSpec) -> None:
    kept, removed = medium("a", 1), medium("b", 1, content=b"other")
    server.report(spec.run_id, kept, removed, medium("b", 2), validation(2, 0.5))
    files = [stored(server, spec), stored(server, spec, b"other")]
    response = server.http.delete("/api/v1/trials/1/media")
    assert response.status_code == 409
    assert "trial 1 is RUNNING; delete its media when it has ended" in response.text
    server.exit(spec.run_id, 0)
    answer = server.request("DELETE", "/trials/1/media", params={"name": "b"})
    assert answer == {"count": 2, "size": len(b"other") + len(CONTENT)}
    until("the unused file is removed", files[1].exists, lambda exists: not exists)
    assert files[0].exists()  # the medium `a` has the same content as `b` at step 2
    assert listed(server) == [("a", 1, 0)]


def test_deleted_experiment_leaves_no_media(server: Server, spec: RunSpec) -> None:
    server.report(spec.run_id, medium("a", 1), validation(1, 0.5))
    file = stored(server, spec)
    server.exit(spec.run_id, 0)
    server.request("DELETE", "/experiments/1")
    until("the folder of the trial is removed", file.parent.exists, lambda exists: not exists)
    server.write(lambda work: work.orphans.remove_some())
    assert server.sql("SELECT * FROM media") == []
