"""Files on their way: shared by ranks, spoken of when it takes long, kept at hand, cut off."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError
from s3fs.errors import translate_boto_error

from tests.core.test_socket_ranks import on_ranks
from tests.storage.buckets import S3
from zerolab.core.checkpoint_writer import CheckpointSaver
from zerolab.core.context import CheckpointContext
from zerolab.core.socket_ranks import SocketRanks
from zerolab.errors import ConfigError, StorageError
from zerolab.storage.progress import TransferProgress
from zerolab.storage.store import CheckpointStore, new_uuid


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


class Faulty:
    """The calls to S3 of a store, some of which fail, before S3 gets them or after it has."""

    def __init__(self, store: CheckpointStore, fails: list[tuple[str, str]]) -> None:
        self.sent: list[str] = []
        self._fails = fails
        files = store._bucket.objects._files
        self._call, files.call_s3 = files.call_s3, self.call_s3
        self._put, files.put_file = files.put_file, self.put_file

    def call_s3(self, method: str, **arguments: Any) -> Any:
        name = f"{method} {arguments.get('PartNumber', '')}".strip()
        return self._do(name, lambda: self._call(method, **arguments))

    def put_file(self, *words: Any, **arguments: Any) -> Any:
        return self._do("put_file", lambda: self._put(*words, **arguments))

    def _do(self, name: str, call: Callable[[], Any]) -> Any:
        self.sent.append(name)
        if (name, "before") in self._fails:
            self._fails.remove((name, "before"))
            raise ConnectionError("the line is cut")
        answer = call()
        if (name, "after") in self._fails:
            self._fails.remove((name, "after"))
            raise ConnectionError("the answer is lost")
        return answer


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is large from 6 MB on, and its parts are as small as S3 takes them."""
    monkeypatch.setattr("zerolab.storage.objects.LARGE", 6 * 1024**2)
    monkeypatch.setattr("zerolab.storage.parts._PART", 5 * 1024**2)
    monkeypatch.setattr("zerolab.storage.objects._PAUSES_S", (0.0, 0.0, 0.0))


def bring_up(
    s3: S3, bucket: str, directory: Path, content: bytes, fails: list[tuple[str, str]]
) -> tuple[CheckpointStore, str, list[str]]:
    """Save a checkpoint of one file over a faulty line; return what was sent on the way."""
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
    found: list[Any] = client.list_multipart_uploads(Bucket=bucket).get("Uploads", [])
    client.close()
    return found


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize(
    ("fails", "parts"),
    [
        ([], [1, 1, 1]),
        ([("upload_part 2", "before")] * 2, [1, 3, 1]),
        ([("upload_part 2", "before"), ("upload_part 3", "before")], [1, 2, 2]),
        ([("complete_multipart_upload", "before")], [1, 1, 1]),
        ([("complete_multipart_upload", "after")], [1, 1, 1]),
    ],
    ids=["undisturbed", "one part twice", "two parts", "the end", "the answer to the end"],
)
def test_an_upload_in_parts_goes_on_with_those_that_are_missing(
    s3_server: S3, tmp_path: Path, fails: list[tuple[str, str]], parts: list[int]
) -> None:
    bucket, content = s3_server.bucket(), os.urandom(11 * 1024**2)
    _, name, sent = bring_up(s3_server, bucket, tmp_path / "a", content, fails)
    assert [sent.count(f"upload_part {number}") for number in (1, 2, 3)] == parts
    assert sent.count("create_multipart_upload") == 1
    assert unfinished(s3_server, bucket) == []
    with stores(s3_server, bucket, tmp_path / "b").restore_path(name) as path:
        assert (path / "weights").read_bytes() == content


@pytest.mark.usefixtures("small_parts")
def test_parts_that_s3_has_forgotten_are_sent_again(s3_server: S3, tmp_path: Path) -> None:
    bucket, content = s3_server.bucket(), os.urandom(6 * 1024**2)
    store = stores(s3_server, bucket, tmp_path / "a")
    faulty = Faulty(store, [])
    name = new_uuid()
    (store.begin(name) / "weights").write_bytes(content)
    call = faulty._call

    def forgetful(method: str, **arguments: Any) -> Any:
        if arguments.get("PartNumber") == 2 and faulty.sent.count("upload_part 2") == 1:
            # What S3 answers of an upload that it has forgotten; moto answers 500.
            said = {"Error": {"Code": "NoSuchUpload", "Message": "The upload does not exist"}}
            error = ClientError(said, "UploadPart")  # type: ignore[arg-type]
            raise translate_boto_error(error) from error
        return call(method, **arguments)

    faulty._call = forgetful
    store.commit(name, 1, {})
    assert faulty.sent.count("create_multipart_upload") == 2
    with stores(s3_server, bucket, tmp_path / "b").restore_path(name) as path:
        assert (path / "weights").read_bytes() == content


@pytest.mark.usefixtures("small_parts")
def test_an_upload_that_is_given_up_leaves_no_parts(s3_server: S3, tmp_path: Path) -> None:
    bucket = s3_server.bucket()
    store = stores(s3_server, bucket, tmp_path / "a")
    Faulty(store, [("upload_part 2", "before")] * 4)
    name = new_uuid()
    (store.begin(name) / "weights").write_bytes(bytes(6 * 1024**2))
    store.announce(name)
    with pytest.raises(StorageError, match="the line is cut"):
        store.upload(name, ["weights"])
    assert unfinished(s3_server, bucket) == []
    store.abort(name)
    assert s3_server.keys(bucket) == []


@pytest.mark.usefixtures("small_parts")
def test_a_file_of_which_only_the_answer_was_lost_is_not_sent_again(
    s3_server: S3, tmp_path: Path
) -> None:
    bucket = s3_server.bucket()
    fails = [("put_file", "after")]
    _, name, sent = bring_up(s3_server, bucket, tmp_path / "a", b"w" * 1000, fails)
    assert sent.count("put_file") == 1
    with stores(s3_server, bucket, tmp_path / "b").restore_path(name) as path:
        assert (path / "weights").read_bytes() == b"w" * 1000
    sent = bring_up(s3_server, bucket, tmp_path / "c", b"w", [("put_file", "before")])[2]
    assert sent.count("put_file") == 2


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
    progress = TransferProgress("checkpoint x: uploading", 4_000_000_000, clock=lambda: now[0])
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
    short = TransferProgress("checkpoint y: uploading", 10, clock=lambda: 0.0)
    with short.file() as told:
        told(10)
    short.end()
    assert caplog.messages == []
