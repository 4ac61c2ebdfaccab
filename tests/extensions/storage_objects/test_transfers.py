"""Files on their way: division among ranks, progress, cache, interruption."""

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.core.test_socket_ranks import on_ranks
from tests.extensions.storage_objects.buckets import S3
from zerolab.core.checkpoint_writer import CheckpointSaver
from zerolab.core.context import CheckpointContext
from zerolab.core.socket_ranks import SocketRanks
from zerolab.errors import ConfigError, NotFoundError, StorageError
from zerolab.extensions.storage_objects.object_store import FsspecStore, _callback
from zerolab.storage.objects import TransferProgress
from zerolab.storage.store import CheckpointStore, new_uuid


def stores(s3: S3, bucket: str, directory: Path) -> CheckpointStore:
    return CheckpointStore(s3.address(bucket), owner="trial-1", local=directory)


def test_each_rank_uploads_its_share(s3_server: S3, tmp_path: Path) -> None:
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

    (uuid, first), (_, second) = on_ranks(2, work)
    assert len(first) == len(second) == 2
    assert sorted(first + second) == [
        "rank_0_0",
        "rank_0_1",
        "rank_1_0",
        "rank_1_1",
    ]
    stored = stores(s3_server, bucket, tmp_path / "other").describe(uuid)
    assert sum(stored.resources.values()) == 6000
    assert set(stored.hashes) == set(stored.resources)


@pytest.mark.slow
def test_uploads_of_ranks_that_write_separately(s3_server: S3, tmp_path: Path) -> None:
    bucket = s3_server.bucket()

    def work(ranks: SocketRanks) -> str:
        # As on two machines: neither sees the other's files.
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


def test_selector_fetches_only_selected_files(s3_server: S3, tmp_path: Path) -> None:
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
    assert [stored.uuid for stored in store.list()] == [uuid]


def test_download_fetches_only_missing_files(s3_server: S3, tmp_path: Path) -> None:
    bucket = s3_server.bucket()
    writer = stores(s3_server, bucket, tmp_path / "a")
    with CheckpointContext(writer, SocketRanks(), None).store_path({"steps_completed": 1}) as path:
        for name in ("weights", "moments"):
            (path[0] / name).write_bytes(name.encode() * 1000)
    target = tmp_path / "copy"
    target.mkdir()
    (target / "weights").write_bytes(b"weights" * 1000)
    (target / "moments.part").write_bytes(b"what another download has left")
    fetched: list[str] = []
    files = writer._bucket.objects._files
    get = files.get_file

    def recorded(path: str, *arguments: Any, **options: Any) -> None:
        fetched.append(path.rpartition("/")[2])
        get(path, *arguments, **options)

    files.get_file = recorded
    writer.download(path[1], target)
    assert fetched == ["moments"]
    assert (target / "moments").read_bytes() == b"moments" * 1000
    assert sorted(path.name for path in target.iterdir()) == ["moments", "weights"]


