"""What stands where an optimizer would, in an engine that only computes."""

from typing import Any

import torch

__all__ = ["NothingToUpdate", "no_optimizer"]


class NothingToUpdate(torch.optim.Optimizer):
    """An optimizer of no parameters, which torch's own class refuses to be."""

    elementwise = True

    def __init__(self) -> None:
        self.defaults: dict[str, Any] = {}
        self.param_groups: list[dict[str, Any]] = []
        self.state: Any = {}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing."""

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's
        """Do nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Return what torch's would, of no parameters."""
        return {"state": {}, "param_groups": []}


class _NoOptimizer:
    """See :class:`~zerotrial.engine.protocols.OptimizerFactory`."""

    elementwise = True

    def __call__(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Build it; there are no groups."""
        del groups
        return NothingToUpdate()


no_optimizer = _NoOptimizer()
"""The factory of engines that only compute."""
