"""Nodes of a partition in Slurm, compared with the agent's settings."""

import logging
import re
import subprocess
import time
from collections.abc import Collection, Iterable, Sequence

from zerolab.contract.run_folder import RunFolder
from zerolab.errors import ConfigError
from zerolab.extensions.launcher_slurm.allocations import filled_nodes, running_jobs
from zerolab.extensions.launcher_slurm.settings import SlurmSettings

__all__ = ["count_ready", "nodes_ready", "partition_problems", "wait_for_partition"]

logger = logging.getLogger(__name__)

_WAIT_S = 10.0
_ANSWER_S = 120.0
_GPUS = re.compile(r"(?:^|,)gpu(?::[^,:()]+)?:(\d+)")
"""GPUs in Slurm's generic resources: ``gpu:4`` and ``gpu:a100:4(S:0-1)``."""
_NOT_READY = (
    "down", "drain", "drng", "fail", "error", "unk", "maint", "reboot", "inval", "no_resp", "block",
)  # fmt: skip
"""Prefixes of states in which Slurm starts no job on a node."""
_DRAINING = ("draining", "drng")
_NODE_OPTIONS = ("-p", "--partition", "-w", "--nodelist", "-C", "--constraint", "-M", "--clusters")
"""Options of sbatch that select nodes."""


def wait_for_partition(settings: SlurmSettings) -> None:
    """Check that Slurm has the nodes of the settings; wait until it responds.

    Raises:
        ConfigError: With the missing ones.
    """
    if _selects_nodes(settings):
        return
    while True:
        try:
            lines = _query_nodes(settings.partition, "%P %c %G")
        except OSError as error:
            text = "Slurm does not answer (sinfo: %s); no slots are offered before it does"
            logger.warning(text, error)
            time.sleep(_WAIT_S)
            continue
        problems = partition_problems(settings, lines)
        if problems:
            raise ConfigError("resource_manager", problems)
        return


def partition_problems(settings: SlurmSettings, lines: Sequence[str]) -> list[str]:
    """Return settings that the nodes of the partition cannot satisfy.

    Args:
        settings: Settings of the agent.
        lines: ``PARTITION CPUS GRES`` of each node; the default partition's name ends in ``*``.
    """
    nodes = _partition_rows(settings, lines)
    partition_text = f"partition {settings.partition or nodes[0][0].rstrip('*')}" if nodes else "it"
    if not nodes:
        partition_name = settings.partition or "(the default one)"
        return [f"resource_manager.partition: must be one that has nodes, got {partition_name}"]
    problems = []
    if settings.nodes > len(nodes):
        requirement = f"must be at most {len(nodes)}, the nodes of {partition_text} (sinfo)"
        problems.append(f"resource_manager.nodes: {requirement}, got {settings.nodes}")
    what = "CPUs"
    counts = [int(node[1]) for node in nodes]
    if settings.slot_type == "cuda":
        what = "GPUs"
        counts = [sum(map(int, _GPUS.findall(node[2]))) for node in nodes]
    # A cluster may assign GPUs without counting them; then sbatch decides.
    largest = max(counts)
    if largest and settings.slots_per_node > largest:
        requirement = (
            f"must be at most {largest}, the {what} of the largest node of {partition_text} (sinfo)"
        )
        problems.append(
            f"resource_manager.slots_per_node: {requirement}, got {settings.slots_per_node}"
        )
    return problems


def nodes_ready(settings: SlurmSettings, runs: Iterable[RunFolder] = ()) -> int | None:
    """Count the nodes on which this agent's jobs run or may start, now or after other jobs.

    A draining node starts no new job; while this agent's runs fill it, it still counts.

    Args:
        settings: Settings of the agent.
        runs: Directories of its runs.

    Returns:
        The number; None if Slurm does not respond, or options of sbatch select nodes.
    """
    if _selects_nodes(settings):
        return None
    try:
        lines = _query_nodes(settings.partition, "%P %T %N")
        drained = any(line.split()[1].startswith(_DRAINING) for line in lines)
        filled = filled_nodes(running_jobs(runs), settings.slots_per_node) if drained else ()
    except OSError as error:
        logger.info("Slurm: %s", error)
        return None
    return count_ready(settings, lines, filled)


def count_ready(settings: SlurmSettings, lines: Sequence[str], filled: Collection[str] = ()) -> int:
    """Count the nodes that are neither lost nor closed, or that this agent's runs fill.

    Args:
        settings: Settings of the agent.
        lines: ``PARTITION STATE NAME`` of each node; the state of an unresponsive node ends in
        ``*``.
        filled: Nodes that this agent's runs fill.
    """

    def is_available(state: str, name: str) -> bool:
        if state.endswith("*"):
            return False
        return not state.startswith(_NOT_READY) or (state.startswith(_DRAINING) and name in filled)

    nodes = _partition_rows(settings, lines)
    return sum(is_available(state.lower(), name) for _, state, name in nodes)


def _selects_nodes(settings: SlurmSettings) -> bool:
    return any(word.startswith(_NODE_OPTIONS) for word in settings.sbatch_args)


def _partition_rows(settings: SlurmSettings, lines: Sequence[str]) -> list[list[str]]:
    nodes = [line.split(maxsplit=2) for line in lines]
    default = [node for node in nodes if node[0].endswith("*")]
    return default if default and not settings.partition else nodes


def _query_nodes(partition: str, form: str) -> list[str]:
    """Query the nodes with sinfo.

    Raises:
        OSError: If Slurm does not respond.
    """
    command = ["sinfo", "--noheader", "--Node", f"--format={form}"]
    command += [f"--partition={partition}"] if partition else []
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_ANSWER_S
        )
    except subprocess.TimeoutExpired:
        raise OSError(f"no answer within {_ANSWER_S:g} s") from None
    if done.returncode:
        raise OSError(done.stderr.strip() or f"exit code {done.returncode}")
    return [line for line in done.stdout.splitlines() if line.strip()]
