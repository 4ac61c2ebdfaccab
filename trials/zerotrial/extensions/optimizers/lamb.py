"""LAMB: Adam whose step is scaled, parameter by parameter, to the size of the weights."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from zerotrial.extensions.optimizers.per_parameter import PerParameterOptimizer

__all__ = ["Lamb"]


class Lamb(PerParameterOptimizer):
    """LAMB for very large batches; the engine gives it full parameters.

    Args:
        params: Parameters or groups.
        lr: Learning rate.
        betas: Decay of the first and second moment.
        eps: Added to the root of the second moment.
        weight_decay: Part of the step that is scaled.
        bias_correction: Whether the moments are corrected for their start at zero.
        max_coeff: Largest trust ratio.
        min_coeff: Smallest trust ratio.
        eps_inside_sqrt: Add ``eps`` below the root of the second moment.

    References:
        You et al., arXiv:1904.00962, algorithm 2.
    """

    elementwise = False

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        eps_inside_sqrt: bool = False,
    ) -> None:
        options = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
            "eps_inside_sqrt": eps_inside_sqrt,
        }
        super().__init__(params, options)

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """Update one parameter in place; without a graph."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        first, second = state["exp_avg"], state["exp_avg_sq"]
        first.lerp_(gradient, 1.0 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
        count = float(state["step"])
        correct = group["bias_correction"]
        first_scale = 1.0 - beta1**count if correct else 1.0
        second_scale = 1.0 - beta2**count if correct else 1.0
        root = second / second_scale
        if group.get("eps_inside_sqrt", False):  # missing in older checkpoints
            root.add_(group["eps"]).sqrt_()
        else:
            root.sqrt_().add_(group["eps"])
        update = (first / first_scale) / root
        update.add_(parameter, alpha=group["weight_decay"])
        parameter.add_(update, alpha=-group["lr"] * _trust(parameter, update, group))


def _trust(parameter: Tensor, update: Tensor, group: dict[str, Any]) -> float:
    """Return the norm of the weights over that of the step, bounded; 1 if either is zero."""
    weights, step = float(parameter.norm()), float(update.norm())
    if weights == 0.0 or step == 0.0:
        return 1.0
    return min(max(weights / step, float(group["min_coeff"])), float(group["max_coeff"]))
