"""Runs on several machines: exit codes, and merging of the machines' outcomes."""

from collections.abc import Mapping, Sequence

from zerolab.contract.outcome import CHECKPOINTED_EXITS, DELIBERATE_EXITS, Outcome, failed_by_itself
from zerolab.contract.spec import EXIT_INFRASTRUCTURE, EXIT_STALE

__all__ = [
    "EXIT_TEMPORARY",
    "merge_outcomes",
    "node_capacity_problem",
    "shell_exit_code",
]

EXIT_TEMPORARY = 75
"""Exit code of ``zerolab launch`` and of a node's launcher after a preemption (``EX_TEMPFAIL``).

Slurm and shells can then distinguish it from a failure."""


def merge_outcomes(outcomes: Mapping[str, Outcome]) -> tuple[str, Outcome]:
    """Return how a run on several machines ended, and the machine that decided it.

    In order of precedence: a rank killed by a signal, a run that another one superseded, another
    deliberate exit, a lost node, another failure, a failure caused by another rank, an exit after a
    checkpoint, a node that was stopped, success. Among equal
    outcomes the first counts.

    Args:
        outcomes: Outcome of each machine's ranks by its name, in order of time.
    """
    return min(outcomes.items(), key=lambda item: _precedence(item[1]))


def _precedence(outcome: Outcome) -> int:
    code = outcome.exit_code
    if outcome.was_stopped:
        return 7
    if code < 0:
        return 0
    if code in DELIBERATE_EXITS - CHECKPOINTED_EXITS:
        return {EXIT_STALE: 1, EXIT_INFRASTRUCTURE: 3}.get(code, 2)
    if code in CHECKPOINTED_EXITS:
        return 6
    if code == 0:
        return 8
    return 4 if failed_by_itself(outcome) else 5


def node_capacity_problem(ranks: int, slots_per_rank: int, slots: Sequence[int]) -> str | None:
    """Return why ranks do not fit on the empty nodes of a Slurm pool, or None.

    Args:
        ranks: Number of ranks.
        slots_per_rank: Slots of a rank, which must all be on one node.
        slots: Slots of each node.
    """
    if sum(count // slots_per_rank for count in slots) >= ranks:
        return None
    key = "slots_per_rank" if slots_per_rank > 1 else "slots_per_trial"
    request = f"{ranks} rank(s) of {slots_per_rank} slot(s)"
    capacity = " or ".join(map(str, sorted(set(slots))))
    return (
        f"resources.{key}: {request} must fit on the {len(slots)} node(s) of the Slurm pool, with "
        f"{capacity} slot(s) each"
    )


def shell_exit_code(code: int) -> int:
    """Return the exit code of a command whose run ended with ``code``, as a shell shows it."""
    if code in CHECKPOINTED_EXITS:
        return EXIT_TEMPORARY
    return 128 - code if code < 0 else code
