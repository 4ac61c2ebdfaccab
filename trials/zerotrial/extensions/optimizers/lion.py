"""Lion: the sign of an interpolated momentum, one state for each parameter."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from zerotrial.extensions.optimizers.per_parameter import PerParameterOptimizer

__all__ = ["Lion"]


class Lion(PerParameterOptimizer):
    """Lion: steps of equal size in every element, in the direction of the momentum's sign.

    Args:
        params: Parameters or groups.
        lr: Learning rate; about a tenth of AdamW's.
        betas: Weight of the momentum in the direction, and its decay.
        weight_decay: Decoupled weight decay; about ten times AdamW's.

    References:
        Chen et al., Symbolic Discovery of Optimization Algorithms, arXiv:2302.06675, algorithm 2.
    """

    elementwise = True

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """Update one parameter in place; without a graph."""
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
        momentum = state["exp_avg"]
        beta1, beta2 = group["betas"]
        parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
        direction = torch.lerp(gradient, momentum, beta1).sign_()
        parameter.add_(direction, alpha=-group["lr"])
        momentum.lerp_(gradient, 1.0 - beta2)
