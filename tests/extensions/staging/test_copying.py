"""Staged copies: atomic, copied once, verified, with one-sentence errors."""

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.disks import mounted
from tests.extensions.storage_objects.buckets import S3
from zerolab.config import load_experiment
from zerolab.errors import ConfigError, StorageError
from zerolab.extensions.staging.copying import StagedCopy, StoppedError, Watch
from zerolab.extensions.staging.source import DataRefusedError, Source, SourceFile, open_source


def stage(address: str | Path, to: Path, source: Source | None = None, stop: bool = False) -> str:
    """Stage as a short run does; return its log."""
    lines: list[str] = []
    watch = Watch(lines.append, lambda _: None, lambda: stop, every_s=0.0)
    copy = StagedCopy(to)
    with copy.open_use() as use:
        copy.bring(str(address), source or open_source(str(address)), use.fileno(), watch)
    return "\n".join(lines)


def tree(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "train.bin").write_bytes(os.urandom(100_000))
    (folder / "deep" / "er" / "empty").touch()
    (folder / "deep" / "x.half").write_text("half")
    (folder / "deep" / "x").symlink_to(folder / "train.bin")
    return folder


def test_only_changed_files_are_copied_again(source: Path, tmp_path: Path) -> None:
    to = tmp_path / "node" / "data"
    log = stage(source, to)
    assert tree(to) == tree(source)
    assert "200.0 kB (100 %)" in log, log
    inode = (to / "train.bin").stat().st_ino

    assert "holds a copy" in stage(source, to)
    (source / "deep" / "x.half").write_text("another half")
    (source / "deep" / "er" / "empty").unlink()
    log = stage(source, to)
    assert "is copied" in log, log
    assert "12 B of 12 B" in log, log
    assert tree(to) == tree(source)
    assert (to / "train.bin").stat().st_ino == inode

    (to / "train.bin").write_bytes(b"damaged")  # and a copy that is no longer one is mended
    stage(source, to)
    assert tree(to) == tree(source)
    StagedCopy(to).remove()
    assert not to.exists()


def test_single_file_keeps_its_name(source: Path, tmp_path: Path) -> None:
    stage(f"file://{source}/train.bin", tmp_path / "copy")
    assert list(tree(tmp_path / "copy")) == ["train.bin"]


class Broken:
    """Fails in the middle of its second file, or stops there."""

    def __init__(self, source: Path, error: Exception) -> None:
        self.whole = open_source(str(source))
        self.error = error

    def listing(self) -> dict[str, SourceFile]:
        return self.whole.listing()

    def pieces(self, name: str, size: int) -> Iterator[bytes]:
        if name == "train.bin":
            yield b"only so much"
            raise self.error
        yield from self.whole.pieces(name, size)


@pytest.mark.parametrize("error", [StorageError("nothing answers"), StoppedError()])
def test_interrupted_copy_resumes(source: Path, tmp_path: Path, error: Exception) -> None:
    to = tmp_path / "copy"
    with pytest.raises(type(error)):
        stage(source, to, Broken(source, error))
    assert not to.exists()
    stage(source, to)
    assert tree(to) == tree(source)


def test_source_changed_during_copy_is_error(source: Path, tmp_path: Path) -> None:
    class Changing(Broken):
        def pieces(self, name: str, size: int) -> Iterator[bytes]:
            yield from self.whole.pieces(name, size)
            (source / "deep" / "later").touch()

    with pytest.raises(StorageError, match="has changed while it was copied"):
        stage(source, tmp_path / "copy", Changing(source, StoppedError()))
    assert not (tmp_path / "copy").exists()


def test_concurrent_copies_run_once(source: Path, tmp_path: Path) -> None:
    to, requested, go = tmp_path / "copy", threading.Event(), threading.Event()

    class Slow(Broken):
        def pieces(self, name: str, size: int) -> Iterator[bytes]:
            requested.set()
            go.wait()
            return self.whole.pieces(name, size)

    messages: list[str] = []
    first = threading.Thread(
        target=lambda: messages.append(stage(source, to, Slow(source, StoppedError())))
    )
    first.start()
    requested.wait()
    waiting = Watch(lambda _: go.set(), lambda _: None, lambda: False)
    copy, second = StagedCopy(to), Broken(source, AssertionError("copied twice"))
    with copy.open_use() as use:
        copy.bring(str(source), second, use.fileno(), waiting)
    first.join()
    assert "is copied" in messages[0]
    assert tree(to) == tree(source)


def test_copy_in_use_is_shared_and_not_replaced(source: Path, tmp_path: Path) -> None:
    to = tmp_path / "copy"
    stage(source, to)
    copy = StagedCopy(to)
    quiet = Watch(lambda _: None, lambda _: None, lambda: False)
    with copy.open_use() as use:
        copy.bring(str(source), open_source(str(source)), use.fileno(), quiet)
        assert "already" in stage(source, to)
        (source / "more").touch()
        with pytest.raises(DataRefusedError, match="another trial reads it"):
            stage(source, to)
        StagedCopy(to).remove()
        assert "more" not in tree(to)
        assert "train.bin" in tree(to)
    stage(source, to)
    assert "more" in tree(to)


