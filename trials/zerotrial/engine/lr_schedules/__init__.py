"""Learning-rate schedules with DeepSpeed's names, arguments and values, and a corrected one.

A schedule counts applied optimizer steps. DeepSpeed writes the first value at construction and
again at the first ``step()``, so that its warm-ups run two optimizer steps at the minimum;
:class:`LinearWarmupLR` does not.

A new schedule is one file with a subclass of :class:`LRSchedule`, whose arguments are the fields of
its section, and one entry point of the group ``zerotrial.lr_schedules``. The sections of the core's
schedules are in :mod:`zerolab.config.engine.schedules`, since configurations are checked without
torch.
"""

from typing import TYPE_CHECKING, Any

from zerolab.config.engine import schedules as files
from zerolab.registry import Registry
from zerotrial.engine.lr_schedules.base import LRSchedule
from zerotrial.engine.lr_schedules.warm_up import (
    LinearWarmupLR,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)

if TYPE_CHECKING:
    from zerotrial.extensions.lr_schedules.one_cycle import OneCycle
    from zerotrial.extensions.lr_schedules.range_test import LRRangeTest

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

SCHEDULES: Registry[type[LRSchedule]] = Registry(
    "zerotrial.lr_schedules",
    {
        schedule.__name__: schedule
        for schedule in (
            WarmupLR,
            WarmupDecayLR,
            WarmupCosineLR,
            LinearWarmupLR,
        )
    },
)
"""Values of ``scheduler.type``, with the class of each."""


def __getattr__(name: str) -> Any:
    if name in ("OneCycle", "LRRangeTest"):  # of an extension
        return SCHEDULES[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register(schedule: type[LRSchedule]) -> None:
    """Register a schedule for this process.

    Args:
        schedule: The name of the class is the ``type`` in the ``scheduler`` block. The rules for
            its arguments are in its ``section``.

    Example::

        register(InverseSqrtLR)
        zerotrial.initialize(model=model, config={"scheduler": {"type": "InverseSqrtLR"}, ...})
    """
    SCHEDULES[schedule.__name__] = schedule
    files.SCHEDULES[schedule.__name__] = schedule.section
