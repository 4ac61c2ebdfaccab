from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.helpers import Server, serve
from tests.storage.buckets import S3, serve_s3


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    """S3 server for all tests of a worker; each test creates its own bucket."""
    with serve_s3(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serve(tmp_path) as running:
        yield running


@pytest.fixture
def own_s3(tmp_path: Path) -> Iterator[S3]:
    """An S3 that a test may stop and start."""
    with serve_s3(tmp_path / "s3") as server:
        yield server