def test_errors_name_key_and_path(source: Path, tmp_path: Path) -> None:
    def refused(address: str, to: Path = tmp_path / "copy") -> str:
        with pytest.raises((DataRefusedError, StorageError)) as error:
            stage(address, to)
        assert not (tmp_path / "copy").exists()
        return str(error.value)

    assert f"data.stage.from: there is no {tmp_path}/none" in refused(f"{tmp_path}/none")
    assert "neither a file nor a folder" in refused("/dev/null")
    assert "train.bin cannot be read: Permission denied" in as_nobody(source, tmp_path)
    (source / "round").symlink_to(source)
    assert "leads back" in refused(str(source))
    (source / "round").unlink()
    (source / "gone").symlink_to("nowhere")
    assert "there is no" in refused(str(source))
    (source / "gone").unlink()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").touch()
    assert "holds something else" in refused(str(source), tmp_path / "mine")
    assert "holds something else" in refused(str(source), tmp_path / "mine" / "notes")
    assert (tmp_path / "mine" / "notes").exists()
    assert "nothing at memory://empty" in refused("memory://empty")
    (tmp_path / "hollow" / "folder").mkdir(parents=True)
    assert f"there is no file in {tmp_path}/hollow" in refused(f"{tmp_path}/hollow")
    (tmp_path / "hollow" / "b\udcff").touch()
    assert "hollow/b\\udcff' has a name that is no UTF-8" in refused(f"{tmp_path}/hollow")
    assert "cannot be opened" in refused("strange://place")


def test_emptied_source_keeps_the_copy(source: Path, tmp_path: Path) -> None:
    """As the mount point of a share that was unmounted."""
    copy = tmp_path / "copy"
    stage(source, copy)
    before = tree(copy)
    source.rename(tmp_path / "elsewhere")
    source.mkdir()
    with pytest.raises(DataRefusedError, match="there is no file in"):
        stage(source, copy)
    assert tree(copy) == before


def as_nobody(source: Path, tmp_path: Path) -> str:
    """Return the error for a user without read permission."""
    (source / "train.bin").chmod(0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        with pytest.raises(DataRefusedError) as error:
            list(open_source(str(source)).pieces("train.bin", 1))
    finally:
        if user == 0:
            os.seteuid(0)
        (source / "train.bin").chmod(0o600)
    return str(error.value)


def test_full_disk_before_and_during_copy(source: Path, tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "400k") as disk:
        (disk / "filler").write_bytes(bytes(250_000))
        with pytest.raises(StorageError, match=r"is full: .* are free, but 200\.0 kB"):
            stage(source, disk / "copy")
        (source / "large").write_bytes(bytes(500_000))
        with pytest.raises(DataRefusedError, match="do not fit on the disk"):
            stage(source, disk / "copy")
        (source / "large").unlink()

        class Growing(Broken):
            def listing(self) -> dict[str, SourceFile]:
                return {**self.whole.listing(), "train.bin": SourceFile(1, "", None)}

            def pieces(self, name: str, size: int) -> Iterator[bytes]:
                yield from [bytes(100_000)] * 5

        with pytest.raises(StorageError, match=r"the disk of .*/copy is full; free some"):
            stage(source, disk / "copy", Growing(source, StoppedError()))
        assert not (disk / "copy").exists()
        (disk / "filler").unlink()
        stage(source, disk / "copy")
        assert tree(disk / "copy") == tree(source)


@dataclass
class Store:
    """Object store with modification times in whole seconds."""

    content: bytes

    def listing(self) -> dict[str, SourceFile]:
        return {"one": SourceFile(1, self.content.hex(), 1_700_000_000_000_000_000)}

    def pieces(self, name: str, size: int) -> Iterator[bytes]:
        assert (name, size) == ("one", 1)
        yield self.content


def test_two_changes_in_one_second_are_noticed(tmp_path: Path) -> None:
    to = tmp_path / "copy"
    for content in (b"1", b"2"):
        stage("s3://bucket/set", to, Store(content))
        assert tree(to) == {"one": content}
    assert "already" in stage("s3://bucket/set", to, Store(b"2"))


def test_bucket_objects_are_identified_by_hash(
    s3_server: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket, client = s3_server.bucket(), s3_server.client()
    client.put_object(Bucket=bucket, Key="set/a/one", Body=b"1" * 1000)
    client.put_object(Bucket=bucket, Key="set/two", Body=b"2")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_server.key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_server.secret)
    url, to = f"s3://{bucket}/set", tmp_path / "copy"
    assert "1.0 kB" in stage(url, to)
    assert tree(to) == {"a/one": b"1" * 1000, "two": b"2"}
    assert "already" in stage(url, to)
    client.put_object(Bucket=bucket, Key="set/two", Body=b"3")
    stage(url, to)
    assert tree(to)["two"] == b"3"
    stage(f"{url}/two", tmp_path / "single")
    assert tree(tmp_path / "single") == {"two": b"3"}
    with pytest.raises(DataRefusedError, match="nothing at"):
        stage(f"s3://{bucket}/none", tmp_path / "none")
    with pytest.raises(DataRefusedError, match=r"there is no bucket 'none'.*fix data.stage.from"):
        stage("s3://none/set", tmp_path / "none")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(DataRefusedError, match="access is refused"):
        stage(url, to)
    client.close()


def test_all_problems_of_the_block_are_reported() -> None:
    def problems(block: object) -> list[str]:
        searcher = {"name": "single", "metric": "loss"}
        with pytest.raises(ConfigError) as error:
            load_experiment(
                {"entrypoint": "python a.py", "searcher": searcher, "data": {"stage": block}}
            )
        return error.value.problems

    assert problems("train") == [
        "data.stage: must be a mapping {from, to, once_per} of data to copy to the machine, got "
        "'train'; give a value of your own another name"
    ]
    assert [line.split(": ")[0] for line in problems({"form": "/a", "to": "b", "once_per": 1})] == [
        "data.stage.form", "data.stage.once_per", "data.stage.to",
    ]  # fmt: skip
    assert "'from'" in problems({"form": "/a", "to": "/b"})[0]
    assert "outside of data.stage.from" in problems({"from": "/a", "to": "/a/b"})[0]
