"""A job of Slurm, through its commands: sbatch, squeue, scontrol, scancel."""

import logging
import shutil
import subprocess
import sys
from collections.abc import Sequence

from zerolab.errors import ConfigError
from zerolab.launcher.slurm.settings import SlurmSettings

__all__ = ["ENDED", "cancel", "check_installed", "job_state", "job_words", "signal_job", "submit"]

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


def job_words(
    settings: SlurmSettings,
    run_dir: str,
    name: str,
    sizes: Sequence[int],
    *,
    slots_per_rank: int = 1,
) -> list[str]:
    """The command that submits a run.

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
    words += [f"--signal=TERM@{settings.grace_s}", f"--output={run_dir}/logs/launcher.log"]
    words += ["--open-mode=append", f"--chdir={run_dir}"]
    if settings.partition:
        words.append(f"--partition={settings.partition}")
    inside = f"srun --kill-on-bad-exit=0 {sys.executable} -P -m zerolab.launcher.slurm.node"
    return [*words, *settings.sbatch_args, "--wrap", f"{inside} {run_dir}"]


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
