from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.extensions.storage_objects.buckets import S3, serve_s3
from tests.storage.conftest import s3_server, server

__all__ = ["s3_server", "server"]


@pytest.fixture
def own_s3(tmp_path: Path) -> Iterator[S3]:
    """An S3 that a test may stop and start."""
    with serve_s3(tmp_path / "s3") as server:
        yield server
