"""Reports of media: never lost once returned, never a failure of the training."""

import hashlib
import logging
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

import zerolab.core
from tests.client.helpers import closed_port, make_spec
from tests.core.test_context import lines
from tests.waiting import until
from zerolab.contract.media import MediaRecord
from zerolab.contract.messages import Record
from zerolab.contract.spec import ENV_RUN_SPEC, RunSpec, write_run_spec
from zerolab.errors import StorageError
from zerolab.reports.media_files import MediaFiles, MediaItem, MediaUploader, deliver_media
from zerolab.reports.reporter import Reporter
from zerolab.reports.spool import SPOOL_DIR, SpoolReader
from zerolab.storage.media import MediaStore

pytestmark = pytest.mark.needs_extension("media")


def records(run_dir: Path) -> list[MediaRecord]:
    payloads = SpoolReader(run_dir / SPOOL_DIR, ended=True).read(1 << 20)[1]
    all_records = [msgspec.msgpack.decode(payload, type=Record) for payload in payloads]
    return [record for record in all_records if isinstance(record, MediaRecord)]


def test_run_without_server_keeps_media_in_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ENV_RUN_SPEC, raising=False)
    with zerolab.core.init(directory=tmp_path) as context:
        context.train.report_training_metrics(7, {"loss": 0.5})
        context.train.report_image("sample", [[0, 255]], caption="x")
        context.train.report_image("sample", [[0, 255]], 8)
    *_, first, second = lines(tmp_path)
    assert (first["kind"], first["name"], first["steps"]) == ("media", "sample", 7)
    assert first["metadata"] == {"caption": "x", "width": 2, "height": 1}
    assert (second["steps"], second["digest"]) == (8, first["digest"])
    (file,) = (tmp_path / "media").iterdir()  # equal content is stored once
    assert file.name == f"{first['digest']}.png"
    assert hashlib.sha256(file.read_bytes()).hexdigest() == first["digest"]


KILLED = """
import os, signal
import numpy as np
import zerolab.core
with zerolab.core.init() as context:
    for step in range(5):
        context.train.report_image("noise", np.full((4, 4), step), step)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_killed_run_loses_no_reported_media(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, master=closed_port(), token="t")
    write_run_spec(spec, tmp_path / "run.json")
    environment = os.environ | {ENV_RUN_SPEC: str(tmp_path / "run.json")}
    done = subprocess.run([sys.executable, "-c", KILLED], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    deliver_media(tmp_path)
    reported = records(tmp_path)
    assert [record.steps for record in reported] == [0, 1, 2, 3, 4]
    store = MediaStore.of_run(spec)
    for record in reported:
        content = b"".join(store.pieces(record.digest, record.size))
        assert hashlib.sha256(content).hexdigest() == record.digest
    assert not any((tmp_path / "media").iterdir())
    assert deliver_media(tmp_path) == 0


def reporter_of(spec: RunSpec, monkeypatch: pytest.MonkeyPatch) -> Reporter:
    monkeypatch.setattr("zerolab.reports.media_files._INTERVAL_S", 0.01)
    return Reporter(spec)


def test_limit_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("zerolab.reports.reporter.MAX_MEDIA", 2)
    reporter = reporter_of(make_spec(tmp_path), monkeypatch)
    for step in range(5):
        reporter.report_media("text", step, [MediaItem("text", b"%d" % step, ".txt")])
    reporter.close()
    assert len(list((tmp_path / "media").iterdir())) == 2
    (warning,) = caplog.messages
    assert "media: must be at most 2 and 5.0 GB in a trial" in warning


def test_unusable_storage_neither_fails_nor_delays_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    (tmp_path / "checkpoints").write_text("a file where the storage should be")
    spec = make_spec(tmp_path, master=closed_port())
    write_run_spec(spec, tmp_path / "run.json")
    reporter = reporter_of(spec, monkeypatch)
    reporter.report_media("text", 1, [MediaItem("text", b"kept", ".txt")])
    until("the upload fails", lambda: caplog.text, lambda text: "cannot upload media" in text)
    reporter.close(timeout_s=0.1)
    (tmp_path / "checkpoints").unlink()
    with suppress(StorageError):  # the reporter's thread may move the file at this moment
        deliver_media(tmp_path)
    files = (tmp_path / "checkpoints").rglob
    stored = lambda: [path.read_bytes() for path in files("*") if path.is_file()]  # noqa: E731
    until("the medium is stored", stored, lambda contents: b"kept" in contents)


def test_second_report_of_a_step_adds_media(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("zerolab.reports.reporter.MAX_POSITIONS", 3)
    reporter = reporter_of(make_spec(tmp_path), monkeypatch)
    item = MediaItem("text", b"same", ".txt")
    for step, count in ((1, 1), (1, 1), (2, 1), (1, 2), (1, 2)):
        reporter.report_media("text", step, [item] * count)
    reporter.close()
    positions = [(line["steps"], line["position"]) for line in lines(tmp_path)[1:]]
    assert positions == [(1, 0), (1, 1), (2, 0), (1, 0), (1, 1), (1, 2)]
    assert "must be at most 3 at one step, got more" in caplog.text


def test_full_disk_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "media").write_text("no directory")
    reporter = reporter_of(make_spec(tmp_path), monkeypatch)
    reporter.report_media("text", 1, [MediaItem("text", b"lost", ".txt")])
    reporter.close()
    assert "media: cannot be written" in caplog.text


def test_uploader_moves_files_and_ignores_unfinished_ones(tmp_path: Path) -> None:
    directory = tmp_path / "media"
    store = MediaStore.of_run(make_spec(tmp_path))
    files = MediaFiles(directory)
    digest = files.write(MediaItem("text", b"done", ".txt"))
    (directory / "1-1.part").write_bytes(b"half")
    uploader = MediaUploader(directory, store, threading.Event())
    uploader.start()
    assert uploader.finish(timeout_s=30)
    assert [path.name for path in directory.iterdir()] == ["1-1.part"]
    assert b"".join(store.pieces(digest, 4)) == b"done"
    assert files.write(MediaItem("text", b"done", ".txt")) == digest  # not written again
    assert [path.name for path in directory.iterdir()] == ["1-1.part"]


def test_invalid_media_are_discarded_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(ENV_RUN_SPEC, raising=False)
    with zerolab.core.init(directory=tmp_path) as context:
        for step in range(3):
            context.train.report_image("sample", object(), step)
        context.train.report_image("", [[0]], 1)
        context.train.report_training_metrics(1, {"loss": 0.5})
    assert [line["kind"] for line in lines(tmp_path)] == ["header", "metrics"]
    assert [message.split(":")[0] for message in caplog.messages if "discarded" in message] == [
        "image 'sample'", "name",
    ]  # fmt: skip
