"""Sees to it that ranks whose forward takes different ways do not mix their gradients at stage 3.

``fully_shard`` reduces a unit's gradients as soon as backward has passed it, and a unit that this
rank did not use at the end. Ranks that use different units therefore reduce different ones at a
time; where their sizes are alike, nobody would notice. So each rank keeps a number that stands for
its units in their order, and the ranks compare them when they sum the norm anyway.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from zerolab.errors import EngineError
from zerotrial.engine.stage3.internals import parameters_of

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

_PRIME = (1 << 20) - 3  # small enough for sums of squares that are exact in fp64
_BASE = 7919


class ReductionOrder:
    """A number for the units that this rank has reduced since the last boundary, in order.

    Args:
        units: All of them.
    """

    def __init__(self, units: Sequence[FSDPModule]) -> None:
        self._number = 1
        for index, unit in enumerate(units):
            parameters = parameters_of(unit)
            if parameters is not None and any(p.sharded.requires_grad for p in parameters.members):
                parameters.before_reduction(functools.partial(self._count, index))

    def _count(self, index: int) -> None:
        self._number = (self._number * _BASE + index + 1) % _PRIME

    def take(self) -> tuple[int, int]:
        """Give what the ranks are to sum, in fp64, and begin anew."""
        number, self._number = self._number, 1
        return number, number**2

    @staticmethod
    def check(total: Sequence[float], ranks: int) -> None:
        """Compare the ranks.

        Args:
            total: Sum over ranks of what :meth:`take` gave.
            ranks: How many.

        Raises:
            EngineError: If they have not all reduced the same units in the same order.
        """
        numbers, squares = map(int, total)
        if numbers**2 != ranks * squares:
            raise EngineError(
                "stage 3: the ranks ran different blocks of the model, or in another order, and "
                "their gradients would be mixed; name the class of the module that contains these "
                "blocks in zero_optimization.leaf_module.classes, or use zero_optimization.stage "
                "0, 1 or 2, where each rank may take its own way"
            )
