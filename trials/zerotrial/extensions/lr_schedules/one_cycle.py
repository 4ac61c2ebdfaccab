"""``OneCycle``: one rise and fall of the rates, then a decay."""

from typing import Any, ClassVar

from zerolab.config.engine.schedules import OneCycleParams
from zerolab.schema.section import Section
from zerotrial.engine.lr_schedules.base import LRSchedule, for_groups, set_rates

__all__ = ["OneCycle"]


class OneCycle(LRSchedule):
    """One rise and fall of the rates, then a decay.

    The momentum moves in the opposite direction.

    Args:
        optimizer: Optimizer whose rates are set.
        cycle_min_lr: Rates at both ends of the cycle.
        cycle_max_lr: Rates at its top.
        decay_lr_rate: Speed of the decay after the cycle.
        cycle_first_step_size: Optimizer steps of the rise.
        cycle_second_step_size: Optimizer steps of the fall; None means the same number.
        cycle_first_stair_count: Stairs of the rise; 0 means a straight line.
        cycle_second_stair_count: Stairs of the fall; None means the same number.
        decay_step_size: Optimizer steps per interval of the decay; 0 means no decay.
        cycle_momentum: Whether the momentum (the first beta) changes, too.
        cycle_min_mom: Momentum at the top of the cycle; one value, or one per parameter group.
        cycle_max_mom: Momentum at its ends; one value, or one per parameter group.
        decay_mom_rate: Growth of the momentum after the cycle.
        last_batch_iteration: Count at which to continue.

    References:
        Smith, arXiv:1803.09820.

    Example:
        >>> from zerotrial.engine.lr_schedules import OneCycle
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
        >>> schedule = OneCycle(optimizer, 0.01, 0.1, cycle_first_step_size=10)
        >>> for _ in range(10):
        ...     schedule.step()
        >>> round(schedule.get_last_lr()[0], 6)
        0.1
    """

    section: ClassVar[type[Section]] = OneCycleParams
    given: OneCycleParams

    def prepare(self) -> None:
        """Read the arguments in :attr:`given` and set the first rates of :attr:`optimizer`."""
        arguments, groups = self.given, self.optimizer.param_groups
        self._min = for_groups("cycle_min_lr", arguments.cycle_min_lr, len(groups))
        self._max = for_groups("cycle_max_lr", arguments.cycle_max_lr, len(groups))
        low = for_groups("cycle_min_mom", arguments.cycle_min_mom, len(groups))
        high = for_groups("cycle_max_mom", arguments.cycle_max_mom, len(groups))
        self._momenta = list(zip(low, high, strict=True))
        # (optimizer steps, stairs) of the rise and of the fall
        self._rise = (arguments.cycle_first_step_size, arguments.cycle_first_stair_count)
        self._fall = (
            _or(arguments.cycle_second_step_size, self._rise[0]),
            _or(arguments.cycle_second_stair_count, self._rise[1]),
        )
        self._total = self._rise[0] + self._fall[0]
        self._moves_momentum = arguments.cycle_momentum and all(
            "betas" in group or "momentum" in group for group in groups
        )
        if self.last_batch_iteration == -1:
            set_rates(self.optimizer, self._min)
            if self._moves_momentum:
                self._write_momentum(high)

    def _height(self, it: int) -> float:
        """Return the height in the triangle, 0 to 1; computed in integers for exact stairs."""
        position = (it + 1) % self._total
        rising = position <= self._rise[0]
        climbed, (steps, stairs) = (
            (position, self._rise) if rising else (self._total - position, self._fall)
        )
        return climbed * stairs // steps / stairs if stairs else climbed / steps

    def _decay(self, it: int) -> float:
        """Return the intervals of decay since the end of the cycle."""
        interval = self.given.decay_step_size
        return (it - self._total + 1) / interval if interval else 0.0

    def rates(self, it: int) -> list[float]:
        """Learning rate of each group after ``step()`` number ``it + 1``."""
        if it < self._total:
            height = self._height(it)
            both = zip(self._min, self._max, strict=True)
            return [low + (high - low) * height for low, high in both]
        return [low / (1.0 + self.given.decay_lr_rate * self._decay(it)) for low in self._min]

    def momentum(self, it: int) -> list[float]:
        """Return the momentum of each parameter group.

        Args:
            it: Count of :meth:`step`, from 0 for the first one.

        Returns:
            One momentum per group.

        Example:
            >>> from zerotrial.engine.lr_schedules import OneCycle
            >>> weight = torch.nn.Parameter(torch.ones(1))
            >>> optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
            >>> OneCycle(optimizer, 0.01, 0.1, cycle_first_step_size=10).momentum(9)
            [0.8]
        """
        if it < self._total:
            height = self._height(it)
            return [high - (high - low) * height for low, high in self._momenta]
        growth = 1.0 + self.given.decay_mom_rate * self._decay(it)
        return [high * growth for _, high in self._momenta]

    def get_mom(self) -> list[Any] | None:
        """Return the current betas or momentum of each group.

        Returns:
            One number, or a pair of betas, per parameter group; None if the momentum does not
            change.

        Example:
            >>> from zerotrial.engine.lr_schedules import OneCycle
            >>> weight = torch.nn.Parameter(torch.ones(1))
            >>> optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
            >>> OneCycle(optimizer, 0.01, 0.1).get_mom()
            [0.9]
        """
        if not self._moves_momentum:
            return None
        momenta = self.momentum(self.last_batch_iteration)
        both = zip(self.optimizer.param_groups, momenta, strict=True)
        return [_betas(momentum) if "betas" in group else momentum for group, momentum in both]

    def _write(self, it: int) -> None:
        super()._write(it)
        if self._moves_momentum:
            self._write_momentum(self.momentum(it))

    def _write_momentum(self, momenta: list[float]) -> None:
        for group, momentum in zip(self.optimizer.param_groups, momenta, strict=True):
            if "betas" in group:
                group["betas"] = _betas(momentum)
            else:
                group["momentum"] = momentum


def _betas(momentum: float) -> tuple[float, float]:
    return (momentum, 0.99)


def _or(value: int | None, default: int) -> int:
    return default if value is None else value
