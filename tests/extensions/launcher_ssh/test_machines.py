"""Training on two machines over a network: one is disconnected, training resumes."""

import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.extensions.launcher_ssh.namespaces import network
from tests.extensions.launcher_ssh.sshd import Keys, Machine, sshd
from tests.waiting import free_port, until
from zerolab.contract.spec import EXIT_INFRASTRUCTURE

pytestmark = [pytest.mark.processes, pytest.mark.machines, pytest.mark.slow]

EXAMPLE = Path("examples/hostfile").resolve()
BOTH = ["--exclude", "worker-1:1@worker-2:1"]
"""One slot of each host of the example's file."""
ENDLESS = ["--steps", "100000", "--save-every", "4", "--pause", "0.3"]
"""Long enough for the test to stop or disconnect it."""
SILENCE_S = 15


def losses(text: str) -> dict[int, float]:
    """Return the losses in a script's output by step."""
    matches = re.findall(r"step (\d+) loss ([\d.]+)", text)
    return {int(step): float(loss) for step, loss in matches}


def test_run_resumes_after_network_loss(tmp_path: Path) -> None:
    zerolab = str(Path(sys.executable).with_name("zerolab"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ZEROLAB_HOME": str(tmp_path / "home")}
    for name in ("hosts", "train.py"):
        shutil.copy(EXAMPLE / name, tmp_path)
    keys = Keys(tmp_path / "keys")

    def launch(*arguments: str, out: Path) -> subprocess.Popen[bytes]:
        command = [zerolab, "launch", "--hostfile", "hosts", "--ssh-config", str(keys.config)]
        command += ["--node-timeout", str(SILENCE_S), "--master_port", str(free_port()), *arguments]
        with out.open("wb") as output:
            return subprocess.Popen(
                command, cwd=tmp_path, stdout=output, stderr=output, env=environment
            )

    lost = f"worker-2: the node is lost: it gave no sign of life for {SILENCE_S} s"
    with ExitStack() as stack:
        net = stack.enter_context(network("zlt", 77))
        machines = [
            Machine(f"worker-{number}", address, 2222)
            for number, address in enumerate(net.addresses, start=1)
        ]
        keys.write_config(machines)
        for machine, name in zip(machines, net.names, strict=True):
            stack.enter_context(sshd(keys, machine, namespace=name))
        servers = {name: set(net.processes(name)) for name in net.names}

        def assert_no_processes() -> None:
            """Wait until only the sshd and its processes of the connection are left."""
            for name in net.names:
                until(
                    "nothing is left",
                    lambda name=name: _without_sshd(set(net.processes(name)) - servers[name]),  # type: ignore[misc]
                    lambda remaining: not remaining,
                )

        out = tmp_path / "cut"
        cut = launch(*BOTH, "train.py", *ENDLESS, out=out)
        until(
            "a checkpoint is there, and training continues",
            out.read_text,
            lambda text: "step 6 " in text or cut.poll() is not None,
        )
        net.cut("zlt2")
        until("the run has ended", lambda: cut.poll() is not None)
        text = out.read_text()
        assert cut.returncode == EXIT_INFRASTRUCTURE, text
        assert lost in text
        assert_no_processes()
        net.mend("zlt2")
        saved = int((tmp_path / "checkpoints/latest").read_text().removeprefix("global_step"))

        out = tmp_path / "elastic"
        shrinks = launch("--elastic", *BOTH, "train.py", *ENDLESS, out=out)
        until(
            "it trains on both, from a checkpoint of its own",
            out.read_text,
            lambda text: f"step {saved + 6} " in text or shrinks.poll() is not None,
        )
        net.cut("zlt2")
        shrunk = f"{lost}; the script starts again on 1 of 2 machines (1 rank): worker-1"
        until(
            "it trains on one",
            out.read_text,
            lambda text: len(losses(text.partition(shrunk)[2])) > 2 or shrinks.poll() is not None,
        )
        shrinks.send_signal(signal.SIGTERM)
        until("the elastic run has ended", lambda: shrinks.poll() is not None)
        elastic_output = out.read_text()
        assert shrinks.returncode == 128 + signal.SIGTERM, elastic_output
        before, _, after = elastic_output.partition(shrunk)
        assert f"[worker-2:1] resumes after step {saved}" in before
        assert "resumes after step" in after
        assert_no_processes()

    by_step = losses(text) | losses(elastic_output)
    reference = subprocess.run(
        [sys.executable, "train.py", "--steps", str(max(by_step)), "--checkpoints", "ref"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    expected = losses(reference.stdout)
    for step, loss in by_step.items():
        assert loss == pytest.approx(expected[step], abs=1e-5), step


def _without_sshd(pids: set[int]) -> list[str]:
    """Return the command lines of processes other than sshd."""
    matches = []
    for pid in pids:
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if line and "sshd" not in line:
            matches.append(line)
    return matches
