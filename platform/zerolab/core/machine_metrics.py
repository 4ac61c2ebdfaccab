"""What the machines of a run do meanwhile, as one machine's metrics or under each one's number."""

import logging
import platform
from collections.abc import Sequence

from zerolab.ranks import Ranks
from zerolab.reports.system_metrics import SystemMetrics

__all__ = ["Machines", "Sample"]

logger = logging.getLogger(__name__)

Sample = dict[str, float] | None
"""What a rank has measured: empty while there is nothing new, None where it measures nothing."""


class Machines:
    """All machines of a run: the first rank of each one measures it, and the chief reports.

    What is measured travels with what the ranks tell each other anyway: nothing here is collective.

    Args:
        ranks: Of the run.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._rank = ranks.rank
        self._several = ranks.size > ranks.local_size
        self._said = not self._several
        self._system = SystemMetrics() if ranks.local_rank == 0 else None

    def take(self, *, now: bool = False) -> Sample:
        """What this rank has to tell about its machine; see :meth:`SystemMetrics.take`."""
        return None if self._system is None else self._system.take(now=now) or {}

    def named(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Put what was measured together; of several machines, under the number of each.

        Args:
            samples: What the ranks have told, in their order and from rank 0 on.
        """
        measured = [sample for sample in samples if sample is not None]
        if not self._several:
            return measured[0] if measured else {}
        if not self._said and self._system is not None and self._rank < len(samples):
            self._said = True
            number = sum(sample is not None for sample in samples[: self._rank])
            told = "this machine, %s, is machine%d among the system metrics"
            logger.info(told, platform.node(), number)
        return {
            f"machine{number}/{name}": value
            for number, sample in enumerate(measured)
            for name, value in sample.items()
        }

    @property
    def sampled(self) -> bool:
        """Whether this rank has something to tell."""
        return self._system is not None and self._system.sampled

    def close(self) -> None:
        """Stop measuring."""
        if self._system is not None:
            self._system.close()