class Faulty:
    """Requests of a store to S3; some fail before S3 gets them, or after it has."""

    def __init__(self, store: CheckpointStore, fails: list[tuple[str, str]]) -> None:
        self.sent: list[str] = []
        self._fails = fails
        files = store._bucket.objects._files
        self._call, files._call_s3 = files._call_s3, self.call_s3

    async def call_s3(self, method: str, *positional: Any, **arguments: Any) -> Any:
        name = f"{method} {arguments.get('PartNumber', '')}".strip()
        self.sent.append(name)
        self._fail(name, "before", "the line is cut")
        response = await self._call(method, *positional, **arguments)
        self._fail(name, "after", "the answer is lost")
        return response

    def _fail(self, name: str, when: str, text: str) -> None:
        if (name, when) in self._fails:
            self._fails.remove((name, when))
            raise ConnectionError(text)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the smallest parts that S3 accepts, and no pause between attempts."""
    monkeypatch.setattr("zerolab.extensions.storage_objects.object_store._PART", 5 * 1024**2)
    monkeypatch.setattr(
        "zerolab.extensions.storage_objects.object_store._PAUSES_S", (0.0, 0.0, 0.0)
    )


def bring_up(
    s3: S3, bucket: str, directory: Path, content: bytes, fails: list[tuple[str, str]]
) -> tuple[CheckpointStore, str, list[str]]:
    """Save a checkpoint of one file over a faulty line; return the requests sent."""
    store = stores(s3, bucket, directory)
    faulty = Faulty(store, fails)
    name = new_uuid()
    (store.begin(name) / "weights").write_bytes(content)
    store.announce(name)
    records = store.upload(name, ["weights"])
    sent = list(faulty.sent)
    store.commit(name, 1, {}, records)
    return store, name, sent


def unfinished(s3: S3, bucket: str) -> list[Any]:
    client = s3.client()
    uploads: list[Any] = client.list_multipart_uploads(Bucket=bucket).get("Uploads", [])
    client.close()
    return uploads


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize(
    ("fails", "uploads"),
    [
        ([], 1),
        ([("upload_part 2", "before")] * 2, 3),
        ([("upload_part 2", "before"), ("upload_part 3", "before")], 2),
        ([("complete_multipart_upload", "before")], 2),
        ([("complete_multipart_upload", "after")], 1),
    ],
    ids=["undisturbed", "one part twice", "two parts", "the end", "the answer to the end"],
)
def test_large_upload_retries(
    s3_server: S3, tmp_path: Path, fails: list[tuple[str, str]], uploads: int
) -> None:
    bucket, content = s3_server.bucket(), os.urandom(11 * 1024**2)
    _, name, sent = bring_up(s3_server, bucket, tmp_path / "a", content, fails)
    assert sent.count("create_multipart_upload") == uploads
    assert unfinished(s3_server, bucket) == []
    with stores(s3_server, bucket, tmp_path / "b").restore_path(name) as path:
        assert (path / "weights").read_bytes() == content


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("call", ["upload_part 2", "complete_multipart_upload"])
def test_failed_upload_leaves_nothing(s3_server: S3, tmp_path: Path, call: str) -> None:
    bucket = s3_server.bucket()
    store = stores(s3_server, bucket, tmp_path / "a")
    # s3fs removes the parts itself, if that request succeeds.
    Faulty(store, [(call, "before")] * 4 + [("abort_multipart_upload", "before")] * 4)
    name = new_uuid()
    (store.begin(name) / "weights").write_bytes(bytes(11 * 1024**2))
    store.announce(name)
    with pytest.raises(StorageError, match="the line is cut"):
        store.upload(name, ["weights"])
    assert unfinished(s3_server, bucket) == []
    assert stores(s3_server, bucket, tmp_path / "b").list() == []
    store.abort(name)
    assert s3_server.keys(bucket) == []


@pytest.mark.usefixtures("small_parts")
def test_retried_upload_leaves_no_parts(s3_server: S3, tmp_path: Path) -> None:
    """s3fs 2024.10 does not abort a failed upload; the request of newer versions may fail."""
    bucket = s3_server.bucket()
    fails = [("upload_part 2", "before"), ("abort_multipart_upload", "before")]
    bring_up(s3_server, bucket, tmp_path, bytes(11 * 1024**2), fails)
    assert unfinished(s3_server, bucket) == []


@pytest.mark.usefixtures("small_parts")
def test_parts_are_removed_after_failed_abort(
    s3_server: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = s3_server.bucket()
    abort, calls = FsspecStore._abort_uploads, []

    def fail_once(store: FsspecStore, path: str) -> None:
        calls.append(path)
        if len(calls) == 1:
            raise ConnectionError("the line is cut")
        abort(store, path)

    monkeypatch.setattr(FsspecStore, "_abort_uploads", fail_once)
    fails = [("upload_part 2", "before"), ("abort_multipart_upload", "before")]
    bring_up(s3_server, bucket, tmp_path, bytes(11 * 1024**2), fails)
    assert unfinished(s3_server, bucket) == []


@pytest.mark.usefixtures("small_parts")
def test_failed_upload_keeps_parts_of_similar_names(s3_server: S3, tmp_path: Path) -> None:
    """Another rank may upload ``weights2`` while the upload of ``weights`` fails."""
    bucket = s3_server.bucket()
    store = stores(s3_server, bucket, tmp_path)
    Faulty(store, [("upload_part 2", "before")] * 4)
    name = new_uuid()
    (store.begin(name) / "weights").write_bytes(bytes(11 * 1024**2))
    store.announce(name)
    prefix = store._bucket.objects._path(name).partition("/")[2]
    client = s3_server.client()
    client.create_multipart_upload(Bucket=bucket, Key=f"{prefix}/weights2")
    client.close()
    with pytest.raises(StorageError, match="the line is cut"):
        store.upload(name, ["weights"])
    assert [upload["Key"] for upload in unfinished(s3_server, bucket)] == [f"{prefix}/weights2"]
    store.abort(name)
    assert unfinished(s3_server, bucket) == []


UPLOADING = """
import sys
from zerolab.extensions.storage_objects import object_store
from zerolab.storage.store import CheckpointStore
from zerolab.contract.storage import StorageAddress
object_store._PART = 5 * 1024**2
root, name, local, endpoint, key, secret = sys.argv[1:]
options = {"endpoint_url": endpoint, "access_key": key, "secret_key": secret}
store = CheckpointStore(
    StorageAddress(root=root, options=options), owner="trial-1", local=local
)
(store.begin(name) / "weights").write_bytes(bytes(11 * 1024**2))
store.announce(name)
files = store._bucket.objects._files
call = files._call_s3

