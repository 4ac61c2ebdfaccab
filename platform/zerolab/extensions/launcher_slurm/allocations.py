"""Slurm allocations of an agent's runs, from their directories and from Slurm."""

import os
import subprocess
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from zerolab.contract.run_folder import RunFolder
from zerolab.files import read_json, write_json

__all__ = ["RunningJob", "filled_nodes", "job_of", "running_jobs", "save_job"]

_JOB_FILE = "slurm.json"
"""File ``{"job", "sizes"}`` in a run's directory: the job's number and its slots on each node."""
_ANSWER_S = 120.0


@dataclass(frozen=True)
class RunningJob:
    """A running job."""

    sizes: tuple[int, ...]
    """Slots on each of its nodes; which nodes have fewer is not known."""
    nodes: str
    """Names of its nodes in Slurm's short form, e.g. ``n[1-3]``."""


def save_job(folder: RunFolder, job: str, sizes: Iterable[int]) -> None:
    """Save the job of a run, for :func:`job_of` and :func:`running_jobs`."""
    write_json(folder.path / _JOB_FILE, {"job": job, "sizes": list(sizes)})


def job_of(folder: RunFolder) -> str | None:
    """Return the number of a run's job; None if it has none yet."""
    saved = read_json(folder.path / _JOB_FILE)
    return None if saved is None else str(saved["job"])


def running_jobs(runs: Iterable[RunFolder]) -> list[RunningJob]:
    """Return the jobs of runs that Slurm has started and not ended.

    Raises:
        OSError: If Slurm does not respond.
    """
    sizes = {}
    for folder in runs:
        saved = None if folder.exit.exists() else read_json(folder.path / _JOB_FILE)
        if saved is not None:
            sizes[str(saved["job"])] = tuple(saved["sizes"])
    if not sizes:
        return []
    command = [
        "squeue",
        "--noheader",
        "--states=RUNNING",
        f"--user={os.getuid()}",
        "--format=%A %N",
    ]
    rows = [line.split(maxsplit=1) for line in _lines(command)]
    return [RunningJob(sizes[row[0]], row[1]) for row in rows if len(row) == 2 and row[0] in sizes]


def filled_nodes(jobs: Collection[RunningJob], slots_per_node: int) -> set[str]:
    """Return the names of nodes whose slots are certainly all in use by jobs.

    Raises:
        OSError: If Slurm does not respond.
    """
    used: Counter[str] = Counter()
    for job in jobs:
        for name in _lines(["scontrol", "show", "hostnames", job.nodes]):
            used[name] += min(job.sizes)
    return {name for name, slots in used.items() if slots >= slots_per_node}


def _lines(command: list[str]) -> list[str]:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_ANSWER_S
        )
    except subprocess.TimeoutExpired:
        raise OSError(f"{command[0]}: no answer within {_ANSWER_S:g} s") from None
    if done.returncode:
        raise OSError(f"{command[0]}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return [line for line in done.stdout.splitlines() if line.strip()]
