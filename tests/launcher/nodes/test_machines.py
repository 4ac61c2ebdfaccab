"""Two machines train together over a network; one is cut off, and training goes on later."""

import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.launcher.nodes.namespaces import network
from tests.launcher.nodes.sshd import Keys, Machine, sshd
from tests.waiting import free_port, until
from zerolab.contract.spec import EXIT_INFRASTRUCTURE

pytestmark = [pytest.mark.processes, pytest.mark.machines, pytest.mark.slow]

SCRIPT = Path("examples/hostfile/train.py").resolve()
STEPS = 12
MORE = 40


def losses(text: str) -> dict[int, float]:
    """Step to loss, as the script prints them."""
    found = re.findall(r"step (\d+) loss ([\d.]+)", text)
    return {int(step): float(loss) for step, loss in found}


def test_a_machine_that_is_cut_off_ends_the_run_which_goes_on_on_both_on_one_and_elastic(
    tmp_path: Path,
) -> None:
    zerolab = str(Path(sys.executable).with_name("zerolab"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ZEROLAB_HOME": str(tmp_path / "home")}
    (tmp_path / "hosts").write_text("worker-1 slots=2\nworker-2 slots=1\n")
    keys = Keys(tmp_path / "keys")

    def launch(*words: str, out: Path) -> subprocess.Popen[bytes]:
        command = [zerolab, "launch", "--hostfile", "hosts", "--ssh-config", str(keys.config)]
        command += ["--node-timeout", "4", "--master_port", str(free_port()), *words]
        with out.open("wb") as output:
            return subprocess.Popen(
                command, cwd=tmp_path, stdout=output, stderr=output, env=environment
            )

    script = [str(SCRIPT), "--steps", str(STEPS), "--save-every", "4"]
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

        def nothing_left() -> None:
            """But the sshd itself, and what it still has for the connection."""
            for name in net.names:
                until(
                    "nothing is left",
                    lambda name=name: _ours(set(net.processes(name)) - servers[name]),  # type: ignore[misc]
                    lambda left: not left,
                )

        out = tmp_path / "cut"
        cut = launch(*script, "--pause", "0.3", out=out)
        until(
            "a checkpoint is there, and training goes on",
            out.read_text,
            lambda text: "step 6 " in text or cut.poll() is not None,
        )
        net.cut("zlt2")
        until("the run has ended", lambda: cut.poll() is not None)
        text = out.read_text()
        assert cut.returncode == EXIT_INFRASTRUCTURE, text
        assert "worker-2: the node is lost: it gave no sign of life for 4 s" in text
        nothing_left()
        net.mend("zlt2")
        assert max(losses(text)) < STEPS

        out = tmp_path / "both"
        both = launch(*script, out=out)
        until("the run on both has ended", lambda: both.poll() is not None)
        again = out.read_text()
        assert both.returncode == 0, again
        assert "[worker-2:2] goes on after step 4" in again

        out = tmp_path / "one"
        more = [str(SCRIPT), "--steps", str(STEPS + 2)]
        one = launch("--include", "worker-1", *more, out=out)
        until("the run on one has ended", lambda: one.poll() is not None)
        last = out.read_text()
        assert one.returncode == 0, last
        assert f"goes on after step {STEPS}" in last

        out = tmp_path / "elastic"
        more = [str(SCRIPT), "--steps", str(MORE), "--save-every", "4", "--pause", "0.3"]
        shrinks = launch("--elastic", *more, out=out)
        until(
            "it trains on both",
            out.read_text,
            lambda text: f"step {STEPS + 5} " in text or shrinks.poll() is not None,
        )
        net.cut("zlt2")
        until("the elastic run has ended", lambda: shrinks.poll() is not None)
        rest = out.read_text()
        assert shrinks.returncode == 0, rest
        assert (
            "worker-2: the node is lost: it gave no sign of life for 4 s; the script starts "
            "again on 1 of 2 machines (2 ranks): worker-1"
        ) in rest
        nothing_left()

    reference = subprocess.run(
        [sys.executable, *script[:2], str(MORE), "--checkpoints", "ref"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    expected = losses(reference.stdout)
    for step, loss in (losses(text) | losses(again) | losses(last) | losses(rest)).items():
        assert loss == pytest.approx(expected[step], abs=1e-5), step


def _ours(pids: set[int]) -> list[str]:
    """Command lines of processes that are no sshd."""
    found = []
    for pid in pids:
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if line and "sshd" not in line:
            found.append(line)
    return found
