"""``WarmupCosineLR``: up to the optimizer's own rates, then down a cosine."""

import math
from typing import ClassVar

import torch

from zerolab.config.engine.schedules import WarmupCosineParams
from zerolab.schema.section import Section
from zerotrial.engine.lr_schedules.base import LRSchedule
from zerotrial.engine.lr_schedules.warmup import warmup_share

__all__ = ["WarmupCosineLR"]


class WarmupCosineLR(LRSchedule):
    """A warm-up to the optimizer's own rates, then a cosine down to a share of them.

    As in DeepSpeed the first optimizer step runs at rate 0, whatever ``warmup_min_ratio`` says; the
    second runs at that ratio.

    Args:
        optimizer: Whose rates are set, as shares of what they are now.
        total_num_steps: Where the cosine ends.
        warmup_min_ratio: Share at the beginning.
        warmup_num_steps: Length of the warm-up; at least 2 is used.
        cos_min_ratio: Share at the end.
        warmup_type: See :func:`~zerotrial.engine.lr_schedules.warmup.warmup_share`.
        last_batch_iteration: Where to go on.
    """

    section: ClassVar[type[Section]] = WarmupCosineParams

    def __init__(  # noqa: PLR0917 - DeepSpeed's order
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 1e-4,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        given = self.check(
            WarmupCosineParams,
            total_num_steps=total_num_steps,
            warmup_min_ratio=warmup_min_ratio,
            warmup_num_steps=warmup_num_steps,
            cos_min_ratio=cos_min_ratio,
            warmup_type=warmup_type,
            last_batch_iteration=last_batch_iteration,
        )
        super().__init__(optimizer, given.last_batch_iteration)
        self._total = given.total_num_steps
        self._min = given.warmup_min_ratio
        self._steps = max(2, given.warmup_num_steps)
        self._floor = given.cos_min_ratio
        self._kind = given.warmup_type
        self._base = [float(group["lr"]) for group in optimizer.param_groups]
        if self.last_batch_iteration == -1:
            self._write(-1)

    def ratio(self, it: int) -> float:
        """Share of the optimizer's own rates."""
        if it < 0:
            return 0.0
        if it < self._steps:
            return self._min + (1.0 - self._min) * warmup_share(it, self._steps, self._kind)
        done = min(1.0, (it - self._steps + 1) / max(1, self._total - self._steps))
        return self._floor + (1.0 - self._floor) * (1.0 + math.cos(math.pi * done)) / 2.0

    def rates(self, it: int) -> list[float]:
        """See :class:`LRSchedule`."""
        ratio = self.ratio(it)
        return [base * ratio for base in self._base]
