"""System metrics of a run's machines, which an extension samples."""

import logging
import platform
from collections.abc import Sequence

from zerolab.ranks import Ranks
from zerolab.registry import PARTS

__all__ = ["MachineMetrics", "Sample"]

logger = logging.getLogger(__name__)

Sample = dict[str, float] | None
"""Measurements of a rank: empty while there are no new ones, None where the rank measures
nothing."""


class MachineMetrics:
    """All machines of a run: the first rank of each one measures it, and the chief reports.

    Samples travel with other messages of the ranks: nothing here is collective.

    Args:
        ranks: Ranks of the run.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._rank = ranks.rank
        self._is_multi_machine = ranks.size > ranks.local_size
        self._logged_number = not self._is_multi_machine
        part = PARTS.find("system_metrics") if ranks.local_rank == 0 else None
        self._system = part.SystemMetrics() if part else None

    def take(self, *, now: bool = False) -> Sample:
        """Return this rank's sample of its machine if it is due."""
        return None if self._system is None else self._system.take(now=now) or {}

    def named(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Combine the samples; with several machines, prefix each name by its number.

        Args:
            samples: Samples of the ranks, in their order from rank 0.
        """
        measured = [sample for sample in samples if sample is not None]
        if not self._is_multi_machine:
            return measured[0] if measured else {}
        if not self._logged_number and self._system is not None and self._rank < len(samples):
            self._logged_number = True
            number = sum(sample is not None for sample in samples[: self._rank])
            message = "this machine, %s, is machine%d among the system metrics"
            logger.info(message, platform.node(), number)
        return {
            f"machine{number}/{name}": value
            for number, sample in enumerate(measured)
            for name, value in sample.items()
        }

    @property
    def sampled(self) -> bool:
        """Whether this rank has a sample."""
        return self._system is not None and self._system.sampled

    def close(self) -> None:
        """Stop measuring."""
        if self._system is not None:
            self._system.close()
