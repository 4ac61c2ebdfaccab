"""Agents with a real server: delivery of output and outcomes after crashes."""

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.end_to_end.installation import Installation
from tests.waiting import DEADLINE_S, until
from zerolab.client.http import Client
from zerolab.errors import ForbiddenError
from zerolab.files import read_json
from zerolab.linux import wait_for_end

pytestmark = pytest.mark.processes

CONFIG: dict[str, Any] = {
    "entrypoint": "python script.py",
    "searcher": {"name": "single", "metric": "loss", "max_length": {"batches": 1}},
    "resources": {"slots_per_trial": 2},
    "max_restarts": 0,
}

COUNT = """
import os, pathlib, sys, time
rank, gate = os.environ["RANK"], pathlib.Path(GATE)
def say(begin, end):
    for number in range(begin, end):
        print(f"rank {rank} line {number}", flush=True)
say(0, 500)
(gate / f"first_{rank}").touch()
while not (gate / "go").exists():
    time.sleep(0.02)
say(500, 1000)
"""


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    with Installation.running(tmp_path_factory.mktemp("installation") / "home") as running:
        yield running


def script(source: str, gate: Path) -> dict[str, str]:
    gate.mkdir(exist_ok=True)
    return {"script.py": source.replace("GATE", repr(str(gate)))}


def wait_for_files(gate: Path, *names: str) -> None:
    expected = set(names)
    until(
        f"{gate} holds {expected}",
        lambda: {entry.name for entry in gate.iterdir()},
        expected.issubset,
    )


def bind_if_free(port: int) -> socket.socket | None:
    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError:  # the previous process is not reaped yet
        return None


def lines_of_rank(installation: Installation, experiment_id: int, rank: int) -> list[str]:
    start = f"rank {rank} line "
    return [line for line in installation.lines(experiment_id) if line.startswith(start)]


def expected_lines(rank: int, stop: int) -> list[str]:
    return [f"rank {rank} line {number}" for number in range(stop)]


