"""Names and links inside checkpoints: none leads to a file outside of them."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import fsspec
import msgspec
import pytest

from tests.server.helpers import Server, checkpoint
from tests.waiting import until
from zerolab.client.archive import pack
from zerolab.contract.names import file_name_problem, resources_problem
from zerolab.errors import ConfigError, NotFoundError
from zerolab.files import create_private, write_atomic
from zerolab.storage.store import CheckpointStore, new_uuid

BAD = [
    "", ".", "..", "/etc/passwd", "../x", "a/../../x", "a/..", "a//b", "./a", "a/", "a\\b",
    "a\nb", "a\x1bb", "a\u2028b", "a\u202eb", "a\0b", "a\x85b", "\ud800",
    "x" * 256, "a/" * 600 + "b",
]  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_file_names_are_refused(name: str) -> None:
    assert file_name_problem(name)
    assert resources_problem({"ok": 1, name: 1})


@pytest.mark.parametrize("name", ["a", "model0/rank-0.pt", "ä ö/..x", "a/b/c", ".hidden", "a..b"])
def test_plain_file_names_are_accepted(name: str) -> None:
    assert file_name_problem(name) is None


@pytest.mark.parametrize(
    "resources", [{"a": -1}, {"a": 2**53}, {f"{n}": 2**52 for n in range(3)},
                  {f"{n}": 1 for n in range(100_000)}]
)  # fmt: skip
def test_invalid_sizes_and_counts_are_refused(resources: dict[str, int]) -> None:
    assert resources_problem(resources)


def saved(store: CheckpointStore, **files: str) -> str:
    name = new_uuid()
    path = store.begin(name)
    for file, content in ({"weights": "w"} | files).items():
        (path / file).write_text(content)
    store.commit(name, 1, {})
    return name


def describe(path: Path, **changes: Any) -> None:
    content = json.loads((path / "checkpoint.json").read_text())
    (path / "checkpoint.json").write_text(json.dumps(content | changes))


@pytest.mark.parametrize("name", ["a\\b", "a\nb", "a\x1b", "checkpoint.json"])
def test_commit_refuses_bad_names(tmp_path: Path, name: str) -> None:
    store = CheckpointStore(tmp_path / "root")
    with pytest.raises(ConfigError, match=r"must (have no|not be called)"):
        saved(store, **{name: "x"})


def test_commit_refuses_links_to_outside(tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text("secret")
    store = CheckpointStore(tmp_path / "root")
    path = store.begin(name := new_uuid())
    (path / "inside").write_text("x")
    (path / "alias").symlink_to("inside")
    (path / "link").symlink_to(secret)
    with pytest.raises(ConfigError, match="link: is a link that leads out"):
        store.commit(name, 1, {})
    (path / "link").unlink()
    assert store.commit(name, 1, {}).resources == {"alias": 1, "inside": 1}
    assert b"".join(store.pieces(name, "alias", 0, 1)) == b"x"


@pytest.mark.parametrize("resource", ["../../victim", "a/../../../victim", "{outside}"])
def test_directory_backend_stays_inside_checkpoint(tmp_path: Path, resource: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    resource = resource.format(outside=victim)
    store = CheckpointStore(tmp_path / "root")
    name = saved(store)
    describe(tmp_path / "root" / name, resources={"weights": 1, resource: 4})
    with pytest.raises(NotFoundError, match="damaged"):
        store.describe(name)
    with pytest.raises(NotFoundError):
        list(store.pieces(name, resource, 0, 4))
    store.remove_files(name, [resource])
    with pytest.raises(NotFoundError), store.restore_path(name):
        pass
    with pytest.raises(NotFoundError):
        store.download(name, tmp_path / "copy")
    assert victim.read_text() == "mine"
    store.delete(name)
    assert victim.read_text() == "mine"


def test_links_created_after_commit_are_rejected(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "weights").write_text("w")
    store = CheckpointStore(tmp_path / "root")
    path = tmp_path / "root" / saved(store)
    name = path.name
    (path / "folder").symlink_to(outside)
    describe(path, resources={"weights": 1, "folder/weights": 1})
    with pytest.raises(NotFoundError, match="leads out"):
        list(store.pieces(name, "folder/weights", 0, 1))
    store.remove_files(name, ["folder/weights", "weights"])
    assert (outside / "weights").exists()
    assert not (path / "weights").exists()
    shutil.rmtree(path)
    path.symlink_to(outside)
    with pytest.raises(NotFoundError):
        list(store.pieces(name, "weights", 0, 1))


def test_pipe_instead_of_file_does_not_block(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "root")
    path = tmp_path / "root" / saved(store)
    (path / "weights").unlink()
    os.mkfifo(path / "weights")
    with pytest.raises(NotFoundError, match="is missing"):
        list(store.pieces(path.name, "weights", 0, 1))


@pytest.mark.needs_extension("s3")
@pytest.mark.parametrize(
    "changes",
    [
        {"resources": {"../../evil": 4}},
        {"resources": {"/tmp/evil": 4}},
        {"resources": {"weights": -1}},
        {"uuid": "../../evil"},
    ],
)
def test_bucket_restore_stays_inside_directory(tmp_path: Path, changes: dict[str, Any]) -> None:
    store = CheckpointStore(f"memory://names-{new_uuid()}", local=tmp_path / "a" / "cache")
    name = saved(store)
    memory = fsspec.filesystem("memory")
    location = store.address.root.removeprefix("memory:/")
    stored = msgspec.json.decode(memory.cat(f"{location}/{name}/checkpoint.json"))
    memory.pipe(f"{location}/{name}/checkpoint.json", json.dumps(stored | changes).encode())
    memory.pipe(f"{location}/evil", b"evil")
    with pytest.raises(NotFoundError, match="damaged"), store.restore_path(name):
        pass
    with pytest.raises(NotFoundError, match="damaged"):
        store.download(name, tmp_path / "copy")
    store.remove_files(name, ["../evil"])
    assert memory.cat(f"{location}/evil") == b"evil"
    assert not list(tmp_path.rglob("evil"))


def test_download_follows_no_link_out_of_its_directory(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "root")
    name = saved(store)
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "weights").symlink_to(victim)
    with pytest.raises(NotFoundError, match="leads out"):
        store.download(name, tmp_path / "copy")
    assert victim.read_text() == "mine"


def test_archive_refuses_bad_names(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / os.fsdecode(b"\xff.py")).write_text("x")
    with pytest.raises(ConfigError, match="must be text in UTF-8; rename it"):
        pack(tmp_path / "model")
    (tmp_path / "model" / os.fsdecode(b"\xff.py")).unlink()
    (tmp_path / "model" / "a\nb").write_text("x")
    with pytest.raises(ConfigError, match=r"control characters.*rename the file"):
        pack(tmp_path / "model")


@pytest.mark.parametrize(
    "resources",
    [
        {"model0/../../../victim.txt": 4},
        {"/etc/passwd": 4},
        {"a\\b": 4},
        {"a\x1b[2J": 4},
        {"a": -1},
        {f"{n}": 1 for n in range(60_000)},
    ],
)
def test_report_of_bad_files_is_refused(server: Server, resources: dict[str, int]) -> None:
    server.submit()
    server.add_agent()
    run = server.begin()
    record = msgspec.structs.replace(checkpoint(1), resources=resources)
    assert server.send(run.run_id, 1, [record]).status_code == 422
    assert server.get("/experiments/1/checkpoints")["checkpoints"] == []


def test_trial_cannot_claim_anothers_checkpoint(server: Server) -> None:
    server.submit()
    server.submit()
    server.add_agent(slots=2)
    first, second = server.begin(1), server.begin(2)
    server.report(first.run_id, checkpoint(1))
    assert server.send(first.run_id, 2, [checkpoint(1)]).status_code == 200
    response = server.send(second.run_id, 1, [checkpoint(1)])
    assert response.status_code == 422
    assert "another trial's" in response.text
    (record,) = server.get("/experiments/1/checkpoints")["checkpoints"]
    assert record["trial_id"] == 1


@pytest.mark.needs_extension("checkpoint_removal")
def test_server_stays_inside_checkpoint(server: Server) -> None:
    """Names stored by an earlier version, and a link created after the report."""
    home = server.services.orchestrator.home
    server.submit(checkpoint_storage={"save_trial_latest": 5, "save_trial_best": 0})
    server.add_agent()
    run = server.begin()
    store = CheckpointStore.of_run(run)
    for steps in (1, 2):
        record = checkpoint(steps)
        path = store.begin(record.uuid)
        (path / "model0").mkdir()
        (path / "model0" / "weights").write_text("w")
        stored = store.commit(record.uuid, steps, {})
        server.report(run.run_id, msgspec.structs.replace(record, resources=stored.resources))
    uuid = checkpoint(1).uuid
    victim = home.path / "victim.txt"
    victim.write_text("mine")
    (home.checkpoints / uuid / "link").symlink_to(home.token_file)
    names = ["model0/../../../victim.txt", str(victim), "link"]
    sizes = {"model0/weights": 1} | dict.fromkeys(names, 4)
    text = json.dumps(sizes).replace(":", "\\:")
    server.execute(f"UPDATE checkpoints SET resources = '{text}' WHERE uuid = '{uuid}'")
    for name in names:
        response = server.http.get(f"/api/v1/checkpoints/{uuid}/file", params={"name": name})
        assert response.status_code == 404, response.text
        assert server.token not in response.text
    body = {"uuids": [uuid], "globs": ["*.txt", "link", "model0/*"]}
    server.post("/checkpoints/remove", body)
    until(
        "the files are gone", lambda: not (home.checkpoints / uuid / "model0" / "weights").exists()
    )
    assert victim.read_text() == "mine"
    assert home.token_file.exists()


@pytest.mark.parametrize("make", [write_atomic, create_private])
def test_files_and_names_are_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any
) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def note(descriptor: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    make(tmp_path / "file", b"content")
    assert len(synced) == 2
    assert Path(synced[0]).parent == tmp_path
    assert synced[1] == str(tmp_path)
