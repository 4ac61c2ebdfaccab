"""Server process: start, stop, kill."""

import contextlib
import ctypes
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest

from tests.server.helpers import checkpoint, experiment_config, model_archive, training
from tests.server.processes import LiveServer
from tests.waiting import DEADLINE_S, until
from zerolab.client.http import Client
from zerolab.contract.messages import AgentRegistration, LogEntry, ReportBatch, RunExit, SlotInfo
from zerolab.errors import UnreachableError
from zerolab.paths import Home

pytestmark = pytest.mark.processes

PIDFD_GETFD = 438  # the number of a system call that Python has no name for


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Server process shared by tests that do not kill it."""
    server = LiveServer(tmp_path_factory.mktemp("live") / "home", fresh=True)
    server.start()
    yield server
    server.close()


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[LiveServer]:
    """Server process that the test may kill."""
    server = LiveServer(tmp_path / "home", fresh=True)
    server.start()
    yield server
    server.close()


def submit(client: Client, directory: Path, **changes: Any) -> int:
    archive = model_archive(directory / "model")
    experiment_id: int = client.create_experiment(experiment_config(**changes), archive)["id"]
    return experiment_id


def add_agent(client: Client, slots: int) -> int:
    devices = [SlotInfo(number, "cpu") for number in range(slots)]
    return client.register_agent(AgentRegistration("agent", "here", devices))


def accepted_by(server: LiveServer) -> Iterator[socket.socket]:
    """Yield the server's ends of its connections, copied by the parent process."""
    content = json.loads((server.home / "server.json").read_text())
    libc = ctypes.CDLL(None, use_errno=True)
    handle = os.pidfd_open(content["pid"])
    try:
        for connection in psutil.Process(content["pid"]).net_connections("tcp"):
            if connection.status == psutil.CONN_ESTABLISHED:
                copy = libc.syscall(PIDFD_GETFD, handle, connection.fd, 0)
                if copy < 0:
                    pytest.skip(f"the kernel refuses: {os.strerror(ctypes.get_errno())}")
                with socket.socket(fileno=copy) as peer:
                    yield peer
    finally:
        os.close(handle)


def test_keep_alive_response_skips_delayed_ack(
    live: LiveServer,
) -> None:
    # With Nagle's algorithm every response but the first takes 40 ms, on any machine.
    with httpx.Client(base_url=live.url, timeout=DEADLINE_S) as http:
        assert http.get("/healthz").json() == {"status": "ok"}
        options = [
            connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            for connection in accepted_by(live)
        ]
    assert options
    assert all(options)


def test_second_server_on_same_data_fails(live: LiveServer) -> None:
    second = live.spawn("--port", "0")
    assert second.wait(DEADLINE_S) == 2
    assert "another server already works on" in live.log.read_text()
    assert live.client().info()["version"]


def test_busy_port_fails_only_if_requested(live: LiveServer, tmp_path: Path) -> None:
    other = LiveServer(tmp_path / "other")
    refused = other.spawn("--port", str(live.port))
    assert refused.wait(DEADLINE_S) == 2
    assert f"--port {live.port}: cannot listen" in other.log.read_text()


def test_invalid_port_is_one_message(tmp_path: Path) -> None:
    other = LiveServer(tmp_path / "other")
    refused = other.spawn("--port", "80000")
    assert refused.wait(DEADLINE_S) == 2
    output = other.log.read_text()
    assert "--port: must be a whole number from 0 to 65535, got '80000'" in output
    assert "Traceback" not in output


def test_public_host_requires_an_option(tmp_path: Path) -> None:
    server = LiveServer(tmp_path / "home")
    refused = server.spawn("--host", "0.0.0.0", "--port", "0")
    assert refused.wait(DEADLINE_S) == 2
    assert "--host: must be a loopback address, got '0.0.0.0'" in server.log.read_text()


