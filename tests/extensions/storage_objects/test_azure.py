"""Checkpoints in Azure's Blob Storage, on Azurite: a real server with real credentials."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.extensions.storage_objects.test_gcs import begin_with_weights_of
from tests.server.helpers import Server
from tests.waiting import free_port, until
from zerolab.config.experiment.storage import read_address
from zerolab.errors import StorageError
from zerolab.storage.store import CheckpointStore, new_uuid

ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Azurite's own, which everybody knows."""


def azure(**more: Any) -> dict[str, Any]:
    return {"type": "azure", "container": "models", **more}


def connection(url: str) -> str:
    return f"BlobEndpoint={url};AccountName={ACCOUNT};AccountKey={KEY}"


@pytest.fixture(scope="module")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of an account with a container ``models``."""
    pytest.importorskip("adlfs", reason="needs the extra azure: pip install 'zerolab[azure]'")
    from azure.storage.blob import BlobServiceClient

    command = shutil.which("azurite-blob")
    if command is None:
        pytest.skip("needs azurite-blob in PATH: npm install --global azurite")
    port, directory = free_port(), tmp_path_factory.mktemp("azurite")
    url = f"http://127.0.0.1:{port}/{ACCOUNT}"
    arguments = [command, "--blobPort", str(port), "--location", str(directory), "--silent"]
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [*arguments, "--skipApiVersionCheck"], stdout=log, stderr=log, stdin=subprocess.DEVNULL
        )

    def answers() -> bool:
        try:
            return httpx.get(url).status_code < 500
        except httpx.TransportError:
            return False

    try:
        until("Azurite answers", answers)
        with BlobServiceClient.from_connection_string(connection(url)) as service:
            service.create_container("models")
        yield url
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("form", ["connection_string", "account_url"])
def test_azure_checkpoint_save_restore_delete(azurite: str, tmp_path: Path, form: str) -> None:
    block = azure(account_url=azurite, credential=KEY)
    if form == "connection_string":
        block = azure(connection_string=connection(azurite))
    address = read_address(block)
    assert address is not None
    store = CheckpointStore(address, local=tmp_path / "cache")
    store.probe()
    name = new_uuid()
    (store.begin(name) / "model0").mkdir()
    (store.begin(name) / "model0" / "weights").write_bytes(b"w" * 100_000)
    (store.begin(name) / "empty").touch()
    store.commit(name, 7, {"steps_completed": 7})
    elsewhere = CheckpointStore(address, local=tmp_path / "elsewhere")
    assert [stored.steps_completed for stored in elsewhere.list()] == [7]
    with elsewhere.restore_path(name) as path:
        assert (path / "model0" / "weights").read_bytes() == b"w" * 100_000
        assert (path / "empty").read_bytes() == b""
    elsewhere.remove_files(name, ["model0/weights"])
    assert elsewhere.describe(name).resources == {"empty": 0}
    elsewhere.delete(name)
    begun = new_uuid()
    (store.begin(begun) / "half").write_bytes(b"x")
    store.announce(begun)
    store.upload(begun, ["half"])
    store.sweep()
    assert elsewhere._bucket.names() == []


def test_warm_start_from_azure_weights(azurite: str, server: Server, tmp_path: Path) -> None:
    begin_with_weights_of(server, azure(account_url=azurite, credential=KEY), tmp_path)


def test_azure_errors_are_reported(azurite: str, tmp_path: Path) -> None:
    for block, expected in (
        (azure(container="nowhere", account_url=azurite, credential=KEY), "no container 'nowhere'"),
        (azure(account_url=azurite, credential="d3Jvbmc="), "access is refused"),
    ):
        address = read_address(block)
        assert address is not None
        with pytest.raises(StorageError, match=expected):
            CheckpointStore(address, local=tmp_path).probe()


def test_invalid_connection_string_fails_submission(server: Server) -> None:
    pytest.importorskip("adlfs", reason="needs the extra azure: pip install 'zerolab[azure]'")
    response = server.try_submit(checkpoint_storage=azure(connection_string="secret-garbage"))
    assert response.status_code == 422, response.text
    (problem,) = response.json()["error"]["problems"]
    assert "az://models: cannot be opened: " in problem
    assert problem.endswith(
        "set checkpoint_storage.connection_string, or account_url and credential"
    )
    assert "garbage" not in problem
