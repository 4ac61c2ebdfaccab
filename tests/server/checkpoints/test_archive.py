"""A checkpoint is downloaded as one tar archive."""

import io
import json
import tarfile
from importlib import import_module
from pathlib import Path

import msgspec
import pytest

from tests.server.checkpoints.test_removing import policy, root_of, save_checkpoints
from tests.server.helpers import Server, checkpoint
from zerolab.errors import StorageError
from zerolab.storage.store import CheckpointStore
from zeroserver.api.checkpoints import stored_rows

pytestmark = pytest.mark.needs_extension("checkpoint_archive")


@pytest.fixture
def uuid(sqlite_server: Server) -> str:
    sqlite_server.submit(checkpoint_storage=policy(10))
    sqlite_server.add_agent()
    return save_checkpoints(sqlite_server, 0.5)[1]


def test_archive_has_all_files(sqlite_server: Server, uuid: str, tmp_path: Path) -> None:
    response = sqlite_server.http.get(f"/api/v1/checkpoints/{uuid[:8]}/archive")
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/x-tar"
    assert f'filename="checkpoint-{uuid[:8]}.tar"' in response.headers["content-disposition"]
    assert len(response.content) == int(response.headers["content-length"])
    with tarfile.open(fileobj=io.BytesIO(response.content)) as archive:
        archive.extractall(tmp_path, filter="data")
    folder = tmp_path / f"checkpoint-{uuid[:8]}"
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files == {"checkpoint.json", "model0/weights", "notes.txt"}
    assert (folder / "model0/weights").read_bytes() == b"w" * 1000
    assert json.loads((folder / "checkpoint.json").read_text())["uuid"] == uuid


def test_long_and_unicode_names(sqlite_server: Server) -> None:
    sqlite_server.submit(checkpoint_storage=policy(10))
    sqlite_server.add_agent()
    spec = sqlite_server.begin()
    store = CheckpointStore.of_run(spec)
    name = "/".join(["ä" * 60] * 4)
    record = checkpoint(1)
    path = store.begin(record.uuid) / name
    path.parent.mkdir(parents=True)
    path.write_bytes(b"content")
    stored = store.commit(record.uuid, 1, {"steps_completed": 1})
    sqlite_server.report(spec.run_id, msgspec.structs.replace(record, resources=stored.resources))
    response = sqlite_server.http.get(f"/api/v1/checkpoints/{record.uuid}/archive")
    with tarfile.open(fileobj=io.BytesIO(response.content)) as archive:
        assert f"checkpoint-{record.uuid[:8]}/{name}" in archive.getnames()


def test_missing_files_are_an_error(sqlite_server: Server, uuid: str) -> None:
    path = f"/api/v1/checkpoints/{uuid}/archive"
    (root_of(sqlite_server) / uuid / "notes.txt").unlink()
    response = sqlite_server.http.get(path)
    assert (response.status_code, "notes.txt" in response.text) == (404, True)
    unknown = sqlite_server.http.get("/api/v1/checkpoints/00000000/archive")
    assert unknown.status_code == 404


@pytest.mark.needs_extension("checkpoint_removal")
def test_deleted_checkpoint_has_no_archive(sqlite_server: Server, uuid: str) -> None:
    sqlite_server.act("kill")
    sqlite_server.exit(sqlite_server.run_of().run_id, 137)
    assert sqlite_server.http.delete(f"/api/v1/checkpoints/{uuid}").status_code == 204
    response = sqlite_server.http.get(f"/api/v1/checkpoints/{uuid}/archive")
    assert response.status_code == 409
    assert "its files are deleted" in response.text


def test_changed_file_ends_the_download(sqlite_server: Server, uuid: str) -> None:
    module = import_module("zeroserver.extensions.checkpoint_archive")
    services = sqlite_server.app.state.services
    with services.database.read() as connection:
        row, experiment = stored_rows(connection, uuid)
    _, pieces = module._archive(services, row, experiment)
    (root_of(sqlite_server) / uuid / "notes.txt").write_text("")
    with pytest.raises(StorageError, match=r"notes\.txt has changed during the download"):
        list(pieces)
