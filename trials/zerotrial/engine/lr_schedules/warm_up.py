"""Schedules with a warm-up: constant, decay, cosine, and a corrected linear one."""

import math
from typing import ClassVar

from zerolab.config.engine.schedules import (
    LinearWarmupParams,
    WarmupCosineParams,
    WarmupDecayParams,
    WarmupParams,
)
from zerolab.schema.section import Section
from zerotrial.engine.lr_schedules.base import LRSchedule, Rates, for_groups

__all__ = [
    "LinearWarmupLR",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "warmup_share",
]


def warmup_share(it: int, steps: int, kind: str) -> float:
    """Return the progress of a warm-up, 0 to 1.

    Args:
        it: Count, 0 to ``steps``.
        steps: Length, at least 2.
        kind: ``log``: ln(it + 1) / ln(steps); ``linear``: it / steps.
    """
    return math.log(it + 1) / math.log(steps) if kind == "log" else it / steps


class WarmupLR(LRSchedule):
    """Warm-up from a minimum to a maximum in ``warmup_num_steps``, then constant.

    Args:
        optimizer: Optimizer whose rates are set.
        warmup_min_lr: Rates at the start.
        warmup_max_lr: Rates after the warm-up; None means the optimizer's rates.
        warmup_num_steps: Length of the warm-up; at least 2.
        warmup_type: See :func:`warmup_share`.
        last_batch_iteration: Count at which to continue.

    Example:
        >>> from zerotrial.engine.lr_schedules import WarmupLR
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        >>> schedule = WarmupLR(optimizer, 0.0, 0.1, warmup_num_steps=4, warmup_type="linear")
        >>> for _ in range(3):
        ...     schedule.step()
        >>> schedule.get_last_lr()
        [0.05]
    """

    section: ClassVar[type[Section]] = WarmupParams
    given: WarmupParams | WarmupDecayParams | LinearWarmupParams

    def prepare(self) -> None:
        """Read the arguments in :attr:`given` and set the first rates of :attr:`optimizer`."""
        groups = self.optimizer.param_groups
        optimizer_rates: Rates = [float(group["lr"]) for group in groups]
        top: Rates = (
            optimizer_rates if self.given.warmup_max_lr is None else self.given.warmup_max_lr
        )
        self._min = for_groups("warmup_min_lr", self.given.warmup_min_lr, len(groups))
        self._max = for_groups("warmup_max_lr", top, len(groups))
        self._steps = max(2, self.given.warmup_num_steps)
        if self.last_batch_iteration == -1:
            self._begin()

    def _begin(self) -> None:
        """Set the rates of the first optimizer step."""
        self._write(0)

    def share(self, it: int) -> float:
        """Return the progress from minimum to maximum, 0 to 1."""
        kind = getattr(self.given, "warmup_type", "linear")
        return warmup_share(max(it, 0), self._steps, kind) if it < self._steps else 1.0

    def rates(self, it: int) -> list[float]:
        """Learning rate of each group after ``step()`` number ``it + 1``."""
        share = self.share(it)
        return [low + (high - low) * share for low, high in zip(self._min, self._max, strict=True)]


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


class WarmupDecayLR(WarmupLR):
    """:class:`WarmupLR`, then linearly down to the minimum at ``total_num_steps``.

    Args:
        optimizer: Optimizer whose rates are set.
        total_num_steps: Step at which the decay ends.
        warmup_min_lr: See :class:`WarmupLR`.
        warmup_max_lr: See :class:`WarmupLR`; 0.001 by default, as in DeepSpeed.
        warmup_num_steps: See :class:`WarmupLR`.
        warmup_type: See :class:`WarmupLR`.
        last_batch_iteration: Count at which to continue.

    Example:
        >>> from zerotrial.engine.lr_schedules import WarmupDecayLR
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        >>> schedule = WarmupDecayLR(optimizer, 10, warmup_max_lr=0.1, warmup_num_steps=2)
        >>> for _ in range(11):
        ...     schedule.step()
        >>> schedule.get_last_lr()
        [0.0]
    """

    section: ClassVar[type[Section]] = WarmupDecayParams
    given: WarmupDecayParams

    def share(self, it: int) -> float:
        """Return the progress from minimum to maximum, 0 to 1."""
        if it < self._steps:
            return super().share(it)
        total = self.given.total_num_steps
        return max(0.0, (total - it) / max(1.0, total - self._steps))


class WarmupCosineLR(LRSchedule):
    """Warm-up to the optimizer's rates, then a cosine decay.

    As in DeepSpeed the first optimizer step runs at rate 0, regardless of ``warmup_min_ratio``; the
    second runs at that ratio.

    Args:
        optimizer: Optimizer whose rates are set, as shares of their current values.
        total_num_steps: Step at which the cosine ends.
        warmup_min_ratio: Share at the start.
        warmup_num_steps: Length of the warm-up; at least 2.
        cos_min_ratio: Share at the end.
        warmup_type: See :func:`~zerotrial.engine.lr_schedules.warm_up.warmup_share`.
        last_batch_iteration: Count at which to continue.

    Example:
        >>> from zerotrial.engine.lr_schedules import WarmupCosineLR
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        >>> schedule = WarmupCosineLR(optimizer, 100, warmup_num_steps=10, cos_min_ratio=0.0)
        >>> for _ in range(100):
        ...     schedule.step()
        >>> schedule.get_last_lr()
        [0.0]
    """

    section: ClassVar[type[Section]] = WarmupCosineParams
    given: WarmupCosineParams

    def prepare(self) -> None:
        """Read the arguments in :attr:`given` and set the first rates of :attr:`optimizer`."""
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
