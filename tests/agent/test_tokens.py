"""Tokens of the owner and of agents stay hidden from trials."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.processes import LiveServer
from tests.waiting import DEADLINE_S, until
from zerolab.client import archive
from zerolab.client.http import Client
from zerolab.contract.spec import ENV_HOME, ENV_MASTER, ENV_PRELOAD, ENV_TOKEN

pytestmark = pytest.mark.processes

DUMP = """
import os, pathlib

def read(path):
    try:
        return path.read_bytes()
    except OSError as error:
        return str(error).encode()

found = [repr(dict(os.environ)).encode()]
pid = os.getpid()
while pid > 1:
    process = pathlib.Path("/proc") / str(pid)
    for name in ("cmdline", "environ"):
        found.append(f"{pid} {name} ".encode() + read(process / name))
    pid = int(read(process / "stat").rpartition(b")")[2].split()[1])
run = pathlib.Path.cwd()
while run.parent.name != "runs":
    run = run.parent
for path in run.rglob("*"):
    if path.is_file() and path.suffix != ".py":
        found.append(f"{path} ".encode() + read(path))
for text in sorted(os.environ.items()):
    print(text)
pathlib.Path(DUMPED).write_bytes(b"\\n".join(found))
"""
CONFIG: dict[str, Any] = {
    "entrypoint": "python script.py",
    "searcher": {"name": "single", "metric": "loss"},
    "max_restarts": 0,
}


@contextlib.contextmanager
def running_server(path: Path) -> Iterator[LiveServer]:
    created = LiveServer(path)
    created.start()
    try:
        yield created
    finally:
        created.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveServer]:
    with running_server(tmp_path / "server") as created:
        yield created


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with running_server(tmp_path_factory.mktemp("server")) as created:
        yield created


def start_agent(
    server: LiveServer, home: Path, *options: str, stdin: str = "", **environment: str
) -> "subprocess.Popen[bytes]":
    """Start an agent like a user of another machine."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name == ENV_PRELOAD or not name.startswith("ZEROLAB_")
    }
    command = [sys.executable, "-m", "zerolab", "agent", "start", "--server", server.url]
    with home.with_suffix(".log").open("ab") as log:
        agent = subprocess.Popen(
            [*command, "--slots", "1", "--cpu", "--name", home.name, *options],
            env={**inherited, ENV_HOME: str(home), "CUDA_VISIBLE_DEVICES": "", **environment},
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
        )
    assert agent.stdin is not None
    agent.stdin.write(stdin.encode())
    agent.stdin.close()
    return agent


def end(agent: "subprocess.Popen[bytes]") -> None:
    agent.terminate()
    try:
        agent.wait(DEADLINE_S)
    finally:
        agent.kill()
        agent.wait()


def registered(client: Client, name: str) -> bool:
    return any(
        resource["name"] == name and resource["state"] == "ready" for resource in client.agents()
    )


def finish_dump(client: Client, folder: Path) -> tuple[bytes, str]:
    """Run a trial that reads everything it can; return its dump and its log."""
    dumped = folder / "dumped"
    model = folder / "model"
    model.mkdir()
    (model / "script.py").write_text(DUMP.replace("DUMPED", repr(str(dumped))))
    created = client.create_experiment(CONFIG, archive.pack(model))
    until(
        "the experiment has ended",
        lambda: client.experiment(created["id"]),
        lambda resource: resource["state"] in {"COMPLETED", "ERROR"},
    )
    lines = client.get(f"/experiments/{created['id']}/logs", limit=1000)["logs"]
    return dumped.read_bytes(), "\n".join(line["text"] for line in lines)