def test_sigterm_closes_streams_and_exits(mortal: LiveServer, tmp_path: Path) -> None:
    client = mortal.client()
    experiment_id = submit(client, tmp_path)
    agent_id = add_agent(client, 1)
    version = client.work(agent_id, 0, 0).version
    ended = []

    def poll() -> None:
        try:
            ended.append(client.work(agent_id, version, 30).version)
        except UnreachableError:
            ended.append(version)

    reading = threading.Event()

    def stream() -> None:
        with contextlib.suppress(UnreachableError):
            for _ in mortal.client().events(experiment_id):
                reading.set()
        ended.append(0)

    threads = [threading.Thread(target=poll), threading.Thread(target=stream)]
    for thread in threads:
        thread.start()
    assert reading.wait(DEADLINE_S)
    assert mortal.stop() == 0
    for thread in threads:
        thread.join(DEADLINE_S)
    assert sorted(ended) == [0, version]
    assert not (mortal.home / "server.json").exists()


def test_long_poll_returns_on_change(mortal: LiveServer, tmp_path: Path) -> None:
    client = mortal.client()
    agent_id = add_agent(client, 1)
    empty = client.work(agent_id, 0, 0)
    responses: list[Any] = []

    def wait_for_work() -> None:
        work = empty
        while not work.runs:
            work = client.work(agent_id, empty.version, 30)
        responses.append(work)

    thread = threading.Thread(target=wait_for_work)
    thread.start()
    experiment_id = submit(mortal.client(), tmp_path)
    thread.join(DEADLINE_S)
    (item,) = responses[0].runs
    assert item.spec.experiment_id == experiment_id
    assert item.spec.master == mortal.url
    run = Client(mortal.url, item.spec.token)
    now = run.directive(item.run_id, None, 0)

    def wait_for_directive() -> None:
        directive = now
        while directive.version == now.version:
            directive = run.directive(item.run_id, now.version, 30)
        responses.append(directive)

    thread = threading.Thread(target=wait_for_directive)
    thread.start()
    mortal.client().experiment_action(experiment_id, "cancel")
    thread.join(DEADLINE_S)
    assert responses[1].action == "stop"
    run.close()
    client.run_exited(item.run_id, RunExit(66))
    assert client.experiment(experiment_id)["state"] == "CANCELED"


def test_stream_resumes_after_cursor(mortal: LiveServer, tmp_path: Path) -> None:
    client = mortal.client()
    experiment_id = submit(client, tmp_path)
    stream = client.events(experiment_id)
    first = [next(stream) for _ in range(5)]
    assert [event.name for event in first] == ["experiment", "trial", "metric", "checkpoint", "log"]
    assert first[0].data["id"] == experiment_id
    assert first[2].data == {"reload": True}

    assert "no agent is connected" in first[0].data["waiting_reason"]
    assert "no agent is connected" in first[1].data["waiting_reason"]

    agent_id = add_agent(client, 1)
    events = {event.name: event.data for _, event in zip(range(2), stream, strict=False)}
    assert events["experiment"]["waiting_reason"] is None
    assert events["trial"]["waiting_reason"] is None
    run_id = client.work(agent_id, 0, 0).runs[0].run_id
    client.run_started(run_id)
    batch = ReportBatch(1, [training(5, 0.5), checkpoint(5, str(experiment_id))])
    client.report(run_id, msgspec.msgpack.encode(batch))
    client.ship_logs(run_id, 0, [LogEntry("hello", 1.0), LogEntry("world", 2.0)])
    seen = {}
    lines = []
    for event in stream:
        seen[event.name] = event
        if event.name == "log":
            lines.append(event.data["text"])
            if len(lines) == 2:
                break
    assert lines == ["hello", "world"]
    assert seen["trial"].data["steps_completed"] == 5
    assert seen["checkpoint"].data["uuid"] == checkpoint(5, str(experiment_id)).uuid
    expected = {"group": "training", "name": "loss", "points": [[5, 0.5]]}
    assert seen["metric"].data["metrics"] == [expected]
    stream.close()

    client.patch_experiment(experiment_id, name="new name")
    again = client.events(experiment_id, after=seen["log"].id)
    event = next(again)
    assert (event.name, event.data["name"]) == ("experiment", "new name")
    again.close()
    lost = client.events(experiment_id, after="0-1")
    assert [next(lost).name for _ in range(2)] == ["experiment", "trial"]
    lost.close()
    client.experiment_action(experiment_id, "kill")
    client.run_exited(run_id, RunExit(-9))


