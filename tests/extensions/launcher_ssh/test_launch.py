"""``zerolab launch`` on several machines, without remaining processes."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from tests.extensions.launcher_ssh.sshd import Keys, loopback_machine, sshd
from tests.launcher.helpers import wait_for_exit
from tests.waiting import free_port, until
from zerolab.contract.spec import EXIT_INFRASTRUCTURE, EXIT_USER_ERROR

pytestmark = [pytest.mark.processes, pytest.mark.machines]

SAY_WHO = """
import os, sys
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE"]
print(*(os.environ[name] for name in names), os.environ["SENT"], *sys.argv[1:])
print("run", os.environ.get("ZEROLAB_RUN_SPEC"), file=sys.stderr)
"""

WAIT = """
import os, pathlib, subprocess, sys, time
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
folder = pathlib.Path(sys.argv[-1])
(folder / f"{os.environ['RANK']}.tmp").write_text(f"{os.getpid()} {child.pid}")
(folder / f"{os.environ['RANK']}.tmp").rename(folder / f"{os.environ['RANK']}.pids")
print("waiting", flush=True)
while not (folder / f"fail_{os.environ['RANK']}").exists():
    time.sleep(0.05)
raise ValueError("no such layer")
"""


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keys]:
    keys = Keys(tmp_path_factory.mktemp("keys"))
    machines = [loopback_machine("worker-1"), loopback_machine("worker-2")]
    keys.write_config(machines)
    with ExitStack() as stack:
        for machine in machines:
            stack.enter_context(sshd(keys, machine))
        yield keys


class Launched:
    """A running ``zerolab launch``."""

    def __init__(self, keys: Keys, folder: Path, script: str, *arguments: str) -> None:
        (folder / "train.py").write_text(script)
        (folder / "hosts").write_text("worker-1 slots=2\nworker-2 slots=1\n")
        self.folder = folder
        self.logs = folder / "kept"
        command: list[object] = [
            Path(sys.executable).with_name("zerolab"),
            "launch",
            "--hostfile",
            "hosts",
        ]
        command += ["--ssh-config", keys.config, "--log-dir", self.logs]
        command += ["--master_port", str(free_port())]
        with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
            self.process = subprocess.Popen(
                [*map(str, command), *arguments, "train.py", str(folder)],
                cwd=folder,
                stdout=out,
                stderr=err,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def pids(self, ranks: int = 3) -> list[int]:
        """Wait for all ranks, and return the process ids of them and of their children."""
        until(
            "all ranks wait",
            lambda: len(list(self.folder.glob("*.pids"))),
            lambda count: count == ranks or self.process.poll() is not None,
            details=(self.folder / "err").read_text,
        )
        texts = [path.read_text() for path in self.folder.glob("*.pids")]
        assert len(texts) == ranks, (self.folder / "err").read_text()
        return [int(word) for text in texts for word in text.split()]

    def cut(self, host: str) -> None:
        """Kill the connection to a machine."""
        children = psutil.Process(self.process.pid).children()
        (ssh,) = [child for child in children if host in child.cmdline()]
        ssh.kill()

    def end(self) -> tuple[int, str, str]:
        """Wait for the end; return exit code, standard output and standard error."""
        until("the command has ended", lambda: self.process.poll() is not None)
        return (
            self.process.wait(),
            (self.folder / "out").read_text(),
            (self.folder / "err").read_text(),
        )


def test_ranks_of_unequal_hosts_have_output(keys: Keys, tmp_path: Path) -> None:
    (tmp_path / ".deepspeed_env").write_text("# for all nodes\n\nSENT=yes\n")
    launched = Launched(keys, tmp_path, SAY_WHO)
    code, out, err = launched.end()
    assert code == 0, err
    folder = str(tmp_path)
    assert sorted(out.splitlines()) == [
        f"[worker-1:0] 0 0 3 2 0 2 yes --local_rank=0 {folder}",
        f"[worker-1:1] 1 1 3 2 0 2 yes --local_rank=1 {folder}",
        f"[worker-2:2] 2 0 3 1 1 2 yes --local_rank=0 {folder}",
    ]
    assert "[worker-2:2] run None" in err
    outputs = {path.name: path.read_text() for path in launched.logs.iterdir()}
    assert len(outputs) == 6
    assert outputs["worker-2_rank_2.out"] == f"2 0 3 1 1 2 yes --local_rank=0 {folder}\n"


def test_failed_node_ends_run(keys: Keys, tmp_path: Path) -> None:
    launched = Launched(keys, tmp_path, WAIT)
    pids = launched.pids()
    (tmp_path / "fail_2").touch()
    code, _, err = launched.end()
    assert code == 1
    assert "worker-2: rank 2 exited with code 1: train.py:10: ValueError: no such layer" in err
    wait_for_exit(*pids)


def test_killed_launch_leaves_no_process(keys: Keys, tmp_path: Path) -> None:
    launched = Launched(keys, tmp_path, WAIT)
    pids = launched.pids()
    launched.process.kill()
    launched.process.wait()
    wait_for_exit(*pids)


def test_ctrl_c_ends_all_nodes(keys: Keys, tmp_path: Path) -> None:
    launched = Launched(keys, tmp_path, WAIT)
    pids = launched.pids()
    launched.process.send_signal(signal.SIGINT)
    code, _, err = launched.end()
    assert code == 128 + signal.SIGTERM
    assert "the run was stopped by SIGTERM" in err
    wait_for_exit(*pids)


def test_lost_connection_ends_run(keys: Keys, tmp_path: Path) -> None:
    launched = Launched(keys, tmp_path, WAIT)
    pids = launched.pids()
    launched.cut("worker-2")
    code, _, err = launched.end()
    assert code == EXIT_INFRASTRUCTURE
    assert "worker-2: the node is lost: its connection ended" in err
    wait_for_exit(*pids)


def test_elastic_run_continues_on_remaining_machines(keys: Keys, tmp_path: Path) -> None:
    launched = Launched(keys, tmp_path, WAIT, "--elastic_training", "--min_elastic_nodes", "1")
    first = launched.pids()
    for file in tmp_path.glob("*.pids"):
        file.unlink()
    launched.cut("worker-1")
    again = launched.pids(1)  # on worker-2 alone, and of rank 0
    wait_for_exit(*first)
    assert (tmp_path / "0.pids").exists()
    launched.cut("worker-2")
    code, _, err = launched.end()
    assert code == EXIT_INFRASTRUCTURE
    assert "the script starts again on 1 of 2 machines (1 rank): worker-2" in err
    assert "of the machines 0 are left, and min_elastic_nodes is 1" in err
    wait_for_exit(*again)


def test_unreachable_hosts_are_named(keys: Keys, tmp_path: Path) -> None:
    known_hosts = keys.known_hosts.read_text()
    keys.known_hosts.write_text("")
    try:
        code, _, err = Launched(keys, tmp_path, SAY_WHO).end()
    finally:
        keys.known_hosts.write_text(known_hosts)
    assert code == EXIT_USER_ERROR
    assert "worker-" in err
    assert "Host key verification failed" in err