@pytest.mark.parametrize("way", ["environment", "file", "stdin", "owner"])
def test_trial_cannot_read_other_tokens(
    shared_server: LiveServer, tmp_path: Path, way: str
) -> None:
    server, name = shared_server, f"far-{way}"
    token = server.token if way == "owner" else server.agent_token
    file = tmp_path / "agent.token"
    file.write_text(token)
    file.chmod(0o600)
    options: dict[str, Any] = {"environment": {ENV_TOKEN: token}, "owner": {ENV_TOKEN: token},
                               "stdin": {"stdin": f"{token}\n"}, "file": {}}[way]  # fmt: skip
    command = {"file": ["--token-file", str(file)], "stdin": ["--token-file", "-"]}.get(way, [])
    agent = start_agent(server, tmp_path / name, *command, **options)
    client = server.client()
    try:
        log = tmp_path / f"{name}.log"
        until("it is there", lambda: registered(client, name) or agent.poll() is not None,
              details=log.read_text)  # fmt: skip
        dump, lines = finish_dump(client, tmp_path)
        assert b"run.json" in dump
        assert f"{agent.pid} cmdline".encode() in dump
        for secret in (server.token, server.agent_token):
            assert secret.encode() not in dump
            assert secret not in lines
            assert secret not in log.read_text()
            arguments = Path(f"/proc/{agent.pid}/cmdline").read_bytes()
            assert secret.encode() not in arguments
    finally:
        end(agent)


def test_agent_survives_owner_token_renewal(server: LiveServer, tmp_path: Path) -> None:
    agent = start_agent(server, tmp_path / "far", **{ENV_TOKEN: server.token})
    client = server.client()
    try:
        until("it is there", lambda: registered(client, "far"))
        client.renew_token()
        client = server.client()
        created = client.create_experiment(
            CONFIG | {"entrypoint": "true"}, archive.pack(_empty(tmp_path))
        )
        until("its run has ended", lambda: client.experiment(created["id"])["state"] == "COMPLETED",
              details=(tmp_path / "far.log").read_text)  # fmt: skip
        assert "a valid token is needed" not in (tmp_path / "far.log").read_text()
    finally:
        end(agent)


def test_agent_follows_a_renewed_token(server: LiveServer, tmp_path: Path) -> None:
    file = tmp_path / "agent.token"
    file.write_text(server.agent_token)
    file.chmod(0o600)
    agent = start_agent(server, tmp_path / "far", "--token-file", str(file))
    client = server.client()
    try:
        until("it is there", lambda: registered(client, "far"))
        client.renew_token()
        client = server.client()
        file.write_text(client.agent_token(renew=True))
        log = tmp_path / "far.log"
        created = client.create_experiment(
            CONFIG | {"entrypoint": "true"}, archive.pack(_empty(tmp_path))
        )
        until("its run has ended", lambda: client.experiment(created["id"])["state"] == "COMPLETED",
              details=log.read_text)  # fmt: skip
        # The server responds to a waiting agent immediately, which reads its file again.
        assert client.agents()[0]["state"] == "ready"
    finally:
        end(agent)


def _empty(folder: Path) -> Path:
    model = folder / "empty"
    model.mkdir()
    (model / "x").touch()
    return model


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["--token", "secret"], "use --token-file FILE or set ZEROLAB_TOKEN"),
        (["--token-file", "open"], "must be readable by its owner only, got mode 0644"),
        (["--token-file", "missing"], "must be a readable file with a token"),
        (["--token-file", "empty"], "must hold a token"),
        (["--token-file", "-"], "must be a token on standard input"),
    ],
)
def test_unsafe_or_missing_token_is_refused(
    tmp_path: Path, command: list[str], message: str
) -> None:
    for name, mode in (("open", 0o644), ("empty", 0o600)):
        (tmp_path / name).write_text("secret" if name == "open" else "")
        (tmp_path / name).chmod(mode)
    done = subprocess.run(
        [sys.executable, "-m", "zerolab", "agent", "start", "--cpu", *command],
        env={**os.environ, ENV_HOME: str(tmp_path / "home"), ENV_MASTER: "http://127.0.0.1:9"},
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert "secret" not in done.stderr