def test_acknowledged_reports_survive_kill(mortal: LiveServer, tmp_path: Path) -> None:
    reporters, deaths = 4, 4
    space = {
        "deepspeed_config": "ds_config.json",
        "n": {"type": "categorical", "vals": list(range(reporters))},
    }
    client = mortal.client()
    searcher = {"name": "grid", "metric": "loss", "max_length": 10}
    submit(client, tmp_path, hyperparameters=space, searcher=searcher)
    agent_id = add_agent(client, reporters)
    runs = [item.run_id for item in client.work(agent_id, 0, 0).runs]
    answered = dict.fromkeys(runs, 0)
    done = threading.Event()

    def reporter(run_id: int) -> None:
        client = mortal.client()
        for number in itertools.count(1, 3):
            records = [training(number + k, float(number + k)) for k in range(3)]
            body = msgspec.msgpack.encode(ReportBatch(number, records))
            while True:
                try:
                    assert client.report(run_id, body) == number + 2
                except UnreachableError:
                    if done.wait(0.02):
                        return
                    continue
                break
            answered[run_id] = number + 2
            if done.is_set():
                return

    threads = [threading.Thread(target=reporter, args=(run_id,)) for run_id in runs]
    for thread in threads:
        thread.start()
    for _ in range(deaths):
        before = sum(answered.values())
        until(
            "50 more reports are answered",
            lambda: sum(answered.values()),
            lambda now, before=before: now >= before + 50,
        )
        mortal.kill()
        mortal.start()
    done.set()
    for thread in threads:
        thread.join(DEADLINE_S)
    for trial in mortal.client().trials(1):
        run_id = runs[trial["id"] - 1]
        curve = mortal.client().metrics(trial["id"], max_points=10_000)[0]["points"]
        assert curve == [[step, float(step)] for step in range(1, len(curve) + 1)]
        assert answered[run_id] <= len(curve) <= answered[run_id] + 3


def test_readonly_home_is_one_message(tmp_path: Path) -> None:
    # Root may write anywhere, so the server runs as another user.
    drop = "os.setgroups([]), os.setgid(65534), os.setuid(65534)" if os.getuid() == 0 else "0"
    start = f"import os, sys; from zeroserver.process import main; {drop}; sys.exit(main())"
    with tempfile.TemporaryDirectory(prefix="zerolab-") as folder:
        Path(folder).chmod(0o755)
        home = Home(Path(folder) / "home").create()
        if os.getuid() == 0:
            for path in (home.path, *home.path.iterdir()):
                os.chown(path, 65534, 65534)
        for closed in (home.archives, home.path):
            closed.chmod(0o500)
            command = [sys.executable, "-c", start, "--home", str(home.path), "--port", "0"]
            ended = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=DEADLINE_S
            )
            assert ended.returncode == 2, ended.stderr
            assert "cannot be written" in ended.stderr
            assert "set ZEROLAB_HOME to a directory of yours" in ended.stderr
            assert "Traceback" not in ended.stderr
            closed.chmod(0o700)


def test_readable_token_file_is_restricted(tmp_path: Path) -> None:
    live = LiveServer(tmp_path / "home")
    Home(live.home).create().ensure_token()
    (live.home / "token").chmod(0o644)
    live.start()
    try:
        assert (live.home / "token").stat().st_mode & 0o777 == 0o600
        assert "could be read by others (mode 644)" in live.log.read_text()
        assert "zerolab token --renew" in live.log.read_text()
    finally:
        live.close()
