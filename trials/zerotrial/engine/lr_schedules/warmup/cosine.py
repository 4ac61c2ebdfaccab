"""``WarmupCosineLR``: warm-up to the optimizer's rates, then a cosine."""

import math
from typing import ClassVar

from zerolab.config.engine.schedules import WarmupCosineParams
from zerolab.schema.section import Section
from zerotrial.engine.lr_schedules.base import LRSchedule
from zerotrial.engine.lr_schedules.warmup.constant import warmup_share

__all__ = ["WarmupCosineLR"]


class WarmupCosineLR(LRSchedule):
    """Warm-up to the optimizer's rates, then a cosine down to a share of them.

    As in DeepSpeed the first optimizer step runs at rate 0, regardless of ``warmup_min_ratio``; the
    second runs at that ratio.

    Args:
        optimizer: Optimizer whose rates are set, as shares of their current values.
        total_num_steps: Step at which the cosine ends.
        warmup_min_ratio: Share at the start.
        warmup_num_steps: Length of the warm-up; at least 2.
        cos_min_ratio: Share at the end.
        warmup_type: See :func:`~zerotrial.engine.lr_schedules.warmup.constant.warmup_share`.
        last_batch_iteration: Count at which to continue.
    """

    section: ClassVar[type[Section]] = WarmupCosineParams
    given: WarmupCosineParams

    def prepare(self) -> None:
        """Make ready, when :attr:`optimizer` and :attr:`given` are there; sets the first rates."""
        self._steps = max(2, self.given.warmup_num_steps)
        self._base = [float(group["lr"]) for group in self.optimizer.param_groups]
        if self.last_batch_iteration == -1:
            self._write(-1)

    def ratio(self, it: int) -> float:
        """Return the share of the optimizer's rates."""
        if it < 0:
            return 0.0
        low, floor = self.given.warmup_min_ratio, self.given.cos_min_ratio
        if it < self._steps:
            return low + (1.0 - low) * warmup_share(it, self._steps, self.given.warmup_type)
        length = max(1, self.given.total_num_steps - self._steps)
        done = min(1.0, (it - self._steps + 1) / length)
        return floor + (1.0 - floor) * (1.0 + math.cos(math.pi * done)) / 2.0

    def rates(self, it: int) -> list[float]:
        """Learning rate of each group after ``step()`` number ``it + 1``."""
        ratio = self.ratio(it)
        return [base * ratio for base in self._base]
