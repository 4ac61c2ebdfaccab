"""What Slurm says of a partition's nodes, held against what an agent is to offer of them."""

import logging
import re
import subprocess
import time
from collections.abc import Sequence

from zerolab.errors import ConfigError
from zerolab.launcher.slurm.settings import SlurmSettings

__all__ = ["await_partition", "partition_problems"]

logger = logging.getLogger(__name__)

_WAIT_S = 10.0
_ANSWER_S = 120.0
_GPUS = re.compile(r"(?:^|,)gpu(?::[^,:()]+)?:(\d+)")
"""In what Slurm calls generic resources: ``gpu:4`` and ``gpu:a100:4(S:0-1)``."""
_ITS_OWN = ("-p", "--partition", "-w", "--nodelist", "-C", "--constraint", "-M", "--clusters")
"""Options of sbatch that choose nodes in their own way."""


def await_partition(settings: SlurmSettings) -> None:
    """See that Slurm has the nodes that are to be offered; wait until it answers.

    Raises:
        ConfigError: With what it does not have.
    """
    if any(word.startswith(_ITS_OWN) for word in settings.sbatch_args):
        return
    while True:
        try:
            lines = _ask(settings.partition)
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
    nodes = [line.split(maxsplit=2) for line in lines]
    default = [node for node in nodes if node[0].endswith("*")]
    if not settings.partition and default:
        nodes = default
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


def _ask(partition: str) -> list[str]:
    """Ask for the nodes.

    Raises:
        OSError: If Slurm does not answer.
    """
    words = ["sinfo", "--noheader", "--Node", "--format=%P %c %G"]
    words += [f"--partition={partition}"] if partition else []
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=_ANSWER_S)
    except subprocess.TimeoutExpired:
        raise OSError(f"no answer within {_ANSWER_S:g} s") from None
    if done.returncode:
        raise OSError(done.stderr.strip() or f"exit code {done.returncode}")
    return [line for line in done.stdout.splitlines() if line.strip()]