def test_logs_survive_killed_server(installation: Installation, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    experiment_id = installation.submit(tmp_path / "model", CONFIG, script(COUNT, gate))
    wait_for_files(gate, "first_0", "first_1")
    installation.kill_server()
    (gate / "go").touch()
    installation.up()
    assert installation.wait_for(experiment_id)["state"] == "COMPLETED"
    for rank in (0, 1):
        assert lines_of_rank(installation, experiment_id, rank) == expected_lines(rank, 1000)


def test_next_agent_delivers_logs_of_killed_one(installation: Installation, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    config = {**CONFIG, "max_restarts": 0}
    experiment_id = installation.submit(tmp_path / "model", config, script(COUNT, gate))
    wait_for_files(gate, "first_0", "first_1")
    trial = installation.client.trials(experiment_id)[0]
    ranks = [psutil.Process(installation.rank_pid(trial["run_id"], rank)) for rank in (0, 1)]
    installation.kill_agent()
    assert wait_for_end(ranks, DEADLINE_S)
    (gate / "go").touch()
    installation.up()
    assert installation.wait_for(experiment_id)["state"] == "COMPLETED"
    assert installation.client.trial(trial["id"])["restarts"] == 0
    assert "the agent ended during the run" in " ".join(installation.lines(experiment_id, "agent"))
    for rank in (0, 1):
        lines = lines_of_rank(installation, experiment_id, rank)
        assert lines == expected_lines(rank, 500) + expected_lines(rank, 1000)


LOADED = """
import os, pathlib, time
gate = pathlib.Path(GATE)
memory = b"x" * (100_000_000 if os.environ["RANK"] == "1" else 1)
(gate / ("first_" + os.environ["RANK"])).touch()
while not (gate / "go").exists():
    time.sleep(0.02)
"""


def test_slots_show_their_run_and_its_load(installation: Installation, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    config = {**CONFIG, "name": "loaded"}
    experiment_id = installation.submit(tmp_path / "model", config, script(LOADED, gate))
    wait_for_files(gate, "first_0", "first_1")

    def memories() -> list[int]:
        loads = [slot["load"] or {} for slot in installation.client.agents()[0]["slots"]]
        return [load.get("memory_bytes") or 0 for load in loads]

    until("slot 1 uses more memory", memories, lambda used: used[1] > used[0] + 90_000_000 > 9e7)
    (agent,) = installation.json("agent", "list")
    (trial,) = installation.client.trials(experiment_id)
    for slot in agent["slots"]:
        use = (slot["experiment"], slot["experiment_id"], slot["trial_id"], slot["run_id"])
        assert use == ("loaded", experiment_id, trial["id"], trial["run_id"])
        assert slot["load"]["cpu_percent"] >= 0
        assert slot["owner"] is None
    machine = agent["load"]
    assert 0 < machine["memory_bytes"] < machine["memory_total_bytes"]
    assert 0 < machine["disk_bytes"] < machine["disk_total_bytes"]
    table = installation.quick("agent", "list", "--slots").stdout
    lines = [line for line in table.splitlines() if f"{experiment_id}: loaded" in line]
    assert len(lines) == 2, table
    assert " MB" in lines[1], table
    (gate / "go").touch()
    assert installation.wait_for(experiment_id)["state"] == "COMPLETED"


FAMILY = """
import os, pathlib, subprocess, sys, time
gate = pathlib.Path(GATE)
def note(name, pid):
    (gate / "new").write_text(str(pid))
    (gate / "new").rename(gate / name)
if os.environ["RANK"] == "0":
    clean = {key: value for key, value in os.environ.items() if "ZEROLAB" not in key}
    note("child", subprocess.Popen(["sleep", "1000"]).pid)
    note("session", subprocess.Popen(["sleep", "1000"], start_new_session=True, env=clean).pid)
    if os.fork() == 0:  # a daemon: its parent ends and it is adopted
        os.setsid()
        if os.fork() == 0:
            note("daemon", os.getpid())
            os.execve("/bin/sleep", ["sleep", "1000"], clean)
        os._exit(0)
time.sleep(1000)
"""


def test_killed_agent_ends_processes_of_ranks(installation: Installation, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    experiment_id = installation.submit(tmp_path / "model", CONFIG, script(FAMILY, gate))
    names = ("child", "session", "daemon")
    wait_for_files(gate, *names)
    family = [psutil.Process(int((gate / name).read_text())) for name in names]
    try:
        installation.kill_agent()
        assert wait_for_end(family, DEADLINE_S)
    finally:
        for process in family:
            with contextlib.suppress(psutil.Error):
                process.kill()
        installation.up()
        installation.quick("experiment", "kill", str(experiment_id))
    assert installation.wait_for(experiment_id)["state"] == "CANCELED"


def test_files_are_private_for_any_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with Installation.running(tmp_path / "home") as installation:
            gate = tmp_path / "gate"
            gate.mkdir()
            (gate / "go").touch()
            experiment_id = installation.submit(tmp_path / "model", CONFIG, script(COUNT, gate))
            assert installation.wait_for(experiment_id)["state"] == "COMPLETED"
            home = installation.home
            copies = [run / "model" for run in home.runs.iterdir()]
            until("the model's copy is removed", lambda: not any(map(Path.exists, copies)))
            files = {
                path: f"{path.stat().st_mode & 0o777:03o}"
                for path in home.path.rglob("*")
                if not path.is_dir() and home.checkpoints not in path.parents
            }
    finally:
        os.umask(before)
    assert {"zerolab.db", "agent.lock", "rank_0.out", "server.log"} <= {path.name for path in files}
    assert {str(path): mode for path, mode in files.items() if mode[1:] != "00"} == {}


def test_renewed_token_keeps_runs(installation: Installation, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    going_on = installation.submit(tmp_path / "model", CONFIG, script(COUNT, gate))
    wait_for_files(gate, "first_0", "first_1")
    old = Client(installation.client.url, installation.home.ensure_token())
    installation.quick("logout")
    renewed = installation.quick("token", "--renew").stdout.strip()
    installation._forget_client()
    assert renewed == installation.quick("token").stdout.strip() == installation.home.read_token()
    with old, pytest.raises(ForbiddenError, match="a valid token is needed"):
        old.info()
    (gate / "go").touch()
    assert installation.wait_for(going_on)["state"] == "COMPLETED"
    later = installation.submit(tmp_path / "model")
    assert installation.wait_for(later)["state"] == "COMPLETED"
    assert lines_of_rank(installation, later, 1) == expected_lines(1, 1000)


def test_token_renewal_without_server(tmp_path: Path) -> None:
    empty_home = Installation(tmp_path / "home")
    first = empty_home.quick("token").stdout
    assert empty_home.quick("token", "--renew").stdout != first
    assert empty_home.quick("token").stdout != first


def test_killed_experiment_leaves_no_process(installation: Installation, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    experiment_id = installation.submit(tmp_path / "model", CONFIG, script(COUNT, gate))
    wait_for_files(gate, "first_0", "first_1")
    run_id = installation.client.trials(experiment_id)[0]["run_id"]
    ranks = [psutil.Process(installation.rank_pid(run_id, rank)) for rank in (0, 1)]
    installation.quick("experiment", "kill", str(experiment_id))
    assert installation.wait_for(experiment_id)["state"] == "CANCELED"
    assert wait_for_end(ranks, DEADLINE_S)


def test_down_and_up_resume_runs(installation: Installation, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    source = """
import os, pathlib, signal, sys, time
from zerolab.contract.spec import EXIT_PREEMPTED
from zerolab.contract.outcome import write_reason
gate = pathlib.Path(GATE)
if (gate / "checkpoint").exists():
    print("gone on", flush=True)
    sys.exit(0)
def save(*_):
    (gate / "checkpoint").touch()
    write_reason("..", EXIT_PREEMPTED, "saved a checkpoint")
    sys.exit(EXIT_PREEMPTED)
signal.signal(signal.SIGTERM, save)
(gate / ("ready_" + os.environ["RANK"])).touch()
while True:
    signal.pause()
"""
    experiment_id = installation.submit(tmp_path / "model", CONFIG, script(source, gate))
    wait_for_files(gate, "ready_0", "ready_1")
    installation.down()
    assert (gate / "checkpoint").exists()
    until(
        "nothing is left", lambda: list(installation.processes()), lambda remaining: not remaining
    )
    installation.up()
    assert installation.wait_for(experiment_id)["state"] == "COMPLETED"
    trial = installation.client.trials(experiment_id)[0]
    assert trial["restarts"] == 0, "a preemption is no failure"
    assert "gone on" in installation.lines(experiment_id)


def test_down_during_import_is_no_failure(installation: Installation, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    source = """
import os, pathlib, sys, time
gate = pathlib.Path(GATE)
if (gate / "go").exists():
    sys.exit(0)
(gate / ("importing_" + os.environ["RANK"])).touch()
while True:
    time.sleep(0.05)
"""
    config = {**CONFIG, "max_restarts": 0}
    experiment_id = installation.submit(tmp_path / "model", config, script(source, gate))
    wait_for_files(gate, "importing_0", "importing_1")
    installation.down()
    (gate / "go").touch()
    installation.up()
    ended = installation.wait_for(experiment_id)
    assert ended["state"] == "COMPLETED", installation.lines(experiment_id)
    assert installation.client.trials(experiment_id)[0]["restarts"] == 0


def test_failure_reason_has_signal_or_last_line(installation: Installation, tmp_path: Path) -> None:
    crash = 'import os\nif os.environ["RANK"] == "1": os.kill(os.getpid(), 11)\nwhile True: pass\n'
    first = installation.submit(tmp_path / "crash", CONFIG, {"script.py": crash})
    wrong = 'raise RuntimeError("the loss is\\nnot a number")\n'
    second = installation.submit(tmp_path / "wrong", CONFIG, {"script.py": wrong})
    assert "rank 1 was killed by SIGSEGV" in installation.wait_for(first)["error"]
    assert "not a number" in installation.wait_for(second)["error"]
    assert "RuntimeError: the loss is" in installation.lines(second)


def test_spool_is_delivered_before_exit(installation: Installation, tmp_path: Path) -> None:
    source = """
import os, pathlib, signal, msgspec
from zerolab.reports.reporter import Reporter
from zerolab.contract.spec import read_run_spec
if os.environ["RANK"] == "0":
    spec = read_run_spec(pathlib.Path(os.environ["ZEROLAB_RUN_SPEC"]))
    unreachable = msgspec.structs.replace(spec, master="http://127.0.0.1:9")
    reporter = Reporter(unreachable)
    for step in range(1, 101):
        reporter.report_metrics("training", step, {"loss": 1 / step})
    os.kill(os.getpid(), signal.SIGKILL)
while True:
    signal.pause()
"""
    experiment_id = installation.submit(tmp_path / "model", CONFIG, {"script.py": source})
    assert "SIGKILL" in installation.wait_for(experiment_id)["error"]
    trial = installation.client.trials(experiment_id)[0]
    curves = installation.client.metrics(trial["id"], "training", ["loss"])
    assert [step for step, _ in curves[0]["points"]] == list(range(1, 101))


def test_data_directory_has_one_agent(installation: Installation) -> None:
    refused = installation.cli("agent", "start", expect=2)
    assert "another agent runs" in refused.stderr
    assert psutil.pid_exists(installation.agent_pid)


def test_up_keeps_running_services(installation: Installation) -> None:
    before = installation.server_pid, installation.agent_pid
    installation.up()
    assert (installation.server_pid, installation.agent_pid) == before


def test_agent_follows_server_to_new_port(
    installation: Installation,
) -> None:
    before = installation.client.url
    installation.kill_server()
    with until("the port is free", lambda: bind_if_free(installation.port)):
        after = installation.up(port=0)
    assert after != before
    assert read_json(installation.home.agent_file) == {
        "pid": installation.agent_pid,
        "master": after,
        "agent_id": 1,
    }


def test_new_database_reuses_run_numbers(installation: Installation, tmp_path: Path) -> None:
    config = {**CONFIG, "resources": {"slots_per_trial": 1}}
    if not installation.client.experiments():  # other tests used these numbers
        first = installation.submit(tmp_path / "first", config, {"script.py": "print('first')"})
        installation.wait_for(first)
    installation.down()
    for file in installation.home.path.glob("zerolab.db*"):
        file.unlink()
    installation.up()
    second = installation.submit(tmp_path / "second", config, {"script.py": "print('second')"})
    assert second == 1
    assert installation.wait_for(second)["state"] == "COMPLETED"
    assert installation.lines(second, "stdout") == ["second"]


def test_reused_process_id_is_not_stopped(tmp_path: Path, installation: Installation) -> None:
    other = Installation(tmp_path / "other")
    for file in (other.home.server_file, other.home.agent_file):
        file.write_text(f'{{"pid": {os.getpid()}, "url": "http://127.0.0.1:9"}}')
    assert "no server or agent of this installation is running" in other.cli("down").stderr
