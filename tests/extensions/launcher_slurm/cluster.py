"""A real Slurm on this machine: two nodes, each in a network namespace."""

import os
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import filelock
import pytest

from tests.extensions.launcher_ssh.namespaces import Network, network
from tests.waiting import until

__all__ = ["Cluster", "cluster"]

CONFIG = """
ClusterName=zerolab
SlurmctldHost={host}(10.78.0.254)
SlurmctldPort=16817
SlurmdPort=16818
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={munge}
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool_%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd_%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd_%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout=10
KillWait=120
MinJobAge=300
SchedulerParameters=sched_min_interval=100000
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
NodeName=n1 NodeAddr=10.78.0.1 CPUs={cpus} State=UNKNOWN
NodeName=n2 NodeAddr=10.78.0.2 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
PartitionName=low Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=120
PartitionName=urgent Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


class Cluster:
    """Slurm's daemons, within the context of :func:`cluster`."""

    def __init__(self, folder: Path, net: Network) -> None:
        self.folder = folder
        self.net = net
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def states(self) -> str:
        """Return the states of the nodes."""
        command = ["sinfo", "--noheader", "--Node", "--partition=all", "--format=%N %T"]
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=False
        )
        return done.stdout

    def change(self, setting: str, value: str) -> None:
        """Change a setting of a cluster whose nodes both respond."""
        file = self.folder / "slurm.conf"
        file.write_text(re.sub(rf"(?m)^{setting}=.*$", f"{setting}={value}", file.read_text()))
        subprocess.run(["scontrol", "reconfigure"], env=self.environment, check=True)


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Provide a cluster; skip the test if that is not possible."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    needed = ["slurmctld", "slurmd", "munged", "sbatch", "srun", "nsenter"]
    programs = {name: shutil.which(name, path=path) for name in needed}
    missing = [name for name, program in programs.items() if program is None]
    if missing:
        pytest.skip(f"Slurm: {', '.join(missing)} not installed (slurmctld, slurmd, munge)")
    folder.mkdir(mode=0o755, parents=True)
    with ExitStack() as stack:
        # Ports and addresses are unique on this machine: other tests wait for them.
        stack.enter_context(filelock.FileLock(Path(tempfile.gettempdir()) / "zerolab-slurm.lock"))
        net = stack.enter_context(network("zls", 78))
        for name in ("state", "spool_n1", "spool_n2"):
            (folder / name).mkdir()
        munge = folder / "munge.socket"
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o600)
        text = CONFIG.format(
            folder=folder, host=socket.gethostname(), munge=munge, cpus=os.cpu_count() or 1
        )
        (folder / "slurm.conf").write_text(text)
        created = Cluster(folder, net)
        munged = [str(programs["munged"]), "--foreground", "--force", f"--socket={munge}"]
        munged += [f"--key-file={folder}/munge.key", f"--log-file={folder}/munge.log"]
        munged += [f"--pid-file={folder}/munge.pid", f"--seed-file={folder}/munge.seed"]
        stack.enter_context(_daemon(munged, created))
        until("munged listens", munge.exists)
        stack.enter_context(_daemon([str(programs["slurmctld"]), "-D", "-c"], created))
        for node, name in zip(("n1", "n2"), net.names, strict=True):
            # Not `ip netns exec`: it mounts another /sys, without control groups.
            enter = ["nsenter", f"--net=/var/run/netns/{name}"]
            stack.enter_context(
                _daemon([*enter, str(programs["slurmd"]), "-D", "-N", node], created)
            )
        until(
            "both nodes are idle",
            created.states,
            lambda states: states.count("idle") == 2 and "idle*" not in states,
            details=lambda: "\n".join(
                log.read_text(errors="replace")[-1500:] for log in folder.glob("*.log")
            ),
        )
        yield created


@contextmanager
def _daemon(command: list[str], created: Cluster) -> Iterator[None]:
    with (created.folder / f"{Path(command[0]).name}.out").open("ab") as log:
        process = subprocess.Popen(
            command, env=created.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
