from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.server.helpers import Server, serve

if TYPE_CHECKING:
    from tests.extensions.storage_objects.buckets import S3


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator["S3"]:
    """S3 server for all tests of a worker; each test creates its own bucket."""
    from tests.extensions.storage_objects.buckets import serve_s3

    with serve_s3(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serve(tmp_path) as running:
        yield running
