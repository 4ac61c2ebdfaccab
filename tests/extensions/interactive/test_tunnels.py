"""Tunnels and configurations of interactive tasks, without a server."""

import asyncio
import re
import socket
import struct
from pathlib import Path

import pytest
from pydantic import ValidationError

from zerolab.contract.spec import Command, RunSpec
from zerolab.errors import ConfigError, UnreachableError
from zerolab.extensions.interactive.programs import Program
from zerolab.extensions.interactive.ssh import config_block
from zerolab.extensions.interactive.task_process import _Task
from zerolab.extensions.interactive.tunnels import open_http, open_tunnel
from zerolab.paths import Home
from zeroserver.extensions.interactive.router import PortReport

SHELL = {"experiment_id": 7, "user": "ann", "host_key": "ssh-ed25519 AAAA+/=="}
INJECTED = "ann\n  ProxyCommand touch /tmp/file"


def test_reset_connection_is_an_error_of_the_tunnel() -> None:
    """The process of a task catches it, and opens another tunnel."""

    async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(
            b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: tcp\r\n\r\n"
        )
        await writer.drain()
        await reader.read(1)
        linger = struct.pack("ii", 1, 0)  # close with a reset
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.transport.abort()

    async def run() -> None:
        server = await asyncio.start_server(reset, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with (
            server,
            open_http(f"http://127.0.0.1:{port}", "token") as http,
            open_tunnel(http, "/") as tunnel,
        ):
            await tunnel.write(b"x")
            await tunnel.read(100)

    with pytest.raises(UnreachableError, match=r"127\.0\.0\.1"):
        asyncio.run(run())


@pytest.mark.parametrize("key", ["user", "host_key"])
def test_report_of_a_shell_cannot_add_lines(tmp_path: Path, key: str) -> None:
    """The lines would run commands on the machine of whoever logs in, such as an administrator."""
    PortReport(kind="shell", user=SHELL["user"], host_key=SHELL["host_key"])
    with pytest.raises(ValidationError):
        PortReport(kind="shell", **{key: INJECTED})
    home = Home(tmp_path)
    assert "User ann\n" in config_block(home, SHELL, "http://127.0.0.1:8080")
    for text in (INJECTED, "ann\n"):
        with pytest.raises(ConfigError, match=re.escape(f"{key}: must match")):
            config_block(home, SHELL | {key: text}, "http://127.0.0.1:8080")


def test_error_of_the_task_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "missing.pem"))
    spec = RunSpec(
        run_id=1, experiment_id=1, trial_id=1, master="https://127.0.0.1:1", token="token",
        run_dir=str(tmp_path), config={}, hparams={}, trial_seed=0, slots=1, model_dir="",
        checkpoint_dir="", entrypoint=Command(["true"]),
    )  # fmt: skip
    program = Program(tmp_path)
    program.kind = "shell"  # it is ready at once
    with pytest.raises(ConfigError, match=r"missing\.pem"):
        asyncio.run(_Task(spec, program, None).run())
