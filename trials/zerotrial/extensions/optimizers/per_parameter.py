"""Base class for per-parameter optimizers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["PerParameterOptimizer", "loss_of"]


class PerParameterOptimizer(torch.optim.Optimizer):
    """Base class of optimizers that call :meth:`update` for every parameter with a gradient."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = loss_of(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad, group)
        return loss

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """Update one parameter in place, without a graph.

        Args:
            parameter: The parameter; its states are in ``self.state[parameter]``, empty at first.
            gradient: Its gradient; may be read only.
            group: Its group, with the options.
        """
        raise NotImplementedError


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """Run a closure that was passed to ``step()``, with a graph, and return its loss.

    Args:
        closure: Computes the loss and its gradients, or None.
    """
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
