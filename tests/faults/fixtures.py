"""Fixtures of real servers, forked from a process that has imported the server.

The ``conftest.py`` of a folder imports the fixtures that its tests use.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.helpers import KillableServer
from tests.faults.nursery import Nursery
from zerolab.client.http import Client


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    log: Path = tmp_path_factory.mktemp("nursery") / "nursery.log"
    with Nursery("zeroserver.process", "tests.faults.helpers", log=log) as nursery:
        yield nursery


@pytest.fixture
def server(nursery: Nursery, tmp_path: Path) -> Iterator[KillableServer]:
    server = KillableServer(nursery, tmp_path / "home")
    server.start()
    yield server
    server.kill()


@pytest.fixture
def client(server: KillableServer) -> Iterator[Client]:
    with server.client as client:
        yield client