async def stopping(method, *positional, **arguments):
    if arguments.get("PartNumber") == 3:
        print("two parts", flush=True)
        import time
        time.sleep(1e6)
    return await call(method, *positional, **arguments)

files._call_s3 = stopping
store.upload(name, ["weights"])
"""


@pytest.mark.slow
def test_killed_upload_leaves_no_checkpoint(s3_server: S3, tmp_path: Path) -> None:
    bucket, name = s3_server.bucket(), new_uuid()
    address = s3_server.address(bucket)
    arguments = [address.root, name, str(tmp_path / "a"), *address.options.values()]
    with subprocess.Popen(
        [sys.executable, "-c", UPLOADING, *arguments], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "two parts\n"
        process.kill()
    assert unfinished(s3_server, bucket)
    store = stores(s3_server, bucket, tmp_path / "b")
    assert store.list() == []
    with pytest.raises(NotFoundError, match="not found in"):
        store.describe(name)
    store.sweep()
    assert unfinished(s3_server, bucket) == []
    assert s3_server.keys(bucket) == []


@pytest.mark.usefixtures("small_parts")
def test_lost_response_does_not_repeat_upload(s3_server: S3, tmp_path: Path) -> None:
    bucket = s3_server.bucket()
    store = stores(s3_server, bucket, tmp_path / "a")
    name = new_uuid()
    (store.begin(name) / "weights").write_bytes(b"w" * 1000)
    store.announce(name)
    faulty = Faulty(store, [("put_object", "after")])
    records = store.upload(name, ["weights"])
    assert faulty.sent.count("put_object") == 1
    store.commit(name, 1, {}, records)
    with stores(s3_server, bucket, tmp_path / "b").restore_path(name) as path:
        assert (path / "weights").read_bytes() == b"w" * 1000


def test_cache_evicts_least_recently_used(
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
    cached = {path.name for path in (tmp_path / "a").iterdir() if path.is_dir()}
    assert cached == set(uuids)  # the uploaded files are cached
    monkeypatch.setenv("ZEROLAB_CHECKPOINT_CACHE_GB", "0.00015")
    reader = stores(s3_server, bucket, tmp_path / "b")
    (tmp_path / "b" / "not of the cache").mkdir(parents=True)
    with reader.restore_path(uuids[0]) as first:
        with reader.restore_path(uuids[1]):
            assert (first / "weights").stat().st_size == 100_000
        assert (first / "weights").is_file()
    with reader.restore_path(uuids[2]):
        remaining = {path.name for path in (tmp_path / "b").iterdir() if path.is_dir()}
        assert remaining == {uuids[2], "not of the cache"}


def test_progress_is_logged_for_long_transfers_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    now = [0.0]
    progress = TransferProgress("checkpoint x: uploading", 4_000_000_000, clock=lambda: now[0])
    with progress.file() as count_bytes:
        for second in range(1, 21):
            now[0] = float(second)
            count_bytes(100_000_000)
    progress.end()
    assert caplog.messages == [
        "checkpoint x: uploading: 1.0 GB of 4.0 GB (25 %)",
        "checkpoint x: uploading: 2.0 GB of 4.0 GB (50 %)",
        "checkpoint x: uploading: 4.0 GB in 20 s",
    ]
    caplog.clear()
    short = TransferProgress("checkpoint y: uploading", 10, clock=lambda: 0.0)
    with short.file() as count_bytes:
        count_bytes(10)
    short.end()
    assert caplog.messages == []


def test_progress_of_relative_and_absolute_updates() -> None:
    counts: list[int] = []
    callback = _callback(counts.append)
    callback.set_size(100)
    callback.relative_update(30)
    callback.absolute_update(70)  # as adlfs reports
    callback.relative_update(30)
    assert [count for count in counts if count] == [30, 40, 30]
