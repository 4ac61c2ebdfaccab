"""What Slurm says of a partition's nodes, held against what an agent is to offer of them."""

import logging
import re
import subprocess
import time
from collections.abc import Collection, Iterable, Sequence

from zerolab.contract.run_folder import RunFolder
from zerolab.errors import ConfigError
from zerolab.launcher.slurm.allocations import filled_nodes, running_jobs
from zerolab.launcher.slurm.settings import SlurmSettings

__all__ = ["await_partition", "count_ready", "nodes_ready", "partition_problems"]

logger = logging.getLogger(__name__)

_WAIT_S = 10.0
_ANSWER_S = 120.0
_GPUS = re.compile(r"(?:^|,)gpu(?::[^,:()]+)?:(\d+)")
"""In what Slurm calls generic resources: ``gpu:4`` and ``gpu:a100:4(S:0-1)``."""
_NOT_READY = (
    "down", "drain", "drng", "fail", "error", "unk", "maint", "reboot", "inval", "no_resp", "block",
)  # fmt: skip
"""How the states begin in which Slurm starts no job on a node."""
_DRAINING = ("draining", "drng")
_ITS_OWN = ("-p", "--partition", "-w", "--nodelist", "-C", "--constraint", "-M", "--clusters")
"""Options of sbatch that choose nodes in their own way."""


def await_partition(settings: SlurmSettings) -> None:
    """See that Slurm has the nodes that are to be offered; wait until it answers.

    Raises:
        ConfigError: With what it does not have.
    """
    if _chooses(settings):
        return
    while True:
        try:
            lines = _ask(settings.partition, "%P %c %G")
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
    """Say what of the settings no nodes of the partition hold.

    Args:
        settings: Of the agent.
        lines: ``PARTITION CPUS GRES`` of each node; the default partition's name ends in ``*``.
    """
    nodes = _of_partition(settings, lines)
    where = f"partition {settings.partition or nodes[0][0].rstrip('*')}" if nodes else "it"
    if not nodes:
        named = settings.partition or "(the default one)"
        return [f"resource_manager.partition: must be one that has nodes, got {named}"]
    problems = []
    if settings.nodes > len(nodes):
        most = f"must be at most {len(nodes)}, the nodes of {where} (sinfo)"
        problems.append(f"resource_manager.nodes: {most}, got {settings.nodes}")
    what = "CPUs"
    counts = [int(node[1]) for node in nodes]
    if settings.slot_type == "cuda":
        what = "GPUs"
        counts = [sum(map(int, _GPUS.findall(node[2]))) for node in nodes]
    # A cluster may give GPUs away without counting them; then sbatch has the word.
    largest = max(counts)
    if largest and settings.slots_per_node > largest:
        most = f"must be at most {largest}, the {what} of the largest node of {where} (sinfo)"
        problems.append(f"resource_manager.slots_per_node: {most}, got {settings.slots_per_node}")
    return problems


def nodes_ready(settings: SlurmSettings, runs: Iterable[RunFolder] = ()) -> int | None:
    """Count the nodes on which a job of ours runs or may start, now or when others have ended.

    One that is being drained starts nothing new; while runs of ours fill it, it is still there.

    Args:
        settings: Of the agent.
        runs: Folders of its runs.

    Returns:
        None where that is not known: Slurm does not answer, or sbatch's own options choose.
    """
    if _chooses(settings):
        return None
    try:
        lines = _ask(settings.partition, "%P %T %N")
        drained = any(line.split()[1].startswith(_DRAINING) for line in lines)
        ours = filled_nodes(running_jobs(runs), settings.slots_per_node) if drained else ()
    except OSError as error:
        logger.info("Slurm: %s", error)
        return None
    return count_ready(settings, lines, ours)


def count_ready(settings: SlurmSettings, lines: Sequence[str], ours: Collection[str] = ()) -> int:
    """Count the nodes that are neither lost nor closed, or closed to all but runs of ours.

    Args:
        settings: Of the agent.
        lines: ``PARTITION STATE NAME`` of each node; the state of one that is silent ends in ``*``.
        ours: Nodes that runs of ours fill.
    """

    def there(state: str, name: str) -> bool:
        if state.endswith("*"):
            return False
        return not state.startswith(_NOT_READY) or (state.startswith(_DRAINING) and name in ours)

    nodes = _of_partition(settings, lines)
    return sum(there(state.lower(), name) for _, state, name in nodes)


def _chooses(settings: SlurmSettings) -> bool:
    return any(word.startswith(_ITS_OWN) for word in settings.sbatch_args)


def _of_partition(settings: SlurmSettings, lines: Sequence[str]) -> list[list[str]]:
    nodes = [line.split(maxsplit=2) for line in lines]
    default = [node for node in nodes if node[0].endswith("*")]
    return default if default and not settings.partition else nodes


def _ask(partition: str, form: str) -> list[str]:
    """Ask for the nodes.

    Raises:
        OSError: If Slurm does not answer.
    """
    words = ["sinfo", "--noheader", "--Node", f"--format={form}"]
    words += [f"--partition={partition}"] if partition else []
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=_ANSWER_S)
    except subprocess.TimeoutExpired:
        raise OSError(f"no answer within {_ANSWER_S:g} s") from None
    if done.returncode:
        raise OSError(done.stderr.strip() or f"exit code {done.returncode}")
    return [line for line in done.stdout.splitlines() if line.strip()]
