"""A job of Slurm, through its commands: sbatch, squeue, scontrol, scancel."""

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
from zerolab.files import write_atomic
from zerolab.launcher.slurm.settings import SlurmSettings

__all__ = [
    "ENDED",
    "cancel",
    "check_installed",
    "job_state",
    "job_words",
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
"""States after which nothing of a job runs any more; ``GONE`` is what Slurm has forgotten."""


def check_installed() -> None:
    """See that Slurm's commands are there.

    Raises:
        ConfigError: With those that are not.
    """
    missing = [
        name for name in ("sbatch", "scontrol", "scancel", "sinfo") if shutil.which(name) is None
    ]
    if missing:
        problem = f"{', '.join(missing)}: not installed on this machine; start the agent where a "
        raise ConfigError("slurm", [problem + "job of Slurm can be submitted"])


def write_job_script(run_dir: Path, interpreter: str = sys.executable) -> Path:
    """Write the script of a job, which starts the launcher of each node; return its path.

    Args:
        run_dir: Directory of the run, which all nodes see.
        interpreter: Python of the nodes.
    """
    words = ["srun", "--kill-on-bad-exit=0", interpreter, "-P", "-m"]
    words += ["zerolab.launcher.slurm.worker", str(run_dir)]
    log = shlex.quote(str(RunFolder(run_dir).launcher_log))
    script = run_dir / "job.sh"
    text = f"#!/bin/sh\nexec {shlex.join(words)} >>{log} 2>&1\n"
    write_atomic(script, os.fsencode(text), mode=0o700)
    return script


def job_words(
    settings: SlurmSettings,
    run_dir: str,
    name: str,
    sizes: Sequence[int],
    *,
    slots_per_rank: int = 1,
) -> list[str]:
    """Return the command that submits the script of a run, without the script's path.

    Args:
        settings: Of the pool.
        run_dir: Directory of the run, which all nodes see.
        name: Of the job.
        sizes: Ranks on each node.
        slots_per_rank: Slots of each; a CPU for every slot.
    """
    nodes = len(sizes)
    words = ["sbatch", "--parsable", "--no-requeue", f"--job-name={name}", f"--nodes={nodes}"]
    cpus = max(sizes) * slots_per_rank
    words += [f"--ntasks={nodes}", "--ntasks-per-node=1", f"--cpus-per-task={cpus}"]
    # The script writes the log: in a name for --output Slurm would replace % and backslashes.
    words += [f"--signal=TERM@{settings.grace_s}", "--output=/dev/null"]
    words += ["--open-mode=append", f"--chdir={run_dir}"]
    if settings.partition:
        words.append(f"--partition={settings.partition}")
    return [*words, *settings.sbatch_args]


def submit(words: Sequence[str]) -> str:
    """Submit a job; return its number.

    Raises:
        ConfigError: If Slurm refuses it, with what it says.
    """
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError("sbatch", [done.stderr.strip() or f"exit code {done.returncode}"])
    return done.stdout.strip().partition(";")[0]


def job_state(job: str) -> str | None:
    """Return the state of a job; None when Slurm does not answer now."""
    words = ["scontrol", "--oneliner", "show", "job", job]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        return "GONE" if "Invalid job id" in done.stderr else None
    for word in done.stdout.split():
        name, _, value = word.partition("=")
        if name == "JobState":
            return value
    return None


def signal_job(job: str) -> None:
    """Send SIGTERM to a job's ranks: they may checkpoint. One that waits is canceled."""
    _cancel(["--signal=TERM", job])
    _cancel(["--state=PENDING", job])


def cancel(job: str) -> None:
    """End a job now."""
    _cancel(["--signal=KILL", job])
    _cancel([job])


def _cancel(words: Sequence[str]) -> None:
    done = subprocess.run(["scancel", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        logger.info("scancel %s: %s", " ".join(words), done.stderr.strip())
