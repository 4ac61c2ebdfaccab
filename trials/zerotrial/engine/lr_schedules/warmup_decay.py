"""``WarmupDecayLR``: up, then down in a straight line."""

from typing import ClassVar

import torch

from zerolab.config.engine.schedules import WarmupDecayParams
from zerolab.schema.section import Section
from zerotrial.engine.lr_schedules.base import Rates
from zerotrial.engine.lr_schedules.warmup import WarmupLR

__all__ = ["WarmupDecayLR"]


class WarmupDecayLR(WarmupLR):
    """:class:`WarmupLR`, then linearly down to the minimum at ``total_num_steps``.

    Args:
        optimizer: Whose rates are set.
        total_num_steps: Where the decay ends.
        warmup_min_lr: See :class:`WarmupLR`.
        warmup_max_lr: See :class:`WarmupLR`; 0.001 unless given, as in DeepSpeed.
        warmup_num_steps: See :class:`WarmupLR`.
        warmup_type: See :class:`WarmupLR`.
        last_batch_iteration: Where to go on.
    """

    section: ClassVar[type[Section]] = WarmupDecayParams

    def __init__(  # noqa: PLR0917 - DeepSpeed's order
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        given = self.check(
            WarmupDecayParams,
            total_num_steps=total_num_steps,
            warmup_min_lr=warmup_min_lr,
            warmup_max_lr=warmup_max_lr,
            warmup_num_steps=warmup_num_steps,
            warmup_type=warmup_type,
            last_batch_iteration=last_batch_iteration,
        )
        self._total = given.total_num_steps
        super().__init__(
            optimizer,
            warmup_min_lr,
            warmup_max_lr,
            warmup_num_steps,
            warmup_type,
            last_batch_iteration,
        )

    def share(self, it: int) -> float:
        """See :class:`WarmupLR`."""
        if it < self._steps:
            return super().share(it)
        return max(0.0, (self._total - it) / max(1.0, self._total - self._steps))
