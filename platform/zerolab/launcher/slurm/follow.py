"""Follows one job: ``python -m zerolab.launcher.slurm.follow PARENT RUN_JSON``, one process a run.

It submits the job, waits for its end, and leaves how the run ended in its directory. SIGTERM is
passed on to the ranks. It dies with its parent, and the job does not: the next agent cancels it.
"""

import os
import signal
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec

from zerolab.contract.nodes import merge_outcomes, node_capacity_problem
from zerolab.contract.outcome import Outcome, read_outcome, write_outcome
from zerolab.contract.run_folder import RunFolder
from zerolab.contract.spec import (
    EXIT_INFRASTRUCTURE,
    EXIT_PREEMPTED,
    EXIT_USER_ERROR,
    Nodes,
    read_run_spec,
    write_run_spec,
)
from zerolab.errors import ConfigError
from zerolab.launcher.slurm.allocations import job_of, note_job, running_jobs
from zerolab.launcher.slurm.job import (
    ENDED,
    cancel,
    job_state,
    job_words,
    signal_job,
    submit,
    write_job_script,
)
from zerolab.launcher.slurm.partition import nodes_ready
from zerolab.launcher.slurm.settings import SlurmSettings, settings_of_environment
from zerolab.launcher.slurm.worker import node_folder, sizes_of
from zerolab.linux import die_with_parent

__all__ = ["cancel_job_of", "follow", "main", "outcome_of"]

_POLL_S = 1.0
_LOOK_S = 3.0
_LACKING_S = 15.0
"""A job waits for nodes that Slurm has lost no longer than this, in seconds: the agent has told the
server of them by then."""
_LAST_FILES_S = 10.0
"""For the outcomes of the nodes to be seen in a shared directory, when the job has ended."""


def main() -> int:
    """Submit a job and follow it to its end."""
    parent, spec_file = sys.argv[1:]
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _frame: asked.append(number))
    die_with_parent(int(parent))
    folder = RunFolder(Path(spec_file).parent)
    write_outcome(folder.path, follow(folder, settings_of_environment(), asked))
    return 0


def follow(folder: RunFolder, settings: SlurmSettings, asked: Collection[int]) -> Outcome:
    """Submit the job of a run, and wait for its end.

    Args:
        folder: Of the run; those of the agent's other runs lie beside it.
        settings: Of the pool.
        asked: Signals that have come; with the first one the job is told to leave.
    """
    spec = read_run_spec(folder.spec)
    if spec.hosts:
        told = (
            "resources.hostfile: must be left out in a pool of Slurm, which names its nodes itself"
        )
        return Outcome(EXIT_USER_ERROR, f"{told}; take slots_per_trial")
    problem = node_capacity_problem(spec.slots, spec.slots_per_rank, settings.nodes_slots)
    if problem is not None:
        return Outcome(EXIT_USER_ERROR, problem)
    sizes = sizes_of(spec.slots, settings.slots_per_node // spec.slots_per_rank)
    changed = msgspec.structs.replace(
        spec, nodes=Nodes(tuple(sizes), 0, "", 0), grace_s=float(settings.grace_s)
    )
    write_run_spec(changed, folder.spec)
    name = f"zerolab-{spec.experiment_id}-{spec.trial_id}-{spec.run_id}"
    try:
        words = job_words(
            settings, str(folder.path), name, sizes, slots_per_rank=spec.slots_per_rank
        )
        job = submit([*words, str(write_job_script(folder.path))])
    except ConfigError as error:
        return Outcome(EXIT_USER_ERROR, f"Slurm does not take the job: {error.problems[0]}")
    held = [ranks * spec.slots_per_rank for ranks in sizes]
    note_job(folder, job, held)
    state, passed = job_state(job), False
    lack, left = _Lack(settings, folder, held), None
    while state not in ENDED:
        if asked and not passed:
            passed = True
            signal_job(job)
        if state == "PENDING" and left is None:
            left = lack.what_is_left()
            if left is not None:
                cancel(job)
        time.sleep(_POLL_S)
        state = job_state(job) or state
    if left is not None:
        waited = f"job {job} waited for {len(sizes)} node(s), and Slurm has {left}"
        return Outcome(EXIT_PREEMPTED, f"{waited}: the trial takes the slots that are there")
    return outcome_of(folder, job, state or "GONE", len(sizes), told=passed)


class _Lack:
    """Watches whether Slurm has the nodes for which a job waits, beside those of our other runs.

    Nodes that jobs of others hold are not missing. Those of ours are: the server gave this run
    slots that none of them had.

    Args:
        settings: Of the pool.
        folder: Of the run; those of the agent's other runs lie beside it.
        sizes: Slots that the job needs on each node.
    """

    def __init__(self, settings: SlurmSettings, folder: RunFolder, sizes: Sequence[int]) -> None:
        self._settings = settings
        self._folder = folder
        self._sizes = sizes
        self._next_look = 0.0
        self._since: float | None = None

    def what_is_left(self) -> str | None:
        """Say how many nodes there are when they have been too few for long; else None."""
        now = time.monotonic()
        if now < self._next_look:
            return None
        self._next_look = now + _LOOK_S
        told = self._look()
        if told is None:
            self._since = None
            return None
        self._since = now if self._since is None else self._since
        return told if now - self._since >= _LACKING_S else None

    def _look(self) -> str | None:
        runs = [RunFolder(path) for path in self._folder.path.parent.iterdir()]
        ready = nodes_ready(self._settings, runs)
        if ready is None or ready >= self._settings.nodes:
            return None
        if ready < len(self._sizes):
            return f"{ready} that it can use"
        try:
            held = sum(sum(job.sizes) for job in running_jobs(runs))
        except OSError:
            return None
        there = ready * self._settings.slots_per_node
        if held + sum(self._sizes) <= there:
            return None
        return f"{ready}, of whose {there} slot(s) other runs hold {held}"


def outcome_of(folder: RunFolder, job: str, state: str, nodes: int, *, told: bool) -> Outcome:
    """Say how a job ended: by what its nodes have told, and else by its state.

    Args:
        folder: Of the run.
        job: Number of the job.
        state: The job's last state.
        nodes: How many it had.
        told: Whether it was asked to leave.
    """
    deadline = time.monotonic() + _LAST_FILES_S
    found: dict[str, Outcome] = {}
    while True:
        late = time.monotonic() > deadline  # asked before the last look, however long that takes
        for rank in range(nodes):
            end = read_outcome(node_folder(folder, rank).path)
            if end is not None:
                found[f"node {rank}"] = end
        if late or len(found) == nodes or state != "COMPLETED":
            break
        time.sleep(_POLL_S)
    if len(found) == nodes and state != "NODE_FAIL":
        name, outcome = merge_outcomes(found)
        reason = outcome.reason if nodes == 1 or not outcome.reason else f"{name}: {outcome.reason}"
        return msgspec.structs.replace(outcome, reason=reason)
    if state == "CANCELLED" and told and not found:
        return Outcome(EXIT_PREEMPTED, f"job {job} was canceled before it began")
    why = f"Slurm's job {job} ended as {state}"
    return Outcome(EXIT_INFRASTRUCTURE, why, told=told)


def cancel_job_of(folder: RunFolder) -> bool:
    """End the job of a run whose follower is gone; return whether there was one."""
    job = job_of(folder)
    if job is None or (job_state(job) or "") in ENDED:
        return False
    cancel(job)
    return True


if __name__ == "__main__":
    os.umask(0o077)
    sys.exit(main())
