"""``LRRangeTest``: growing rates."""

from typing import ClassVar

from zerolab.config.engine.schedules import LRRangeTestParams
from zerolab.schema.section import Section
from zerotrial.engine.lr_schedules.base import LRSchedule, for_groups, set_rates

__all__ = ["LRRangeTest"]


class LRRangeTest(LRSchedule):
    """Growing rates, to find where training diverges.

    Args:
        optimizer: Optimizer whose rates are set.
        lr_range_test_min_lr: Rates at the start.
        lr_range_test_step_size: Optimizer steps per interval.
        lr_range_test_step_rate: Growth per interval, as a share of the minimum.
        lr_range_test_staircase: Whether to grow only after full intervals.
        last_batch_iteration: Count at which to continue.

    References:
        Smith, arXiv:1506.01186, section 3.3.

    Example:
        >>> from zerotrial.engine.lr_schedules import LRRangeTest
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        >>> schedule = LRRangeTest(optimizer, 0.001, lr_range_test_step_size=1)
        >>> schedule.step()
        >>> schedule.get_last_lr()
        [0.002]
    """

    section: ClassVar[type[Section]] = LRRangeTestParams
    given: LRRangeTestParams

    def prepare(self) -> None:
        """Read the arguments in :attr:`given` and set the first rates of :attr:`optimizer`."""
        low = self.given.lr_range_test_min_lr
        self._min = for_groups("lr_range_test_min_lr", low, len(self.optimizer.param_groups))
        if self.last_batch_iteration == -1:
            set_rates(self.optimizer, self._min)

    def rates(self, it: int) -> list[float]:
        """Learning rate of each group after ``step()`` number ``it + 1``."""
        size, rate = self.given.lr_range_test_step_size, self.given.lr_range_test_step_rate
        stairs = self.given.lr_range_test_staircase
        interval = (it + 1) // size if stairs else (it + 1) / size
        return [low * (1.0 + rate * interval) for low in self._min]
