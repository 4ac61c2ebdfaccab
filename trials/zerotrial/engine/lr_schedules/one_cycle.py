"""``OneCycle``: up and down once, then a decay."""

from typing import Any, ClassVar

from zerolab.config.engine.schedules import OneCycleParams
from zerolab.schema.section import Section
from zerotrial.engine.lr_schedules.base import LRSchedule, for_groups, set_rates

__all__ = ["OneCycle"]


class OneCycle(LRSchedule):
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
        cycle_min_mom: Momentum at the top of the cycle; one, or one for each parameter group.
        cycle_max_mom: Momentum at its ends; the same.
        decay_mom_rate: How fast the momentum grows after the cycle.
        last_batch_iteration: Where to go on.

    References:
        Smith, arXiv:1803.09820.
    """

    section: ClassVar[type[Section]] = OneCycleParams
    given: OneCycleParams

    def prepare(self) -> None:
        """Make ready, when :attr:`optimizer` and :attr:`given` are there; sets the first rates."""
        given, groups = self.given, self.optimizer.param_groups
        self._min = for_groups("cycle_min_lr", given.cycle_min_lr, len(groups))
        self._max = for_groups("cycle_max_lr", given.cycle_max_lr, len(groups))
        low = for_groups("cycle_min_mom", given.cycle_min_mom, len(groups))
        high = for_groups("cycle_max_mom", given.cycle_max_mom, len(groups))
        self._momenta = list(zip(low, high, strict=True))
        # (optimizer steps, stairs) of the rise and of the fall
        self._rise = (given.cycle_first_step_size, given.cycle_first_stair_count)
        self._fall = (
            _or(given.cycle_second_step_size, self._rise[0]),
            _or(given.cycle_second_stair_count, self._rise[1]),
        )
        self._total = self._rise[0] + self._fall[0]
        self._moves_momentum = given.cycle_momentum and all(
            "betas" in group or "momentum" in group for group in groups
        )
        if self.last_batch_iteration == -1:
            set_rates(self.optimizer, self._min)
            if self._moves_momentum:
                self._write_momentum(high)

    def _height(self, it: int) -> float:
        """How far up the triangle, 0 to 1; in whole steps, so that a stair begins on its step."""
        at = (it + 1) % self._total
        rising = at <= self._rise[0]
        climbed, (steps, stairs) = (at, self._rise) if rising else (self._total - at, self._fall)
        return climbed * stairs // steps / stairs if stairs else climbed / steps

    def _decay(self, it: int) -> float:
        """Intervals of decay since the end of the cycle."""
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
        """Momentum of each group after ``step()`` number ``it + 1``."""
        if it < self._total:
            height = self._height(it)
            return [high - (high - low) * height for low, high in self._momenta]
        growth = 1.0 + self.given.decay_mom_rate * self._decay(it)
        return [high * growth for _, high in self._momenta]

    def get_mom(self) -> list[Any] | None:
        """What the present count means for each group: its betas, or its momentum.

        Returns:
            None where no momentum is moved.
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


def _or(given: int | None, other: int) -> int:
    return other if given is None else given
