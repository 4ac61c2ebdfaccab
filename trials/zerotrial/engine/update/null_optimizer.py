"""Null optimizer for inference-only engines."""

from typing import Any

import torch

__all__ = ["NullOptimizer", "no_optimizer"]


class NullOptimizer(torch.optim.Optimizer):
    """Optimizer without parameters, which torch's class does not permit."""

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
        """Return the state dict of an optimizer without parameters."""
        return {"state": {}, "param_groups": []}


class _NullOptimizerFactory:
    """Optimizer factory that returns a null optimizer."""

    elementwise = True

    def __call__(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Return a null optimizer; there are no groups."""
        del groups
        return NullOptimizer()


no_optimizer = _NullOptimizerFactory()
"""Optimizer factory of inference-only engines."""
