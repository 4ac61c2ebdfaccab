"""Checkpoints in Google Cloud Storage, on an emulator: a real server, without credentials."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from gcp_storage_emulator.server import create_server

from tests.server.helpers import Server, checkpoint, validation
from tests.waiting import free_port
from zerolab.config.experiment.storage import read_address
from zerolab.errors import StorageError
from zerolab.storage.store import CheckpointStore, new_uuid


@pytest.fixture
def emulator(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    port = free_port()
    server = create_server("127.0.0.1", port, in_memory=True, default_bucket="models")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
    server.start()
    yield f"http://127.0.0.1:{port}"
    server.stop()


def test_gcs_checkpoint_save_restore_delete(emulator: str, tmp_path: Path) -> None:
    address = read_address({"type": "gcs", "bucket": "models", "prefix": "team"})
    assert address is not None
    store = CheckpointStore(address, local=tmp_path / "cache")
    store.probe()
    name = new_uuid()
    (store.begin(name) / "model0").mkdir()
    (store.begin(name) / "model0" / "weights").write_bytes(b"w" * 100_000)
    store.commit(name, 7, {"steps_completed": 7})
    elsewhere = CheckpointStore(address, local=tmp_path / "elsewhere")
    assert [stored.steps_completed for stored in elsewhere.list()] == [7]
    with elsewhere.restore_path(name) as path:
        assert (path / "model0" / "weights").read_bytes() == b"w" * 100_000
    elsewhere.remove_files(name, ["model0/weights"])
    assert elsewhere.describe(name).resources == {}
    elsewhere.delete(name)
    assert elsewhere.list() == []
    begun = new_uuid()
    (store.begin(begun) / "half").write_bytes(b"x")
    store.announce(begun)
    store.upload(begun, ["half"])
    store.sweep()
    assert elsewhere.list() == []


def test_warm_start_from_gcs_weights(emulator: str, server: Server, tmp_path: Path) -> None:
    begin_with_weights_of(server, {"type": "gcs", "bucket": "models", "prefix": "team"}, tmp_path)


def begin_with_weights_of(server: Server, storage: dict[str, Any], tmp_path: Path) -> None:
    """Save a checkpoint there, and have a trial begin with it that saves on this machine."""
    server.submit(checkpoint_storage=storage)
    server.add_agent()
    first = server.begin()
    store, record = CheckpointStore.of_run(first), checkpoint(7, "of trial 1")
    (store.begin(record.uuid) / "weights").write_bytes(b"w" * 100_000)
    store.commit(record.uuid, 7, {"steps_completed": 7})
    server.report(first.run_id, validation(7, 0.5), record)
    server.exit(first.run_id, 0)
    searcher = {"name": "single", "metric": "loss", "max_length": 100, "source_trial_id": 1}
    server.submit(searcher=searcher)
    spec = msgspec.structs.replace(server.begin(2), checkpoint_cache=str(tmp_path / "cache"))
    source = spec.latest_checkpoint
    assert source is not None
    assert (source.uuid, source.steps_completed, source.warm_start) == (record.uuid, 0, True)
    trial_store = CheckpointStore.of_run(spec)
    assert not trial_store.is_remote
    with trial_store.elsewhere(source.storage).restore_path(source.uuid) as path:
        assert (path / "weights").read_bytes() == b"w" * 100_000


def test_missing_gcs_bucket_is_reported(emulator: str, tmp_path: Path) -> None:
    address = read_address({"type": "gcs", "bucket": "nowhere"})
    assert address is not None
    with pytest.raises(StorageError, match="gs://nowhere"):
        CheckpointStore(address, local=tmp_path).probe()
