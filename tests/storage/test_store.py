import os
import shutil
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest

from zerolab.core.context import CheckpointContext
from zerolab.core.socket_ranks import SocketRanks
from zerolab.errors import ConfigError, NotFoundError
from zerolab.storage.store import CheckpointStore, new_uuid


@pytest.fixture(
    params=[
        "directory",
        pytest.param("memory", marks=pytest.mark.needs_extension("s3")),
        "s3",
    ]
)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointStore:
    if request.param == "directory":
        return CheckpointStore(tmp_path / "checkpoints")
    if request.param == "memory":
        return CheckpointStore(f"memory://{tmp_path}/checkpoints", local=tmp_path / "cache")
    s3 = request.getfixturevalue("s3_server")
    return CheckpointStore(s3.address(s3.bucket()), local=tmp_path / "cache")


def checkpoints(store: CheckpointStore) -> CheckpointContext:
    return CheckpointContext(store, SocketRanks(), None)


def fill(store: CheckpointStore, steps: int, **metadata: object) -> str:
    described = {"steps_completed": steps, **metadata}
    with checkpoints(store).store_path(described) as (path, name):
        (path / "model.bin").write_bytes(b"weights" * steps)
        (path / "rank 0").mkdir()
        (path / "rank 0" / "state").write_text("ä", encoding="utf-8")
    return name


def fail_in(path: Path) -> None:
    (path / "half").write_text("x")
    raise RuntimeError("disk")


class TestEveryStore:
    def test_checkpoint_roundtrip_of_files_and_metadata(self, store: CheckpointStore) -> None:
        name = fill(store, 7, note="first")
        with store.restore_path(name) as path:
            assert (path / "model.bin").read_bytes() == b"weights" * 7
            assert (path / "rank 0" / "state").read_text(encoding="utf-8") == "ä"
        stored = store.describe(name)
        assert (stored.uuid, stored.steps_completed) == (name, 7)
        assert stored.metadata == {"steps_completed": 7, "note": "first"}
        assert stored.resources == {"model.bin": 49, "rank 0/state": 2}

    def test_exception_leaves_no_checkpoint(self, store: CheckpointStore) -> None:
        with (
            pytest.raises(RuntimeError, match="disk"),
            checkpoints(store).store_path({"steps_completed": 1}) as (path, name),
        ):
            fail_in(path)
        assert not path.exists()
        assert store.list() == []
        with pytest.raises(NotFoundError, match=name), store.restore_path(name):
            pass

    def test_list_and_latest(self, store: CheckpointStore) -> None:
        assert store.list() == []
        assert store.latest() is None
        names = [fill(store, steps) for steps in (3, 9, 5)]
        assert [stored.uuid for stored in store.list()] == names
        latest = store.latest()
        assert latest is not None
        assert latest.uuid == names[1]

    def test_delete_is_idempotent(self, store: CheckpointStore) -> None:
        name, other = fill(store, 1), fill(store, 2)
        store.delete(name)
        store.delete(name)
        assert [stored.uuid for stored in store.list()] == [other]

    def test_two_writers_fill_one_checkpoint(self, store: CheckpointStore) -> None:
        name = new_uuid()
        for rank in range(2):
            (store.begin(name) / f"rank_{rank}").write_text("x" * rank)
            assert store.list() == []
        store.commit(name, 4, {})
        assert store.describe(name).resources == {"rank_0": 0, "rank_1": 1}

    @pytest.mark.parametrize("name", ["../x", "/etc", "", "a" * 36, "..", f"{'A' * 8}-x"])
    def test_invalid_uuid_is_refused(self, name: str, store: CheckpointStore) -> None:
        for action in (store.describe, store.delete, store.begin, store.abort):
            with pytest.raises(ConfigError, match="must be a checkpoint's uuid"):
                action(name)


def test_error_names_missing_or_truncated_file(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    name = fill(store, 3)
    os.truncate(tmp_path / name / "model.bin", 5)
    with pytest.raises(NotFoundError, match=r"model\.bin has 5 bytes instead of 21"):
        store.describe(name)
    (tmp_path / name / "model.bin").unlink()
    with pytest.raises(NotFoundError, match=r"model\.bin is missing"):
        store.describe(name)
    (tmp_path / name / "checkpoint.json").write_text("{")
    with pytest.raises(NotFoundError, match="damaged"):
        store.describe(name)
    assert store.latest() is None


@pytest.mark.needs_extension("s3")
def test_object_store_needs_description(tmp_path: Path) -> None:
    store = CheckpointStore(f"memory://{tmp_path}")
    name = fill(store, 3)
    fsspec.filesystem("memory").rm(f"{tmp_path}/{name}/checkpoint.json")
    assert store.list() == []
    with pytest.raises(NotFoundError):
        store.describe(name)


KILLED = """
import os, sys
from pathlib import Path
from zerolab.storage.store import CheckpointStore, new_uuid
path = CheckpointStore(sys.argv[1], owner="trial-3").begin(new_uuid())
(path / "half").write_bytes(bytes(1000))
os.kill(os.getpid(), 9)
"""


def test_sweep_after_writer_died(
    tmp_path: Path,
) -> None:
    assert subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False).returncode < 0
    assert len(list(tmp_path.iterdir())) == 1
    store = CheckpointStore(tmp_path, owner="trial-3")
    assert store.latest() is None
    CheckpointStore(tmp_path, owner="trial-33").sweep()
    assert len(list(tmp_path.iterdir())) == 1
    store.sweep()
    assert list(tmp_path.iterdir()) == []


def test_file_url_is_directory(tmp_path: Path) -> None:
    name = fill(CheckpointStore(f"file://{tmp_path}"), 1)
    assert (tmp_path / name / "model.bin").exists()
    assert CheckpointStore(tmp_path).describe(name).steps_completed == 1


def test_checkpoints_move_with_their_directory(tmp_path: Path) -> None:
    name = fill(CheckpointStore(tmp_path / "a"), 1)
    shutil.move(tmp_path / "a", tmp_path / "b")
    assert CheckpointStore(tmp_path / "b").describe(name).uuid == name
