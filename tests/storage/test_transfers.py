"""Files on their way: shared by ranks, spoken of when it takes long, kept at hand, cut off."""

import logging
import os
from pathlib import Path
from typing import Any

import pytest

from tests.core.test_socket_ranks import on_ranks
from tests.storage.buckets import S3
from zerolab.core.context import CheckpointContext
from zerolab.core.saving import CheckpointSaver
from zerolab.core.socket_ranks import SocketRanks
from zerolab.errors import ConfigError
from zerolab.storage.progress import Progress
from zerolab.storage.store import CheckpointStore


def stores(s3: S3, bucket: str, directory: Path) -> CheckpointStore:
    return CheckpointStore(s3.address(bucket), owner="trial-1", local=directory)


def test_each_rank_brings_up_its_share_of_the_files(s3_server: S3, tmp_path: Path) -> None:
    bucket = s3_server.bucket()

    def work(ranks: SocketRanks) -> tuple[str, list[str]]:
        ranks.local_rank, ranks.local_size = ranks.rank, ranks.size
        saver = CheckpointSaver(stores(s3_server, bucket, tmp_path), ranks, None)
        draft = saver.begin()
        for number in range(2):
            name = f"rank_{ranks.rank}_{number}"
            (draft.path / name).write_bytes(bytes(1000 * (1 + ranks.rank)))
        sending = saver.send(draft, {"steps_completed": 3})
        saver.complete(sending, 3)
        return draft.uuid, sending.files

    (uuid, mine), (_, others) = on_ranks(2, work)
    assert len(mine) == len(others) == 2
    assert sorted(mine + others) == ["rank_0_0", "rank_0_1", "rank_1_0", "rank_1_1"]
    stored = stores(s3_server, bucket, tmp_path / "other").describe(uuid)
    assert sum(stored.resources.values()) == 6000
    assert set(stored.hashes) == set(stored.resources)


@pytest.mark.slow
def test_ranks_that_write_apart_bring_up_their_own_and_one_what_they_wrote_alike(
    s3_server: S3, tmp_path: Path
) -> None:
    bucket = s3_server.bucket()

    def work(ranks: SocketRanks) -> str:
        # As on two machines: none sees what the other has written.
        ranks.local_rank, ranks.local_size = 0, 1
        store = stores(s3_server, bucket, tmp_path / str(ranks.rank))
        context = CheckpointContext(store, ranks, None)
        with context.store_path({"steps_completed": 1}, shard=True) as (path, uuid):
            (path / f"of_{ranks.rank}").write_text(str(ranks.rank))
            (path / "vocabulary").write_text("a b c")
        return uuid

    (uuid,) = set(on_ranks(2, work))
    reader = stores(s3_server, bucket, tmp_path / "reader")
    with reader.restore_path(uuid) as path:
        assert (path / "of_1").read_text() == "1"
        assert (path / "vocabulary").read_text() == "a b c"


def test_a_selector_fetches_only_what_it_names_and_the_rest_when_it_is_wanted(
    s3_server: S3, tmp_path: Path
) -> None:
    bucket = s3_server.bucket()
    source = tmp_path / "source"
    (source / "deep").mkdir(parents=True)
    (source / "weights").write_bytes(b"w" * 10)
    (source / "deep" / "states").write_bytes(b"s" * 10)
    (source / "junk").write_bytes(b"j")
    writer = CheckpointContext(stores(s3_server, bucket, tmp_path / "a"), SocketRanks(), None)
    uuid = writer.upload(
        source, {"steps_completed": 2, "note": "x"}, selector=lambda name: name != "junk"
    )
    store = stores(s3_server, bucket, tmp_path / "b")
    reader = CheckpointContext(store, SocketRanks(), None)
    assert reader.get_metadata(uuid) == {"steps_completed": 2, "note": "x"}
    with reader.restore_path(uuid, selector=lambda name: name == "weights") as path:
        assert [file.name for file in path.rglob("*") if file.is_file()] == ["weights"]
        with reader.restore_path(uuid) as same:  # while another one reads
            assert same == path
            assert (path / "deep" / "states").read_bytes() == b"s" * 10
    reader.download(uuid, tmp_path / "copy", selector=lambda name: "deep" in name)
    copied = [file.name for file in (tmp_path / "copy").rglob("*") if file.is_file()]
    assert copied == ["states"]
    with pytest.raises(ConfigError, match="must be a directory that exists"):
        writer.upload(tmp_path / "nothing", {"steps_completed": 1})
    assert [each.uuid for each in store.list()] == [uuid]


def test_a_download_goes_on_where_it_stopped(s3_server: S3, tmp_path: Path) -> None:
    bucket = s3_server.bucket()
    writer = stores(s3_server, bucket, tmp_path / "a")
    content = os.urandom(50_000)
    with CheckpointContext(writer, SocketRanks(), None).store_path({"steps_completed": 1}) as made:
        (made[0] / "weights").write_bytes(content)
    counted: list[int] = []
    target = tmp_path / "weights"
    target.with_name("weights.part").write_bytes(content[:49_000])
    stored = writer.describe(made[1])
    objects = writer._bucket.objects
    pieces = objects.pieces

    def counting(name: str, first: int, end: int) -> Any:
        counted.append(end - first)
        return pieces(name, first, end)

    objects.pieces = counting  # type: ignore[method-assign]
    writer._fetch(stored, ["weights"], tmp_path)
    assert target.read_bytes() == content
    assert counted == [1000]


def test_what_was_not_used_for_longest_leaves_the_cache_and_what_is_read_stays(
    s3_server: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = s3_server.bucket()
    writer = stores(s3_server, bucket, tmp_path / "a")
    context = CheckpointContext(writer, SocketRanks(), None)
    uuids = []
    for _ in range(3):
        with context.store_path({"steps_completed": 1}) as (path, uuid):
            (path / "weights").write_bytes(bytes(100_000))
        uuids.append(uuid)
    there = {path.name for path in (tmp_path / "a").iterdir() if path.is_dir()}
    assert there == set(uuids)  # what was brought up is at hand
    monkeypatch.setenv("ZEROLAB_CHECKPOINT_CACHE_GB", "0.00015")
    reader = stores(s3_server, bucket, tmp_path / "b")
    with reader.restore_path(uuids[0]) as first:
        with reader.restore_path(uuids[1]):
            assert (first / "weights").stat().st_size == 100_000
        assert (first / "weights").is_file()
    with reader.restore_path(uuids[2]):
        left = {path.name for path in (tmp_path / "b").iterdir() if path.is_dir()}
        assert left == {uuids[2]}


def test_a_long_transfer_says_how_far_it_is_and_a_short_one_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    now = [0.0]
    progress = Progress("checkpoint x: uploading", 4_000_000_000, clock=lambda: now[0])
    with progress.file() as told:
        for second in range(1, 21):
            now[0] = float(second)
            told(100_000_000)
    progress.end()
    assert caplog.messages == [
        "checkpoint x: uploading: 1.0 GB of 4.0 GB (25 %)",
        "checkpoint x: uploading: 2.0 GB of 4.0 GB (50 %)",
        "checkpoint x: uploading: 4.0 GB in 20 s",
    ]
    caplog.clear()
    short = Progress("checkpoint y: uploading", 10, clock=lambda: 0.0)
    with short.file() as told:
        told(10)
    short.end()
    assert caplog.messages == []
