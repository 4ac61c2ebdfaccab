"""``deepspeed.ops``: DeepSpeed's optimizer classes, on torch's kernels.

They take DeepSpeed's arguments in its order and run on any device. Common arguments:

- ``params`` or ``model_params``: parameters or groups;
- ``lr``: learning rate;
- ``bias_correction``: correct the moments for their start at zero;
- ``betas``: decay of the first and second moment; of Lion: how much momentum goes into the
  direction, and how much is kept;
- ``eps``: added to the root of the second moment, or of the sum of squares;
- ``weight_decay``: strength of the weight decay;
- ``set_grad_none``, ``fp32_optimizer_states``: no effect. ``zero_grad()`` sets gradients to None,
  and states have the type of the engine's master weights.
"""

# ruff: noqa: FBT001, FBT002, PLR0917 - DeepSpeed's arguments, in its order

import inspect
from typing import Any

import torch

from zerolab.errors import ConfigError
from zerotrial.engine.update.factory import UncorrectedAdam, UncorrectedAdamW
from zerotrial.extensions.optimizers.lamb import Lamb
from zerotrial.extensions.optimizers.lion import Lion

__all__ = [
    "DeepSpeedCPUAdagrad",
    "DeepSpeedCPUAdam",
    "DeepSpeedCPULion",
    "FusedAdam",
    "FusedLamb",
    "FusedLion",
]

Betas = tuple[float, float]
_HAS_BOTH_DECAYS = "decoupled_weight_decay" in inspect.signature(torch.optim.Adam).parameters
"""Whether torch's Adam can decay as AdamW does: since torch 2.7."""

_Base: Any = UncorrectedAdam if _HAS_BOTH_DECAYS else UncorrectedAdamW


class _Adam(_Base):  # type: ignore[misc] # chosen by the version of torch
    """Adam with decoupled or L2 weight decay, with or without bias correction."""

    def __init__(
        self, params: Any, *, bias_correction: bool, adam_w_mode: bool, **options: Any
    ) -> None:
        if _HAS_BOTH_DECAYS:
            options["decoupled_weight_decay"] = adam_w_mode
        elif not adam_w_mode:
            problem = "adam_w_mode: must be True before torch 2.7, got False; use torch.optim.Adam"
            raise ConfigError(f"{type(self).__name__}()", [problem])
        super().__init__(params, **options)
        self.adam_w_mode = adam_w_mode
        # Set here, since torch's Adam does not know the option.
        self.defaults["bias_correction"] = bias_correction
        for group in self.param_groups:
            group.setdefault("bias_correction", bias_correction)


class FusedAdam(_Adam):
    """Adam and AdamW.

    Args:
        adam_w_mode: True: decoupled weight decay (AdamW); False: L2 regularization (Adam).
        amsgrad: Keep the maximum of the second moment.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            bias_correction=bias_correction,
            betas=betas,
            eps=eps,
            adam_w_mode=adam_w_mode,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
        )
        self.set_grad_none = set_grad_none


class DeepSpeedCPUAdam(_Adam):
    """Adam and AdamW, with the arguments of DeepSpeed's CPU kernel.

    Args:
        amsgrad: Keep the maximum of the second moment.
        adamw_mode: True: decoupled weight decay (AdamW); False: L2 regularization (Adam).
    """

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(
            model_params,
            lr=lr,
            bias_correction=bias_correction,
            betas=betas,
            eps=eps,
            adam_w_mode=adamw_mode,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
        )
        self.fp32_optimizer_states = fp32_optimizer_states


class DeepSpeedCPUAdagrad(torch.optim.Adagrad):
    """Adagrad, with the arguments of DeepSpeed's CPU kernel.

    Args:
        amsgrad: No effect, as in DeepSpeed.
    """

    elementwise = True

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay)
        del amsgrad
        self.fp32_optimizer_states = fp32_optimizer_states


class DeepSpeedCPULion(Lion):
    """Lion, with the arguments of DeepSpeed's CPU kernel."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        betas: Betas = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(model_params, lr, betas, weight_decay)
        self.fp32_optimizer_states = fp32_optimizer_states


class FusedLion(Lion):
    """Lion, with the arguments of DeepSpeed's GPU kernel."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: Betas = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, lr, betas, weight_decay)
        self.set_grad_none = set_grad_none


class FusedLamb(Lamb):
    """LAMB, with DeepSpeed's arguments.

    Args:
        eps_inside_sqrt: Add ``eps`` below the root.
        max_grad_norm: Only 0; set ``gradient_clipping`` in the engine file.
        max_coeff: Largest trust ratio.
        min_coeff: Smallest trust ratio.
        amsgrad: Only False, as in DeepSpeed.

    Raises:
        ConfigError: For ``max_grad_norm`` above 0, or ``amsgrad=True``.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        problems = []
        if max_grad_norm > 0:
            problems.append(
                f"max_grad_norm: must be 0, got {max_grad_norm}; set gradient_clipping: "
                f"{max_grad_norm} in the engine file"
            )
        if amsgrad:
            problems.append("amsgrad: must be False, got True; use FusedAdam for AMSGrad")
        if problems:
            raise ConfigError("FusedLamb()", problems)
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            bias_correction=bias_correction,
            max_coeff=max_coeff,
            min_coeff=min_coeff,
            eps_inside_sqrt=eps_inside_sqrt,
        )
