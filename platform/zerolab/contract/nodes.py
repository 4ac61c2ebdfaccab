"""A run on several machines: what each of its launchers knows, and how their ends make one."""

from collections.abc import Mapping, Sequence

from zerolab.contract.outcome import DELIBERATE, LEAVING, Outcome
from zerolab.contract.spec import EXIT_INFRASTRUCTURE, EXIT_STALE

__all__ = [
    "EXIT_TEMPORARY",
    "PEER_WORDS",
    "failed_by_another",
    "failed_by_itself",
    "merge_outcomes",
    "shell_code",
    "unfit_for_nodes",
]

EXIT_TEMPORARY = 75
"""With which ``zerolab launch`` and the launcher of a node end when the run was preempted: Slurm
and shells then know it from a failure (``EX_TEMPFAIL``)."""

PEER_WORDS = (
    "gloo",
    "NCCL",
    "Connection reset",
    "closed by peer",
    "Broken pipe",
    "Timed out waiting",
    "TCPStore",
    "DistNetworkError",
    "DistStoreError",
    "ProcessGroup",
    "is gone (this is rank",
    "connection to another rank broke",
    "the other ranks did not answer",
)
"""What an error says that has come over the network from another rank."""


def merge_outcomes(ends: Mapping[str, Outcome]) -> tuple[str, Outcome]:
    """Say how a run on several machines ended, and which of them decided it.

    The rule: a rank that was killed comes first, then what a rank said on purpose, then a node
    that was lost, then any other failure, then one that came from another rank; a node that was
    told to stop decides nothing where another one failed. Of two alike the first counts.

    Args:
        ends: How the ranks of each machine ended, by its name, in the order in which they did.
    """
    return min(ends.items(), key=lambda item: _place(item[1]))


def _place(end: Outcome) -> int:
    code = end.exit_code
    if end.told:
        return 7
    if code < 0:
        return 0
    if code in DELIBERATE - LEAVING:
        return {EXIT_STALE: 1, EXIT_INFRASTRUCTURE: 3}.get(code, 2)
    if code in LEAVING:
        return 6
    if code == 0:
        return 8
    return 4 if failed_by_itself(end) else 5


def failed_by_itself(end: Outcome) -> bool:
    """Whether a rank's own error ended it, and neither a signal nor another rank."""
    return _failed(end) and not failed_by_another(end)


def failed_by_another(end: Outcome) -> bool:
    """Whether a rank ended because it lost another one, which says itself what has happened."""
    return _failed(end) and any(word in (end.reason or "") for word in PEER_WORDS)


def _failed(end: Outcome) -> bool:
    return end.exit_code > 0 and end.exit_code not in DELIBERATE


def unfit_for_nodes(ranks: int, slots_per_rank: int, slots: Sequence[int]) -> str | None:
    """Say why ranks do not fit on the nodes of a Slurm pool, if all were free; None if they do.

    Args:
        ranks: How many.
        slots_per_rank: Which must all be on one node.
        slots: Of each node.
    """
    if sum(count // slots_per_rank for count in slots) >= ranks:
        return None
    key = "slots_per_rank" if slots_per_rank > 1 else "slots_per_trial"
    asked = f"{ranks} rank(s) of {slots_per_rank} slot(s)"
    have = " or ".join(map(str, sorted(set(slots))))
    return (
        f"resources.{key}: {asked} must fit on the {len(slots)} node(s) of the Slurm pool, with "
        f"{have} slot(s) each"
    )


def shell_code(code: int) -> int:
    """The exit code of a command whose run ended with ``code``, as a shell shows it."""
    if code in LEAVING:
        return EXIT_TEMPORARY
    return 128 - code if code < 0 else code
