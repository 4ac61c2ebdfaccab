"""Media in a directory and in an object store: stored, read, deleted."""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from zerolab.contract.storage import StorageAddress
from zerolab.errors import ConfigError, NotFoundError
from zerolab.storage.media import MediaStore

if TYPE_CHECKING:
    from tests.extensions.storage_objects.buckets import S3

CONTENTS = (b"first", b"second", b"x" * 3_000_000)
DIGESTS = [hashlib.sha256(content).hexdigest() for content in CONTENTS]


@pytest.fixture(params=["directory", pytest.param("s3", marks=pytest.mark.needs_extension("s3"))])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> StorageAddress:
    """A storage of each kind."""
    if request.param == "directory":
        return StorageAddress(root=str(tmp_path / "checkpoints"))
    s3: S3 = request.getfixturevalue("s3_server")
    return s3.address(s3.bucket())


def content(store: MediaStore, number: int) -> bytes:
    return b"".join(store.pieces(DIGESTS[number], len(CONTENTS[number])))


def test_media_are_stored_and_deleted_by_trial(address: StorageAddress, tmp_path: Path) -> None:
    store, other = MediaStore(address, "trial-1"), MediaStore(address, "trial-10")
    for owner in (store, other):
        for bytes_, digest in zip(CONTENTS, DIGESTS, strict=True):
            source = tmp_path / "source"
            source.write_bytes(bytes_)
            owner.put(source, digest)
            assert not source.exists()
    assert [content(store, number) for number in range(3)] == list(CONTENTS)
    store.remove([DIGESTS[0], "0" * 64])
    with pytest.raises(NotFoundError, match="its run uploads it soon"):
        content(store, 0)
    assert content(store, 1) == CONTENTS[1]
    store.remove_all()
    store.remove_all()
    for number in range(3):
        with pytest.raises(NotFoundError):
            content(store, number)
        assert content(other, number) == CONTENTS[number]


def test_digest_from_outside_is_no_path(tmp_path: Path) -> None:
    store = MediaStore(StorageAddress(root=str(tmp_path)), "trial-1")
    with pytest.raises(ConfigError, match="digest: must be a SHA-256"):
        b"".join(store.pieces("../../token", 10))
