"""One node of a job: ``srun python -m zerolab.launcher.slurm.worker RUN_DIR``, once a node.

The nodes share the run's directory. The first one writes down where the ranks meet; each has a
folder of its own, ``nodes/N``, whose logs and spool are those of the run.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from zerolab.contract.nodes import shell_exit_code
from zerolab.contract.outcome import (
    CHECKPOINTED_EXITS,
    Outcome,
    read_outcome,
    signal_text,
    write_outcome,
)
from zerolab.contract.run_folder import RunFolder
from zerolab.contract.spec import Nodes, RunSpec, read_run_spec, write_run_spec
from zerolab.files import read_json, write_json
from zerolab.launcher.process import kill_leftovers, start_launcher
from zerolab.linux import free_port, head_a_family, kill_descendants, usable_cores

__all__ = ["main", "node_folder", "sizes_of"]

_POLL_S = 0.1
_MEET_S = 300.0
"""Longest wait for the first node, in seconds."""


def sizes_of(slots: int, slots_per_node: int) -> list[int]:
    """Ranks on each node: as many as fit on all but the last."""
    full, rest = divmod(slots, slots_per_node)
    return [slots_per_node] * full + ([rest] if rest else [])


def node_folder(folder: RunFolder, rank: int) -> RunFolder:
    """The folder of one node inside the run's."""
    return RunFolder(folder.path / "nodes" / str(rank))


def main() -> int:
    """Run the ranks of this node; return 0, their exit code, or 75 when they were preempted."""
    folder = RunFolder(Path(sys.argv[1]))
    rank = int(os.environ["SLURM_NODEID"])
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: asked.append(number))
    head_a_family(os.getppid())
    own = node_folder(folder, rank)
    try:
        outcome = _run(folder, own, rank, asked)
    except Exception as error:  # noqa: BLE001 - the process boundary
        outcome = Outcome(1, f"the node's launcher failed: {type(error).__name__}: {error}")
    own.path.mkdir(parents=True, exist_ok=True)
    write_outcome(own.path, outcome)
    kill_descendants()
    return shell_exit_code(outcome.exit_code)


def _run(folder: RunFolder, own: RunFolder, rank: int, asked: list[int]) -> Outcome:
    own.path.mkdir(parents=True, exist_ok=True)
    (folder.path / "spool").mkdir(mode=0o700, exist_ok=True)
    for name in ("logs", "spool"):
        with contextlib.suppress(FileExistsError):
            (own.path / name).symlink_to(folder.path / name)
    spec = read_run_spec(folder.spec)
    assert spec.nodes is not None
    nodes = _meet(folder, spec.nodes, rank)
    if nodes is None:
        return Outcome(1, "the first node did not say where the ranks meet")
    own.create()
    mine: RunSpec = msgspec.structs.replace(
        spec, nodes=nodes, run_dir=str(own.path), host_names=_nodes_of_job()
    )
    write_run_spec(mine, own.spec)
    # Of each slot: a rank with several takes as many times that.
    threads = str(max(1, usable_cores() // (mine.local_slots * mine.slots_per_rank)))
    environment = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)}
    process = start_launcher(own, environment)
    passed = False
    while (code := process.poll()) is None:
        if (asked or _another_failed(folder, rank, len(nodes.slots))) and not passed:
            passed = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)
        time.sleep(_POLL_S)
    kill_leftovers(own)
    outcome = read_outcome(own.path)
    if outcome is not None:
        return outcome
    died = signal_text(-code) if code < 0 else f"code {code}"
    return Outcome(code or 1, f"the launcher ended with {died}", told=passed)


def _nodes_of_job() -> tuple[str, ...]:
    """Return the names of the nodes of this job; none where Slurm does not say."""
    named = os.environ.get("SLURM_JOB_NODELIST", "")
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        words = ["scontrol", "show", "hostnames", named]
        done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
        if done.returncode == 0 and done.stdout.split():
            return tuple(done.stdout.split())
    return ()


def _another_failed(folder: RunFolder, rank: int, nodes: int) -> bool:
    """Whether another node's ranks have failed: ours may not have met them, and would wait."""
    ends = (
        read_outcome(node_folder(folder, other).path) for other in range(nodes) if other != rank
    )
    return any(end is not None and end.exit_code not in {0, *CHECKPOINTED_EXITS} for end in ends)


def _meet(folder: RunFolder, nodes: Nodes, rank: int) -> Nodes | None:
    """Say where the ranks meet, or wait until the first node has said so."""
    file = folder.path / "meeting.json"
    if rank == 0:
        write_json(file, {"address": _own_address(), "port": free_port()})
    deadline = time.monotonic() + _MEET_S
    while time.monotonic() < deadline:
        found = read_json(file)
        if found is not None:
            return Nodes(nodes.slots, rank, found["address"], found["port"])
        time.sleep(_POLL_S)
    return None


def _own_address() -> str:
    """The address of this node in the network over which Slurm has started it."""
    other = os.environ.get("SLURM_LAUNCH_NODE_IPADDR") or socket.gethostname()
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((other, 9))  # UDP: nothing is sent
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()


if __name__ == "__main__":
    sys.exit(main())
