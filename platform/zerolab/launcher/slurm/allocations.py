"""What the runs of one agent hold of the cluster, by their directories and by what Slurm says."""

import os
import subprocess
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from zerolab.contract.run_folder import RunFolder
from zerolab.files import read_json, write_json

__all__ = ["HeldJob", "filled_nodes", "job_of", "note_job", "running_jobs"]

_JOB_FILE = "slurm.json"
"""``{"job", "sizes"}`` in a run's directory: its number, and its slots on each of its nodes."""
_ANSWER_S = 120.0


@dataclass(frozen=True)
class HeldJob:
    """A job that runs."""

    sizes: tuple[int, ...]
    """Slots on each of its nodes; on which of them it has fewer is not known."""
    nodes: str
    """Names of its nodes in Slurm's short form, as ``n[1-3]``."""


def note_job(folder: RunFolder, job: str, sizes: Iterable[int]) -> None:
    """Write down which job a run is, for :func:`job_of` and :func:`running_jobs`."""
    write_json(folder.path / _JOB_FILE, {"job": job, "sizes": list(sizes)})


def job_of(folder: RunFolder) -> str | None:
    """Return the number of a run's job; None when it has none yet."""
    noted = read_json(folder.path / _JOB_FILE)
    return None if noted is None else str(noted["job"])


def running_jobs(runs: Iterable[RunFolder]) -> list[HeldJob]:
    """Return the jobs of some runs that Slurm has begun and not ended.

    Raises:
        OSError: If Slurm does not answer.
    """
    sizes = {}
    for folder in runs:
        noted = None if folder.exit.exists() else read_json(folder.path / _JOB_FILE)
        if noted is not None:
            sizes[str(noted["job"])] = tuple(noted["sizes"])
    if not sizes:
        return []
    words = ["squeue", "--noheader", "--states=RUNNING", f"--user={os.getuid()}", "--format=%A %N"]
    rows = [line.split(maxsplit=1) for line in _lines(words)]
    return [HeldJob(sizes[row[0]], row[1]) for row in rows if len(row) == 2 and row[0] in sizes]


def filled_nodes(jobs: Collection[HeldJob], slots_per_node: int) -> set[str]:
    """Return the names of the nodes of which jobs hold every slot for certain.

    Raises:
        OSError: If Slurm does not answer.
    """
    held: Counter[str] = Counter()
    for job in jobs:
        for name in _lines(["scontrol", "show", "hostnames", job.nodes]):
            held[name] += min(job.sizes)
    return {name for name, slots in held.items() if slots >= slots_per_node}


def _lines(words: list[str]) -> list[str]:
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=_ANSWER_S)
    except subprocess.TimeoutExpired:
        raise OSError(f"{words[0]}: no answer within {_ANSWER_S:g} s") from None
    if done.returncode:
        raise OSError(f"{words[0]}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return [line for line in done.stdout.splitlines() if line.strip()]
