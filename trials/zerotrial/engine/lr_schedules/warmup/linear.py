"""``LinearWarmupLR``: a warm-up without wasted steps."""

from typing import ClassVar

from zerolab.config.engine.schedules import LinearWarmupParams
from zerolab.schema.section import Section
from zerotrial.engine.lr_schedules.warmup.constant import WarmupLR

__all__ = ["LinearWarmupLR"]


class LinearWarmupLR(WarmupLR):
    """Linear warm-up: optimizer step k, counted from 1, runs at k / steps.

    :class:`WarmupLR` runs the first two steps at the minimum.

    Args:
        optimizer: Optimizer whose rates are set.
        warmup_min_lr: See :class:`WarmupLR`.
        warmup_max_lr: See :class:`WarmupLR`.
        warmup_num_steps: See :class:`WarmupLR`.
        last_batch_iteration: Count at which to continue.
    """

    section: ClassVar[type[Section]] = LinearWarmupParams
    given: LinearWarmupParams

    def _begin(self) -> None:
        self._write(-1)

    def share(self, it: int) -> float:
        """Return the progress of the optimizer step after ``step()`` number ``it + 1``."""
        return min(1.0, (it + 2) / self.given.warmup_num_steps)

    def rates(self, it: int) -> list[float]:
        """Learning rate of each group after ``step()`` number ``it + 1``."""
        share = self.share(it)
        return [low + (high - low) * share for low, high in zip(self._min, self._max, strict=True)]
