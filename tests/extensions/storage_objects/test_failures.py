"""Object stores that fail: one clear message each, and never a half of a checkpoint."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from threading import enumerate as enumerate_threads
from typing import Any

import msgspec
import pytest

import zerotrial
from tests.client.helpers import make_spec as core_spec
from tests.extensions.storage_objects.buckets import S3
from tests.server.helpers import PLAYED, Server, serve
from tests.trial.helpers import LineTrial, fit, make_settings, make_spec
from tests.waiting import free_port, until
from zerolab.contract.outcome import read_reason
from zerolab.contract.spec import ENV_RUN_SPEC, EXIT_INFRASTRUCTURE, write_run_spec
from zerolab.contract.storage import StorageAddress
from zerolab.core import init
from zerolab.errors import ConfigError, NotFoundError, StorageError
from zerolab.storage.objects import StorageRefusedError
from zerolab.storage.store import CheckpointStore, new_uuid
from zerotrial.loop.stop_reason import StopReason


def problems(server: Server, storage: dict[str, Any]) -> list[str]:
    response = server.try_submit(checkpoint_storage=storage)
    assert response.status_code == 422, response.text
    listed: list[str] = response.json()["error"]["problems"]
    assert server.get("/experiments")["experiments"] == []
    return listed


def test_missing_bucket_fails_submission(server: Server, s3_server: S3) -> None:
    (problem,) = problems(server, s3_server.block("no-such-bucket"))
    assert problem == (
        "checkpoint_storage: checkpoint storage s3://no-such-bucket/team/checkpoints: there is no "
        f"bucket 'no-such-bucket' at {s3_server.url}; create it, or fix checkpoint_storage.bucket"
    )


def test_wrong_credentials_fail_submission(server: Server, s3_server: S3) -> None:
    bucket = s3_server.bucket()
    wrong = s3_server.block(bucket, secret_key="not-the-right-secret")
    (problem,) = problems(server, wrong)
    assert f"s3://{bucket}/team/checkpoints: access is refused" in problem
    assert "set checkpoint_storage.access_key and secret_key" in problem
    assert "not-the-right-secret" not in problem
    unknown = s3_server.block(bucket, access_key="AKIAUNKNOWN")
    assert "access is refused" in problems(server, unknown)[0]


def test_missing_package_is_reported(
    server: Server, s3_server: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = s3_server.block(s3_server.bucket())
    monkeypatch.setitem(sys.modules, "s3fs", None)
    (problem,) = problems(server, storage)
    assert "needs the package s3fs, which is not installed here" in problem
    assert "pip install 'zerolab[s3]'" in problem
    with pytest.raises(ConfigError, match=r"pip install 'zerolab\[s3\]'"):
        init(checkpoint_storage="s3://bucket/prefix")


@pytest.mark.slow
def test_unreachable_store_is_retried(server: Server) -> None:
    storage = {
        "type": "s3",
        "bucket": "b",
        "endpoint_url": f"http://127.0.0.1:{free_port()}",
        "access_key": "somebody",
        "secret_key": "something",
    }
    response = server.try_submit(checkpoint_storage=storage).json()
    assert response["experiment"]["state"] == "ACTIVE"
    (warning,) = response["warnings"]
    assert f"nothing answers at {storage['endpoint_url']}" in warning
    options = {key: storage[key] for key in ("endpoint_url", "access_key", "secret_key")}
    store = CheckpointStore(StorageAddress(root="s3://b", options=options))
    with pytest.raises(StorageError, match="nothing answers at http://127") as raised:
        store.probe_bucket()
    assert not isinstance(raised.value, StorageRefusedError)


def test_unresponsive_store_fails_submission_quickly(
    tmp_path: Path,
) -> None:
    timings = msgspec.structs.replace(PLAYED, storage_check_s=0.05)
    with serve(tmp_path, timings=timings) as server:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            storage = {
                "type": "s3",
                "bucket": "b",
                "endpoint_url": f"http://127.0.0.1:{silent.getsockname()[1]}",
                "access_key": "somebody",
                "secret_key": "not-for-others",
            }
            response = server.try_submit(checkpoint_storage=storage)
            assert response.status_code == 201, response.text
            fork = server.post("/experiments/1/fork")
        for body in (response.json(), fork):
            (warning,) = body["warnings"]
            assert "checkpoint storage s3://b: no response within 0.05 s; check" in warning
            assert warning.endswith("is submitted, and its trials wait for the storage")
            assert "not-for-others" not in warning
        assert server.get("/experiments/1")["warnings"] == []
    # Closing the socket ends the library's retries before the next test.
    until(
        "the check ends",
        lambda: all(thread.name != "storage check" for thread in enumerate_threads()),
    )


SCRIPT = """
import sys, time
from pathlib import Path
import zerolab.core
with zerolab.core.init() as context:
    for step in (1, 2):
        with context.checkpoint.store_path({"steps_completed": step}) as (path, _):
            (path / "weights").write_bytes(bytes(step * 100_000))
            while step == 2 and not Path(sys.argv[1]).exists():
                time.sleep(0.05)
        print("stored", step, flush=True)
