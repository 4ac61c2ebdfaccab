"""``WarmupDecayLR``: warm-up, then a linear decay."""

from typing import ClassVar

from zerolab.config.engine.schedules import WarmupDecayParams
from zerolab.schema.section import Section
from zerotrial.engine.lr_schedules.warmup.constant import WarmupLR

__all__ = ["WarmupDecayLR"]


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
    """

    section: ClassVar[type[Section]] = WarmupDecayParams
    given: WarmupDecayParams

    def share(self, it: int) -> float:
        """Return the progress from minimum to maximum, 0 to 1."""
        if it < self._steps:
            return super().share(it)
        total = self.given.total_num_steps
        return max(0.0, (total - it) / max(1.0, total - self._steps))
