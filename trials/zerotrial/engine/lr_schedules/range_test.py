"""``LRRangeTest``: ever larger rates."""

from typing import ClassVar

import torch

from zerolab.config.engine.schedules import LRRangeTestParams
from zerolab.schema.section import Section
from zerotrial.engine.lr_schedules.base import LRSchedule, Rates, for_groups, set_rates

__all__ = ["LRRangeTest"]


class LRRangeTest(LRSchedule):
    """Ever larger rates, to find where training breaks.

    Args:
        optimizer: Whose rates are set.
        lr_range_test_min_lr: Rates at the beginning.
        lr_range_test_step_size: Optimizer steps of one interval.
        lr_range_test_step_rate: Growth for each interval, as a share of the minimum.
        lr_range_test_staircase: Grow by whole intervals only.
        last_batch_iteration: Where to go on.

    References:
        Smith, arXiv:1506.01186, section 3.3.
    """

    section: ClassVar[type[Section]] = LRRangeTestParams

    def __init__(  # noqa: PLR0917 - DeepSpeed's order
        self,
        optimizer: torch.optim.Optimizer,
        lr_range_test_min_lr: Rates = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,  # noqa: FBT001, FBT002 - DeepSpeed's order
        last_batch_iteration: int = -1,
    ) -> None:
        given = self.check(
            LRRangeTestParams,
            lr_range_test_min_lr=lr_range_test_min_lr,
            lr_range_test_step_size=lr_range_test_step_size,
            lr_range_test_step_rate=lr_range_test_step_rate,
            lr_range_test_staircase=lr_range_test_staircase,
            last_batch_iteration=last_batch_iteration,
        )
        super().__init__(optimizer, given.last_batch_iteration)
        groups = len(optimizer.param_groups)
        self._min = for_groups("lr_range_test_min_lr", given.lr_range_test_min_lr, groups)
        self._given = given
        if self.last_batch_iteration == -1:
            set_rates(optimizer, self._min)

    def rates(self, it: int) -> list[float]:
        """See :class:`LRSchedule`."""
        size, rate = self._given.lr_range_test_step_size, self._given.lr_range_test_step_rate
        stairs = self._given.lr_range_test_staircase
        interval = (it + 1) // size if stairs else (it + 1) / size
        return [low * (1.0 + rate * interval) for low in self._min]
