"""Learning-rate schedules with DeepSpeed's names, arguments and values, and one that is corrected.

A schedule counts applied optimizer steps: ``it`` is -1 when it is made, and :meth:`step` makes it
``it + 1`` and sets the rates. DeepSpeed writes the first value at construction and again at the
first ``step()``, so that its warm-ups run two optimizer steps at the minimum;
:class:`LinearWarmupLR` does not.
"""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from zerolab.errors import ConfigError

__all__ = [
    "SCHEDULES",
    "LRRangeTest",
    "LinearWarmupLR",
    "OneCycle",
    "Schedule",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
]

Rates = float | Sequence[float]
"""One value for all parameter groups, or one for each."""


def _for_groups(name: str, value: Rates, groups: int) -> list[float]:
    if isinstance(value, int | float):
        return [float(value)] * groups
    if len(value) != groups:
        msg = f"scheduler.params.{name}: must have one value for each of {groups} parameter groups"
        raise ConfigError("engine config", [f"{msg}, got {len(value)}"])
    return [float(item) for item in value]


def _whole_steps(name: str, value: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        msg = f"scheduler.params.{name}: must be a positive integer, got {value!r}"
        raise ConfigError("engine config", [msg])
    return value


class Schedule:
    """Base of the schedules: a counter, and a rate for each parameter group at that count.

    Args:
        optimizer: Whose ``param_groups`` get the rates.
        last_batch_iteration: Where to go on; -1 is the beginning.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, last_batch_iteration: int = -1) -> None:
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration

    def rates(self, it: int) -> list[float]:
        """Learning rate of each group after ``step()`` number ``it + 1``."""
        raise NotImplementedError

    def get_lr(self) -> list[float]:
        """Rates at the present count."""
        return self.rates(self.last_batch_iteration)

    def get_last_lr(self) -> list[float]:
        """Rates that were set last."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Move to the next optimizer step, or to a given one, and set the rates."""
        if last_batch_iteration is None:
            last_batch_iteration = self.last_batch_iteration + 1
        self.last_batch_iteration = last_batch_iteration
        self._write(last_batch_iteration)

    def _write(self, it: int) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.rates(it), strict=True):
            group["lr"] = rate

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken; the rates are the optimizer's."""
        self.last_batch_iteration = int(state["last_batch_iteration"])


