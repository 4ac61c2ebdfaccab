"""Worker of a job's node: ``srun python -m zerolab.extensions.launcher_slurm.worker RUN_DIR``.

The nodes share the run's directory. The first one writes the rendezvous address there. Each node
has a subfolder ``nodes/N`` with links to the logs and the spool of the run.
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
from zerolab.linux import free_port, kill_descendants, own_process_tree, usable_cores

__all__ = ["main", "node_folder", "sizes_of"]

_POLL_S = 0.1
_RENDEZVOUS_TIMEOUT_S = 300.0
"""Maximum wait for the first node, in seconds."""


def sizes_of(slots: int, slots_per_node: int) -> list[int]:
    """Return the ranks of each node: as many as fit on all but the last."""
    full, remainder = divmod(slots, slots_per_node)
    return [slots_per_node] * full + ([remainder] if remainder else [])


def node_folder(folder: RunFolder, rank: int) -> RunFolder:
    """Return the folder of a node inside the run's."""
    return RunFolder(folder.path / "nodes" / str(rank))


def main() -> int:
    """Run the ranks of this node; return 0, their exit code, or 75 after a preemption."""
    folder = RunFolder(Path(sys.argv[1]))
    rank = int(os.environ["SLURM_NODEID"])
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: signals.append(number))
    own_process_tree(os.getppid())
    local_folder = node_folder(folder, rank)
    try:
        outcome = _run(folder, local_folder, rank, signals)
    except Exception as error:  # noqa: BLE001 - the process boundary
        outcome = Outcome(1, f"the node's launcher failed: {type(error).__name__}: {error}")
    local_folder.path.mkdir(parents=True, exist_ok=True)
    write_outcome(local_folder.path, outcome)
    kill_descendants()
    return shell_exit_code(outcome.exit_code)


def _run(folder: RunFolder, local_folder: RunFolder, rank: int, signals: list[int]) -> Outcome:
    local_folder.path.mkdir(parents=True, exist_ok=True)
    (folder.path / "spool").mkdir(mode=0o700, exist_ok=True)
    for name in ("logs", "spool"):
        with contextlib.suppress(FileExistsError):
            (local_folder.path / name).symlink_to(folder.path / name)
    spec = read_run_spec(folder.spec)
    assert spec.nodes is not None
    nodes = _exchange_rendezvous(folder, spec.nodes, rank)
    if nodes is None:
        return Outcome(1, "the first node did not report the rendezvous address")
    local_folder.create()
    local_spec: RunSpec = msgspec.structs.replace(
        spec, nodes=nodes, run_dir=str(local_folder.path), host_names=_nodes_of_job()
    )
    write_run_spec(local_spec, local_folder.spec)
    # Threads of a slot; a rank with several slots has a multiple.
    threads = str(max(1, usable_cores() // (local_spec.local_slots * local_spec.slots_per_rank)))
    environment = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)}
    process = start_launcher(local_folder, environment)
    passed = False
    while (code := process.poll()) is None:
        if (signals or _another_failed(folder, rank, len(nodes.slots))) and not passed:
            passed = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)
        time.sleep(_POLL_S)
    kill_leftovers(local_folder)
    outcome = read_outcome(local_folder.path)
    if outcome is not None:
        return outcome
    died = signal_text(-code) if code < 0 else f"code {code}"
    return Outcome(code or 1, f"the launcher ended with {died}", was_stopped=passed)


def _nodes_of_job() -> tuple[str, ...]:
    """Return the names of this job's nodes; empty if Slurm does not respond."""
    node_list = os.environ.get("SLURM_JOB_NODELIST", "")
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        command = ["scontrol", "show", "hostnames", node_list]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        if done.returncode == 0 and done.stdout.split():
            return tuple(done.stdout.split())
    return ()


def _another_failed(folder: RunFolder, rank: int, nodes: int) -> bool:
    """Return whether another node failed; ranks that still wait for its rendezvous would hang."""
    ends = (
        read_outcome(node_folder(folder, other).path) for other in range(nodes) if other != rank
    )
    return any(end is not None and end.exit_code not in {0, *CHECKPOINTED_EXITS} for end in ends)


def _exchange_rendezvous(folder: RunFolder, nodes: Nodes, rank: int) -> Nodes | None:
    """Write the rendezvous address, or wait until the first node has written it."""
    file = folder.path / "meeting.json"
    if rank == 0:
        write_json(file, {"address": _node_address(), "port": free_port()})
    deadline = time.monotonic() + _RENDEZVOUS_TIMEOUT_S
    while time.monotonic() < deadline:
        address = read_json(file)
        if address is not None:
            return Nodes(nodes.slots, rank, address["address"], address["port"])
        time.sleep(_POLL_S)
    return None


def _node_address() -> str:
    """Return the address of this node in the network over which Slurm started it."""
    other = os.environ.get("SLURM_LAUNCH_NODE_IPADDR") or socket.gethostname()
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((other, 9))  # UDP: nothing is sent
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()


if __name__ == "__main__":
    sys.exit(main())
