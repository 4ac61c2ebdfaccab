"""Learning-rate schedules with DeepSpeed's names, arguments and values, and one that is corrected.

A schedule counts applied optimizer steps. DeepSpeed writes the first value at construction and
again at the first ``step()``, so that its warm-ups run two optimizer steps at the minimum;
:class:`LinearWarmupLR` does not.

A new schedule is a file and a line, :func:`register`; its arguments are the fields of its section.
Those of the ones here stand in :mod:`zerolab.config.engine.schedules`, which reads files where
there is no torch.
"""

from zerolab.config.engine import schedules as files
from zerotrial.engine.lr_schedules.base import LRSchedule
from zerotrial.engine.lr_schedules.one_cycle import OneCycle
from zerotrial.engine.lr_schedules.range_test import LRRangeTest
from zerotrial.engine.lr_schedules.warmup.constant import WarmupLR
from zerotrial.engine.lr_schedules.warmup.cosine import WarmupCosineLR
from zerotrial.engine.lr_schedules.warmup.decay import WarmupDecayLR
from zerotrial.engine.lr_schedules.warmup.linear import LinearWarmupLR

__all__ = [
    "SCHEDULES",
    "LRRangeTest",
    "LRSchedule",
    "LinearWarmupLR",
    "OneCycle",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "register",
]

SCHEDULES: dict[str, type[LRSchedule]] = {}
"""By the name in the ``scheduler`` block."""


def register(schedule: type[LRSchedule]) -> None:
    """Let engine files name a schedule, and be checked by the rules of its arguments.

    Args:
        schedule: Its class's name is the ``type`` of the block, its ``section`` has the rules.
    """
    SCHEDULES[schedule.__name__] = schedule
    files.SCHEDULES[schedule.__name__] = schedule.section


register(WarmupLR)
register(WarmupDecayLR)
register(WarmupCosineLR)
register(OneCycle)
register(LRRangeTest)
register(LinearWarmupLR)
