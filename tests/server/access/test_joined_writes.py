"""zeroserver.access.joined_writes: order and completeness of what a client receives."""

import asyncio
from collections.abc import Callable

import pytest

from zeroserver.access.joined_writes import JoinedWrites

LARGE = b"L" * 40_000


def two_small(transport: JoinedWrites) -> None:
    transport.write(b"head ")
    transport.write(b"body")


def lines_after_small(transport: JoinedWrites) -> None:
    transport.write(b"head ")
    transport.writelines([b"one ", b"two"])


def large_after_small(transport: JoinedWrites) -> None:
    transport.write(b"head ")
    transport.write(LARGE)
    transport.write(b"end")


@pytest.mark.parametrize(
    ("write", "received"),
    [
        (two_small, b"head body"),
        (lines_after_small, b"head one two"),
        (large_after_small, b"head " + LARGE + b"end"),
    ],
)
def test_client_receives_all_in_order(
    write: Callable[[JoinedWrites], None], received: bytes
) -> None:
    class Responder(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, asyncio.Transport)
            joined = JoinedWrites(transport, asyncio.get_running_loop())
            write(joined)
            joined.close()

    async def exchange() -> bytes:
        loop = asyncio.get_running_loop()
        async with await loop.create_server(Responder, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            content = await reader.read()
            writer.close()
            return content

    assert asyncio.run(exchange()) == received
