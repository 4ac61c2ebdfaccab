"""Servers that may send to this machine and tick often, and a receiver."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.server.conftest import new_database
from tests.server.helpers import PLAYED, Server, serve
from tests.server.notifications.receiver import Receiver, receiving

TICKING = msgspec.structs.replace(PLAYED, tick_s=0.02)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.processes)])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    """A server on each of the two databases, which may send to this machine."""
    url = ""
    if request.param == "postgresql":
        url = new_database(request.getfixturevalue("postgresql"))
    with serve(tmp_path, url, TICKING) as running:
        allow_private(running)
        yield running


def allow_private(server: Server) -> None:
    """Let a server send to this machine, as --allow-private-webhooks does."""
    services = server.services
    services.settings = msgspec.structs.replace(services.settings, private_webhooks=True)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as running:
        yield running
