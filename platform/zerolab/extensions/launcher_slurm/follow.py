"""Follower of one job: ``python -m zerolab.extensions.launcher_slurm.follow PARENT RUN_JSON``.

It submits the job, waits for its end, and writes the outcome into the run's directory. It passes
SIGTERM on to the ranks. It dies with its parent, but the job does not: the next agent cancels it.
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
from zerolab.extensions.launcher_slurm.allocations import job_of, running_jobs, save_job
from zerolab.extensions.launcher_slurm.job import (
    ENDED,
    cancel,
    job_state,
    sbatch_command,
    signal_job,
    submit,
    write_job_script,
)
from zerolab.extensions.launcher_slurm.partition import nodes_ready
from zerolab.extensions.launcher_slurm.settings import SlurmSettings, settings_of_environment
from zerolab.extensions.launcher_slurm.worker import node_folder, sizes_of
from zerolab.linux import die_with_parent

__all__ = ["cancel_orphaned_job", "follow", "main", "outcome_of"]

_POLL_S = 1.0
_CHECK_S = 3.0
_LACKING_S = 15.0
"""Maximum wait of a job for nodes that Slurm has lost, in seconds; the agent has reported them to
the server by then."""
_LAST_FILES_S = 10.0
"""Seconds after the job's end until the nodes' outcomes are visible in a shared directory."""


def main() -> int:
    """Submit a job and follow it to its end."""
    parent, spec_file = sys.argv[1:]
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _frame: signals.append(number))
    die_with_parent(int(parent))
    folder = RunFolder(Path(spec_file).parent)
    write_outcome(folder.path, follow(folder, settings_of_environment(), signals))
    return 0


def follow(folder: RunFolder, settings: SlurmSettings, signals: Collection[int]) -> Outcome:
    """Submit the job of a run, and wait for its end.

    Args:
        folder: Directory of the run, next to those of the agent's other runs.
        settings: Settings of the pool.
        signals: Received signals; the first one preempts the job.
    """
    spec = read_run_spec(folder.spec)
    if spec.hosts:
        reason = (
            "resources.hostfile: must be left out in a pool of Slurm, which names its nodes itself"
        )
        return Outcome(EXIT_USER_ERROR, f"{reason}; take slots_per_trial")
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
        command = sbatch_command(
            settings, str(folder.path), name, sizes, slots_per_rank=spec.slots_per_rank
        )
        job = submit([*command, str(write_job_script(folder.path))])
    except ConfigError as error:
        return Outcome(EXIT_USER_ERROR, f"Slurm does not take the job: {error.problems[0]}")
    sizes_in_slots = [ranks * spec.slots_per_rank for ranks in sizes]
    save_job(folder, job, sizes_in_slots)
    state, passed = job_state(job), False
    node_shortage, shortage = _NodeShortage(settings, folder, sizes_in_slots), None
    while state not in ENDED:
        if signals and not passed:
            passed = True
            signal_job(job)
        if state == "PENDING" and shortage is None:
            shortage = node_shortage.lasting_shortage()
            if shortage is not None:
                cancel(job)
        time.sleep(_POLL_S)
        state = job_state(job) or state  # keep the last state while Slurm does not respond
    if shortage is not None:
        waited = f"job {job} waited for {len(sizes)} node(s), and Slurm has {shortage}"
        return Outcome(EXIT_PREEMPTED, f"{waited}: the trial uses the available slots")
    return outcome_of(folder, job, state or "GONE", len(sizes), is_stopped=passed)


class _NodeShortage:
    """Checks whether Slurm has enough nodes for a waiting job and this agent's other runs.

    Nodes in use by other users' jobs are not missing. Nodes in use by this agent's runs are: the
    server assigned slots to this run that no other run has.

    Args:
        settings: Settings of the pool.
        folder: Directory of the run, next to those of the agent's other runs.
        sizes: Slots that the job needs on each node.
    """

    def __init__(self, settings: SlurmSettings, folder: RunFolder, sizes: Sequence[int]) -> None:
        self._settings = settings
        self._folder = folder
        self._sizes = sizes
        self._next_check = 0.0
        self._since: float | None = None

    def lasting_shortage(self) -> str | None:
        """Return the available nodes as text if they have been too few for long, else None."""
        now = time.monotonic()
        if now < self._next_check:
            return None
        self._next_check = now + _CHECK_S
        description = self._check()
        if description is None:
            self._since = None
            return None
        self._since = now if self._since is None else self._since
        return description if now - self._since >= _LACKING_S else None

    def _check(self) -> str | None:
        runs = [RunFolder(path) for path in self._folder.path.parent.iterdir()]
        ready = nodes_ready(self._settings, runs)
        if ready is None or ready >= self._settings.nodes:
            return None
        if ready < len(self._sizes):
            return f"{ready} that it can use"
        try:
            used = sum(sum(job.sizes) for job in running_jobs(runs))
        except OSError:
            return None
        available = ready * self._settings.slots_per_node
        if used + sum(self._sizes) <= available:
            return None
        return f"{ready}, of whose {available} slot(s) other runs hold {used}"


def outcome_of(folder: RunFolder, job: str, state: str, nodes: int, *, is_stopped: bool) -> Outcome:
    """Return the outcome of a job, from its nodes' outcomes or else from its state.

    Args:
        folder: Directory of the run.
        job: Number of the job.
        state: The job's last state.
        nodes: Number of its nodes.
        is_stopped: The job was preempted.
    """
    deadline = time.monotonic() + _LAST_FILES_S
    outcomes: dict[str, Outcome] = {}
    while True:
        is_late = time.monotonic() > deadline  # read before the last check, which may take long
        for rank in range(nodes):
            end = read_outcome(node_folder(folder, rank).path)
            if end is not None:
                outcomes[f"node {rank}"] = end
        if is_late or len(outcomes) == nodes or state != "COMPLETED":
            break
        time.sleep(_POLL_S)
    if len(outcomes) == nodes and state != "NODE_FAIL":
        name, outcome = merge_outcomes(outcomes)
        reason = outcome.reason if nodes == 1 or not outcome.reason else f"{name}: {outcome.reason}"
        return msgspec.structs.replace(outcome, reason=reason)
    if state == "CANCELLED" and is_stopped and not outcomes:
        return Outcome(EXIT_PREEMPTED, f"job {job} was canceled before it started")
    ending = f"Slurm's job {job} ended as {state}"
    return Outcome(EXIT_INFRASTRUCTURE, ending, was_stopped=is_stopped)


def cancel_orphaned_job(folder: RunFolder) -> bool:
    """Cancel the job of a run whose follower has ended; return whether there was one."""
    job = job_of(folder)
    if job is None or (job_state(job) or "") in ENDED:
        return False
    cancel(job)
    return True


if __name__ == "__main__":
    os.umask(0o077)
    sys.exit(main())
