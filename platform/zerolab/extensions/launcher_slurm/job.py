"""Job of Slurm, through the commands sbatch, squeue, scontrol and scancel."""

import logging
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from zerolab.contract.run_folder import RunFolder
from zerolab.errors import ConfigError
from zerolab.extensions.launcher_slurm.settings import SlurmSettings
from zerolab.files import write_atomic

__all__ = [
    "ENDED",
    "cancel",
    "check_installed",
    "job_state",
    "sbatch_command",
    "signal_job",
    "submit",
    "write_job_script",
]

logger = logging.getLogger(__name__)

ENDED = frozenset(
    {
        "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
        "PREEMPTED", "TIMEOUT", "REVOKED", "GONE",
    }
)  # fmt: skip
"""Final states of a job; ``GONE`` is a job that Slurm no longer knows."""


def check_installed() -> None:
    """Check that Slurm's commands exist.

    Raises:
        ConfigError: With the missing ones.
    """
    missing = [
        name for name in ("sbatch", "scontrol", "scancel", "sinfo") if shutil.which(name) is None
    ]
    if missing:
        problem = f"{', '.join(missing)}: not installed on this machine; start the agent on a "
        raise ConfigError("slurm", [problem + "job of Slurm can be submitted"])


def write_job_script(run_dir: Path, interpreter: str = sys.executable) -> Path:
    """Write the script of a job, which starts the launcher of each node; return its path.

    Args:
        run_dir: Directory of the run, which all nodes see.
        interpreter: Python of the nodes.
    """
    command = ["srun", "--kill-on-bad-exit=0", interpreter, "-P", "-m"]
    command += ["zerolab.extensions.launcher_slurm.worker", str(run_dir)]
    log = shlex.quote(str(RunFolder(run_dir).launcher_log))
    script = run_dir / "job.sh"
    text = f"#!/bin/sh\nexec {shlex.join(command)} >>{log} 2>&1\n"
    write_atomic(script, os.fsencode(text), mode=0o700)
    return script


def sbatch_command(
    settings: SlurmSettings,
    run_dir: str,
    name: str,
    sizes: Sequence[int],
    *,
    slots_per_rank: int = 1,
) -> list[str]:
    """Return the command that submits the script of a run, without the script's path.

    Args:
        settings: Settings of the pool.
        run_dir: Directory of the run, which all nodes see.
        name: Name of the job.
        sizes: Ranks on each node.
        slots_per_rank: Slots of a rank; a CPU for every slot.
    """
    nodes = len(sizes)
    command = ["sbatch", "--parsable", "--no-requeue", f"--job-name={name}", f"--nodes={nodes}"]
    cpus = max(sizes) * slots_per_rank
    command += [f"--ntasks={nodes}", "--ntasks-per-node=1", f"--cpus-per-task={cpus}"]
    # The script writes the log: in a name for --output Slurm would replace % and backslashes.
    command += [f"--signal=TERM@{settings.grace_s}", "--output=/dev/null"]
    command += ["--open-mode=append", f"--chdir={run_dir}"]
    if settings.partition:
        command.append(f"--partition={settings.partition}")
    return [*command, *settings.sbatch_args]


def submit(command: Sequence[str]) -> str:
    """Submit a job; return its number.

    Raises:
        ConfigError: If Slurm rejects it, with its message.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError("sbatch", [done.stderr.strip() or f"exit code {done.returncode}"])
    return done.stdout.strip().partition(";")[0]


def job_state(job: str) -> str | None:
    """Return the state of a job; None if Slurm does not respond now."""
    command = ["scontrol", "--oneliner", "show", "job", job]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return "GONE" if "Invalid job id" in done.stderr else None
    for word in done.stdout.split():
        name, _, value = word.partition("=")
        if name == "JobState":
            return value
    return None


def signal_job(job: str) -> None:
    """Send SIGTERM to a job's ranks, so that they can checkpoint. A waiting job is canceled."""
    _cancel(["--signal=TERM", job])
    _cancel(["--state=PENDING", job])


def cancel(job: str) -> None:
    """Cancel a job immediately."""
    _cancel(["--signal=KILL", job])
    _cancel([job])


def _cancel(arguments: Sequence[str]) -> None:
    done = subprocess.run(["scancel", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        logger.info("`scancel %s` failed: %s", " ".join(arguments), done.stderr.strip())