"""


@pytest.mark.slow
def test_store_outage_during_save_is_infrastructure_failure(own_s3: S3, tmp_path: Path) -> None:
    bucket = own_s3.bucket()
    address = own_s3.address(bucket)
    spec = core_spec(
        tmp_path,
        checkpoint_dir=address.root,
        storage_options=address.options,
        checkpoint_cache=str(tmp_path / "cache"),
    )
    write_run_spec(spec, tmp_path / "run.json")
    script = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "go")],
        env=os.environ | {ENV_RUN_SPEC: str(tmp_path / "run.json")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert script.stdout is not None
    assert script.stdout.readline() == "stored 1\n"
    (first,) = CheckpointStore(address).list()
    assert first.resources == {"weights": 100_000}
    own_s3.stop()
    (tmp_path / "go").touch()
    _, errors = script.communicate()
    assert script.returncode == EXIT_INFRASTRUCTURE, errors
    reason = read_reason(tmp_path)
    assert reason is not None
    assert f"nothing answers at {own_s3.url}" in str(reason.reason)
    assert own_s3.secret not in errors
    assert list((tmp_path / "cache").glob(".partial*")) == []


def test_sweep_removes_own_dead_upload(s3_server: S3, tmp_path: Path) -> None:
    bucket = s3_server.bucket()
    address = s3_server.address(bucket)
    for owner in ("trial-3", "trial-33"):
        dying = CheckpointStore(address, owner=owner, local=tmp_path / owner)
        name = new_uuid()
        (dying.begin(name) / "half").write_bytes(bytes(1000))
        dying.announce(name)
        dying.upload(name, ["half"])
    client = s3_server.client()
    key = f"team/checkpoints/{name}/large"
    client.create_multipart_upload(Bucket=bucket, Key=key)
    assert len(s3_server.keys(bucket)) == 4
    CheckpointStore(address, owner="trial-3", local=tmp_path / "trial-3").sweep()
    assert len(s3_server.keys(bucket)) == 2
    assert all("trial-33" in key or name in key for key in s3_server.keys(bucket))
    CheckpointStore(address, owner="trial-33", local=tmp_path / "trial-33").sweep()
    assert s3_server.keys(bucket) == []
    assert client.list_multipart_uploads(Bucket=bucket).get("Uploads", []) == []
    client.close()


def test_file_with_wrong_content_is_not_restored(s3_server: S3, tmp_path: Path) -> None:
    bucket = s3_server.bucket()
    store = CheckpointStore(s3_server.address(bucket), local=tmp_path / "a")
    name = new_uuid()
    (store.begin(name) / "weights").write_bytes(b"right" * 1000)
    store.commit(name, 1, {})
    client = s3_server.client()
    key = f"team/checkpoints/{name}/weights"
    client.put_object(Bucket=bucket, Key=key, Body=b"wrong" * 1000)
    elsewhere = CheckpointStore(s3_server.address(bucket), local=tmp_path / "b")
    with (
        pytest.raises(NotFoundError, match="weights is damaged"),
        elsewhere.restore_path(name),
    ):
        pass
    client.put_object(Bucket=bucket, Key=key, Body=b"right" * 999)
    with pytest.raises(NotFoundError, match="shorter"), elsewhere.restore_path(name):
        pass
    client.put_object(Bucket=bucket, Key=key, Body=b"right" * 1000)
    with elsewhere.restore_path(name) as path:
        assert (path / "weights").read_bytes() == b"right" * 1000
    client.close()


@pytest.mark.slow
def test_training_continues_during_background_upload(own_s3: S3, tmp_path: Path) -> None:
    address = own_s3.address(own_s3.bucket())
    assert own_s3.process is not None
    pid = own_s3.process.pid

    class Blocked(LineTrial):
        """Its store answers nothing from before a save until 100 more batches are trained."""

        def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Any:
            if batch_idx == 149:
                os.kill(pid, signal.SIGSTOP)
            if batch_idx == 250:
                os.kill(pid, signal.SIGCONT)
            return super().train_batch(dataloader_iter, epoch_idx, batch_idx)

    spec = make_spec(
        tmp_path,
        {"stage": 1, "background": True},
        checkpoint_dir=address.root,
        storage_options=address.options,
        checkpoint_cache=str(tmp_path / "cache"),
    )
    period = zerotrial.Batch(150)
    settings = make_settings(290, checkpoint_period=period, checkpoint_policy="none")
    ending, _ = fit(spec, Blocked, settings)
    assert ending is StopReason.FINISHED
    checkpoints = CheckpointStore(address).list()
    assert [stored.steps_completed for stored in checkpoints] == [150, 290]
