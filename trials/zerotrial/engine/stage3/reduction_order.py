"""Detection of ranks whose forwards ran different units: stage 3 would mix up their gradients.

``fully_shard`` reduces a unit's gradients as soon as backward has passed the unit, and those of
unused units at the end. Ranks that use different units would therefore reduce different units at
the same time, unnoticed if their sizes match. Each rank keeps a number computed from the order of
its units. The ranks compare these numbers in the reduction of the norm, which happens anyway.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from zerolab.errors import EngineError
from zerotrial.engine.stage3.internals import parameters_of

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

_PRIME = (1 << 20) - 3  # keeps sums of squares exact in fp64
_BASE = 7919


class ReductionOrder:
    """Hash of the order in which this rank has reduced units since the last boundary."""

    def __init__(self, units: Sequence[FSDPModule]) -> None:
        self._number = 1
        for index, unit in enumerate(units):
            parameters = parameters_of(unit)
            if parameters is not None and any(p.sharded.requires_grad for p in parameters.members):
                parameters.before_reduction(functools.partial(self._count, index))

    def _count(self, index: int) -> None:
        self._number = (self._number * _BASE + index + 1) % _PRIME

    def take(self) -> tuple[int, int]:
        """Return the values to sum over ranks, in fp64, and start over."""
        number, self._number = self._number, 1
        return number, number**2

    @staticmethod
    def check(total: Sequence[float], ranks: int) -> None:
        """Compare the ranks' orders.

        By the Cauchy-Schwarz inequality, the squared sum of the numbers equals N times the sum of
        squares only if all N numbers are equal.

        Args:
            total: Sum over ranks of the results of :meth:`take`.
            ranks: Number of ranks.

        Raises:
            EngineError: If the ranks have reduced different units or in another order.
        """
        numbers, squares = map(int, total)
        if numbers**2 != ranks * squares:
            raise EngineError(
                "stage 3: the ranks ran different blocks of the model, or in another order, and "
                "their gradients would be mixed; name the class of the module that contains these "
                "blocks in zero_optimization.leaf_module.classes, or use zero_optimization.stage "
                "0, 1 or 2, where each rank may take its own way"
            )
