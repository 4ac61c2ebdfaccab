"""Addresses from ``checkpoint_storage`` blocks, and the secrecy of their options."""

from typing import Any

import pytest

from tests.server.helpers import experiment_config
from zerolab.config import load_experiment
from zerolab.config.experiment.storage import address_of, read_address
from zerolab.contract.secrets import mask_secrets
from zerolab.contract.storage import StorageAddress
from zerolab.errors import ConfigError, is_storage_failure
from zerolab.extensions.storage_objects.faults import storage_error

S3 = {"type": "s3", "bucket": "b", "prefix": "/a/b/", "endpoint_url": "http://127.0.0.1:9"}
KEYS = {"access_key": "AKIA-of-mine", "secret_key": "hush-hush-hush"}
AZURE = "DefaultEndpointsProtocol=http;AccountName=me;AccountKey=bm90aGluZyBvZiBpbnRlcmVzdA==;"


@pytest.mark.parametrize(
    ("block", "root", "options"),
    [
        ({"type": "shared_fs", "host_path": "/m", "storage_path": "x"}, "/m/x", {}),
        ({"type": "directory", "container_path": "/m"}, "/m", {}),
        (S3 | KEYS, "s3://b/a/b", {"endpoint_url": "http://127.0.0.1:9"} | KEYS),
        ({"type": "s3", "bucket": "b"}, "s3://b", {}),
        ({"type": "gcs", "bucket": "b", "prefix": "p"}, "gs://b/p", {}),
        (
            {"type": "azure", "container": "c", "connection_string": AZURE},
            "az://c",
            {"connection_string": AZURE},
        ),
    ],
)
def test_determined_block_to_address(
    block: dict[str, Any], root: str, options: dict[str, str]
) -> None:
    config = load_experiment(experiment_config(checkpoint_storage=block))
    assert address_of(config.checkpoint_storage) == StorageAddress(root=root, options=options)
    assert read_address(block) == StorageAddress(root=root, options=options)


def test_invalid_secret_is_not_shown() -> None:
    with pytest.raises(ConfigError, match="put it into quotes") as raised:
        read_address(S3 | {"access_key": "AKIA-of-mine", "secret_key": 1234567890})
    assert "1234567890" not in str(raised.value)


def test_all_problems_are_reported() -> None:
    with pytest.raises(ConfigError) as raised:
        read_address({"type": "s3", "prefix": "..", "contaner": "c"})
    assert len(raised.value.problems) == 3


def test_errors_and_repr_hide_secrets() -> None:
    address = StorageAddress(root="az://c", options={"connection_string": AZURE} | KEYS)
    error = RuntimeError("refused: AccountKey=bm90aGluZyBvZiBpbnRlcmVzdA==; hush-hush-hush")
    failure = storage_error(address, error, "cannot be written")
    assert is_storage_failure(failure)
    for text in (str(failure), repr(address), str(address), f"{[address]}"):
        assert "bm90aGluZyBv" not in text
        assert "hush" not in text


def test_only_secrets_are_hidden() -> None:
    config = experiment_config(checkpoint_storage=S3 | KEYS)
    shown = mask_secrets(config)
    assert shown["checkpoint_storage"] == S3 | dict.fromkeys(KEYS, "********")
    assert config["checkpoint_storage"] == S3 | KEYS
    assert mask_secrets({"name": "x"}) == {"name": "x"}
