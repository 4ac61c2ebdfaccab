"""Checkpoints that several ranks write: of all of them, or none."""

from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from tests.core.test_socket_ranks import on_ranks
from tests.waiting import DEADLINE_S
from zerolab.core.context import CheckpointContext
from zerolab.core.socket_ranks import SocketRanks
from zerolab.errors import (
    ConfigError,
    InvalidHyperparametersError,
    PeerFailedError,
    StorageError,
    ZerolabError,
)
from zerolab.storage.store import CheckpointStore

Write = Callable[[int, Path], dict[str, Any]]
"""Writes files as a rank into a directory; returns the rank's metadata."""


def store_sharded(root: Path, write: Write, size: int = 2) -> list[str]:
    """Store one checkpoint on all ranks; return each rank's uuid or error."""
    store = CheckpointStore(root)

    def work(ranks: SocketRanks) -> str:
        metadata: dict[str, Any] = {"steps_completed": 1}
        try:
            context = CheckpointContext(store, ranks, None)
            with context.store_path(metadata, shard=True) as (path, uuid):
                metadata |= write(ranks.rank, path)
        except (ZerolabError, RuntimeError, OSError) as error:
            return f"{type(error).__name__}: {error}"
        return uuid

    return on_ranks(size, work)


def content_of(root: Path, uuid: str) -> dict[str, str]:
    with CheckpointStore(root).restore_path(uuid) as path:
        names = CheckpointStore(root).describe(uuid).resources
        return {name: (path / name).read_text() for name in names}


def test_files_and_metadata_of_ranks_are_merged(tmp_path: Path) -> None:
    def write(rank: int, path: Path) -> dict[str, Any]:
        (path / "shards").mkdir()
        (path / "shards" / f"of_{rank}").write_text(str(rank))
        return {f"key_{rank}": rank, "both": {"same": [1, 2], f"of_{rank}": rank}}

    (uuid,) = set(store_sharded(tmp_path, write, size=3))
    assert content_of(tmp_path, uuid) == {f"shards/of_{rank}": str(rank) for rank in range(3)}
    assert CheckpointStore(tmp_path).describe(uuid).metadata == {
        "steps_completed": 1,
        "both": {"same": [1, 2], "of_0": 0, "of_1": 1, "of_2": 2},
        **{f"key_{rank}": rank for rank in range(3)},
    }
    assert [path.name for path in tmp_path.iterdir()] == [uuid]


def test_identical_files_of_ranks_are_merged(tmp_path: Path) -> None:
    def write(_rank: int, path: Path) -> dict[str, Any]:
        (path / "vocabulary").write_text("a b c")
        return {}

    (uuid,) = set(store_sharded(tmp_path, write))
    assert content_of(tmp_path, uuid) == {"vocabulary": "a b c"}


@pytest.mark.parametrize(
    ("written", "metadata", "problem"),
    [
        (
            ("left", "right"),
            ({}, {}),
            "weights: ranks 0, 1 have written different content; put the rank into its name",
        ),
        (
            ("a", "a"),
            ({"loss": 0.5}, {"loss": 0.25}),
            "metadata.loss: must be the same wherever it is given, got 0.25 on rank 1 and 0.5",
        ),
        (
            ("a", "a"),
            ({"nested": {"lr": 1}}, {"nested": {"lr": True}}),
            "metadata.nested.lr: must be the same wherever it is given, got True on rank 1 and 1",
        ),
    ],
)
def test_conflicting_ranks_store_nothing(
    tmp_path: Path,
    written: tuple[str, str],
    metadata: tuple[dict[str, Any], dict[str, Any]],
    problem: str,
) -> None:
    def write(rank: int, path: Path) -> dict[str, Any]:
        (path / "weights").write_text(written[rank])
        return metadata[rank]

    for response in store_sharded(tmp_path, write):
        assert response.startswith("ConfigError: checkpoint: not stored")
        assert problem in response
    assert list(tmp_path.iterdir()) == []


def test_file_folder_conflict_is_config_error(
    tmp_path: Path,
) -> None:
    def write(rank: int, path: Path) -> dict[str, Any]:
        if rank == 0:
            (path / "model").write_text("weights")
        else:
            (path / "model" / "part").mkdir(parents=True)
            (path / "model" / "part" / "weights").write_text("weights")
        return {}

    for response in store_sharded(tmp_path, write):
        assert response.startswith("ConfigError: checkpoint: not stored")
        assert "model: rank 0 has written a file of that name, and rank 1 a folder" in response
    assert list(tmp_path.iterdir()) == []


def test_unserializable_metadata_stores_nothing(tmp_path: Path) -> None:
    def write(rank: int, _path: Path) -> dict[str, Any]:
        return {"odd": object()} if rank else {}

    responses = store_sharded(tmp_path, write)
    assert all("metadata: must hold only what JSON can hold" in response for response in responses)
    assert list(tmp_path.iterdir()) == []


def test_failed_draft_is_removed_after_last_write(tmp_path: Path) -> None:
    failing = Event()

    def write(rank: int, path: Path) -> dict[str, Any]:
        if rank == 0:
            failing.set()
            raise RuntimeError("no memory")
        assert failing.wait(DEADLINE_S)
        for number in range(100):
            (path / str(number)).write_text("x")
        assert len(list(path.iterdir())) == 100
        return {}

    responses = store_sharded(tmp_path, write)
    assert responses[0] == "RuntimeError: no memory"
    assert responses[1].startswith("PeerFailedError: checkpoint: not stored, because of rank 0")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("failure", "on_peers"),
    [
        (InvalidHyperparametersError("too wide"), InvalidHyperparametersError),
        (ConfigError("x", ["y"]), ZerolabError),
        (StorageError("gone"), StorageError),
        (OSError(28, "No space left on device"), StorageError),
        (RuntimeError("boom"), PeerFailedError),
    ],
)
def test_failure_type_is_the_same_on_every_rank(
    failure: Exception, on_peers: type[Exception]
) -> None:
    def work(ranks: SocketRanks) -> type[Exception] | None:
        try:
            with ranks.together():
                if ranks.rank == 1:
                    raise failure
        except Exception as error:  # noqa: BLE001 - its type is the result
            return type(error)
        return None

    assert on_ranks(3, work) == [on_peers, type(failure), on_peers]
