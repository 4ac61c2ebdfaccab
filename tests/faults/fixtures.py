"""Fixtures of real servers, forked from a process that has imported the server.

The ``conftest.py`` of a folder imports the fixtures that its tests use.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.fork_server import ForkServer
from tests.faults.helpers import KillableServer
from zerolab.client.http import Client


@pytest.fixture(scope="module")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    log: Path = tmp_path_factory.mktemp("fork_server") / "fork_server.log"
    with ForkServer("zeroserver.process", "tests.faults.helpers", log=log) as fork_server:
        yield fork_server


@pytest.fixture
def server(fork_server: ForkServer, tmp_path: Path) -> Iterator[KillableServer]:
    server = KillableServer(fork_server, tmp_path / "home")
    server.start()
    yield server
    server.kill()


@pytest.fixture
def client(server: KillableServer) -> Iterator[Client]:
    with server.client as client:
        yield client
