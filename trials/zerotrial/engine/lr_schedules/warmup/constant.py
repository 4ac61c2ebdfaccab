"""``WarmupLR``: warm-up, then constant."""

import math
from typing import ClassVar

from zerolab.config.engine.schedules import LinearWarmupParams, WarmupDecayParams, WarmupParams
from zerolab.schema.section import Section
from zerotrial.engine.lr_schedules.base import LRSchedule, Rates, for_groups

__all__ = ["WarmupLR", "warmup_share"]


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
    """

    section: ClassVar[type[Section]] = WarmupParams
    given: WarmupParams | WarmupDecayParams | LinearWarmupParams

    def prepare(self) -> None:
        """Make ready, when :attr:`optimizer` and :attr:`given` are there; sets the first rates."""
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
        return warmup_share(it, self._steps, kind) if it < self._steps else 1.0

    def rates(self, it: int) -> list[float]:
        """Learning rate of each group after ``step()`` number ``it + 1``."""
        share = self.share(max(it, 0))
        return [low + (high - low) * share for low, high in zip(self._min, self._max, strict=True)]