class WarmupLR(Schedule):
    """From a minimum to a maximum in ``warmup_num_steps``, then constant.

    Args:
        optimizer: Whose rates are set.
        warmup_min_lr: Rates at the beginning.
        warmup_max_lr: Rates after the warm-up; None means the optimizer's own.
        warmup_num_steps: Length of the warm-up; at least 2 is used.
        warmup_type: ``log``: ln(it + 1) / ln(steps); ``linear``: it / steps.
        last_batch_iteration: Where to go on.
    """

    first: ClassVar[int] = 0
    """The count whose rates are set at construction."""

    def __init__(  # noqa: PLR0917 - DeepSpeed's order
        self,
        optimizer: torch.optim.Optimizer,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        groups = optimizer.param_groups
        top: Rates = (
            [float(group["lr"]) for group in groups] if warmup_max_lr is None else warmup_max_lr
        )
        self._min = _for_groups("warmup_min_lr", warmup_min_lr, len(groups))
        self._max = _for_groups("warmup_max_lr", top, len(groups))
        self._given_steps = _whole_steps("warmup_num_steps", warmup_num_steps)
        self._steps = max(2, self._given_steps)
        self._log = warmup_type != "linear"
        if last_batch_iteration == -1:
            self._write(self.first)

    def share(self, it: int) -> float:
        """Part of the way from minimum to maximum, 0 to 1."""
        if it < self._steps:
            return _warmup(it, self._steps, log=self._log)
        return 1.0

    def rates(self, it: int) -> list[float]:
        """See :class:`Schedule`."""
        share = self.share(max(it, 0))
        return [low + (high - low) * share for low, high in zip(self._min, self._max, strict=True)]


def _warmup(it: int, steps: int, *, log: bool) -> float:
    return math.log(it + 1) / math.log(steps) if log else it / steps


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

    def __init__(  # noqa: PLR0917 - DeepSpeed's order
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self._total = total_num_steps
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


class WarmupCosineLR(Schedule):
    """A warm-up to the optimizer's own rates, then a cosine down to a share of them.

    Args:
        optimizer: Whose rates are set, as shares of what they are now.
        total_num_steps: Where the cosine ends.
        warmup_min_ratio: Share at the beginning.
        warmup_num_steps: Length of the warm-up; at least 2 is used.
        cos_min_ratio: Share at the end.
        warmup_type: See :class:`WarmupLR`.
        last_batch_iteration: Where to go on.
    """

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
        super().__init__(optimizer, last_batch_iteration)
        self._total = total_num_steps
        self._min = warmup_min_ratio
        self._steps = max(2, warmup_num_steps)
        self._floor = cos_min_ratio
        self._log = warmup_type != "linear"
        self._base = [float(group["lr"]) for group in optimizer.param_groups]
        if last_batch_iteration == -1:
            self._write(0)

    def ratio(self, it: int) -> float:
        """Share of the optimizer's own rates."""
        if it < self._steps:
            return self._min + (1.0 - self._min) * _warmup(it, self._steps, log=self._log)
        done = min(1.0, (it - self._steps + 1) / max(1, self._total - self._steps))
        return self._floor + (1.0 - self._floor) * (1.0 + math.cos(math.pi * done)) / 2.0

    def rates(self, it: int) -> list[float]:
        """See :class:`Schedule`."""
        ratio = self.ratio(max(it, 0))
        return [base * ratio for base in self._base]


class LinearWarmupLR(WarmupLR):
    """A warm-up that wastes no step: optimizer step k, counted from 1, runs at k / steps.

    :class:`WarmupLR` runs the first two steps at the minimum. Arguments as there, except that
    ``warmup_type: log`` (the default) is linear too.
    """

    first = -1

    def share(self, it: int) -> float:
        """Part of the way that the optimizer step after ``step()`` number ``it + 1`` runs at."""
        return min(1.0, (it + 2) / self._given_steps)

    def rates(self, it: int) -> list[float]:
        """See :class:`Schedule`."""
        share = self.share(it)
        return [low + (high - low) * share for low, high in zip(self._min, self._max, strict=True)]


class OneCycle(Schedule):
    """Up and down once between two rates, momentum the other way, then a decay.

    Args:
        optimizer: Whose rates are set.
        cycle_min_lr: Rates at both ends of the cycle.
        cycle_max_lr: Rates at its top.
        decay_lr_rate: How fast the rates decay after the cycle.
        cycle_first_step_size: Optimizer steps of the rise.
        cycle_second_step_size: Optimizer steps of the fall; None means as many.
        cycle_first_stair_count: Stairs of the rise; 0 means a straight line.
        cycle_second_stair_count: Stairs of the fall; None means as many.
        decay_step_size: Optimizer steps of one interval of the decay; 0 means no decay.
        cycle_momentum: Whether the momentum (the first beta) moves too.
        cycle_min_mom: Momentum at the top of the cycle.
        cycle_max_mom: Momentum at its ends.
        decay_mom_rate: How fast the momentum grows after the cycle.
        last_batch_iteration: Where to go on.

    References:
        Smith, arXiv:1803.09820.
    """

    def __init__(  # noqa: PLR0917 - DeepSpeed's order
        self,
        optimizer: torch.optim.Optimizer,
        cycle_min_lr: Rates,
        cycle_max_lr: Rates,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,  # noqa: FBT001, FBT002 - DeepSpeed's order
        cycle_min_mom: float = 0.8,
        cycle_max_mom: float = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        groups = len(optimizer.param_groups)
        self._min = _for_groups("cycle_min_lr", cycle_min_lr, groups)
        self._max = _for_groups("cycle_max_lr", cycle_max_lr, groups)
        first = float(cycle_first_step_size)
        second = first if cycle_second_step_size is None else float(cycle_second_step_size)
        self._total = first + second
        self._turn = first / self._total
        self._stairs = (
            cycle_first_stair_count,
            cycle_first_stair_count
            if cycle_second_stair_count is None
            else cycle_second_stair_count,
        )
        self._decay_rate = decay_lr_rate
        self._decay_steps = decay_step_size
        self._decay_momentum = decay_mom_rate
        self._min_momentum, self._max_momentum = cycle_min_mom, cycle_max_mom
        self._moves_momentum = cycle_momentum and all(
            "betas" in group or "momentum" in group for group in optimizer.param_groups
        )
        if last_batch_iteration == -1:
            self._write_rates(self._min)
            if self._moves_momentum:
                self._write_momentum(self._max_momentum)

    def _height(self, it: int) -> float:
        """How far up the triangle, 0 to 1."""
        turns = (it + 1) / self._total
        at = 1.0 + turns - math.floor(1.0 + turns)
        rising = at <= self._turn
        height = at / self._turn if rising else (at - 1.0) / (self._turn - 1.0)
        stairs = self._stairs[0] if rising else self._stairs[1]
        return math.floor(height * stairs) / stairs if stairs else height

    def _decay(self, it: int) -> float:
        """Intervals of decay since the end of the cycle."""
        if self._decay_steps == 0:
            return 0.0
        return (it - self._total + 1) / self._decay_steps

    def rates(self, it: int) -> list[float]:
        """See :class:`Schedule`."""
        if it < self._total:
            height = self._height(it)
            both = zip(self._min, self._max, strict=True)
            return [low + (high - low) * height for low, high in both]
        return [low / (1.0 + self._decay_rate * self._decay(it)) for low in self._min]

    def momentum(self, it: int) -> float:
        """Momentum of all groups after ``step()`` number ``it + 1``."""
        if it < self._total:
            return self._max_momentum - (self._max_momentum - self._min_momentum) * self._height(it)
        return self._max_momentum * (1.0 + self._decay_momentum * self._decay(it))

    def get_mom(self) -> list[float]:
        """Momentum of each group at the present count."""
        momentum = self.momentum(self.last_batch_iteration)
        return [momentum] * len(self.optimizer.param_groups)

    def _write(self, it: int) -> None:
        super()._write(it)
        if self._moves_momentum:
            self._write_momentum(self.momentum(it))

    def _write_rates(self, rates: Sequence[float]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def _write_momentum(self, momentum: float) -> None:
        for group in self.optimizer.param_groups:
            if "betas" in group:
                group["betas"] = (momentum, 0.99)
            else:
                group["momentum"] = momentum


class LRRangeTest(Schedule):
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

    def __init__(  # noqa: PLR0917 - DeepSpeed's order
        self,
        optimizer: torch.optim.Optimizer,
        lr_range_test_min_lr: Rates = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,  # noqa: FBT001, FBT002 - DeepSpeed's order
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        groups = len(optimizer.param_groups)
        self._min = _for_groups("lr_range_test_min_lr", lr_range_test_min_lr, groups)
        self._size = _whole_steps("lr_range_test_step_size", lr_range_test_step_size)
        self._rate = lr_range_test_step_rate
        self._stairs = lr_range_test_staircase
        if last_batch_iteration == -1:
            for group, rate in zip(optimizer.param_groups, self._min, strict=True):
                group["lr"] = rate

    def rates(self, it: int) -> list[float]:
        """See :class:`Schedule`."""
        interval = (it + 1) / self._size
        if self._stairs:
            interval = math.floor(interval)
        return [low * (1.0 + self._rate * interval) for low in self._min]


SCHEDULES: dict[str, type[Schedule]] = {
    "WarmupLR": WarmupLR,
    "WarmupDecayLR": WarmupDecayLR,
    "WarmupCosineLR": WarmupCosineLR,
    "OneCycle": OneCycle,
    "LRRangeTest": LRRangeTest,
    "LinearWarmupLR": LinearWarmupLR,
}
"""By the name in the ``scheduler`` block."""
