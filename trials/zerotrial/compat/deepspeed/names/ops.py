"""``deepspeed.ops.adam``, ``.adagrad`` and ``.lion``: torch's optimizers by those names."""

from typing import Any, cast

import torch

from zerotrial.engine.update.choose import ADAMS
from zerotrial.engine.update.lion import Lion

__all__ = [
    "DeepSpeedCPUAdagrad",
    "DeepSpeedCPUAdam",
    "DeepSpeedCPULion",
    "FusedAdam",
    "FusedLion",
]

FusedLion = DeepSpeedCPULion = Lion
DeepSpeedCPUAdagrad = torch.optim.Adagrad


def FusedAdam(  # noqa: N802, PLR0917 - DeepSpeed's name and order
    params: Any,
    lr: float = 1e-3,
    bias_correction: bool = True,  # noqa: FBT001, FBT002 - DeepSpeed's
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    adam_w_mode: bool = True,  # noqa: FBT001, FBT002 - DeepSpeed's
    weight_decay: float = 0.0,
    amsgrad: bool = False,  # noqa: FBT001, FBT002 - DeepSpeed's
    **more: Any,
) -> torch.optim.Optimizer:
    """Make the Adam that the engine file's arguments of these names stand for.

    Raises:
        TypeError: For an argument that is not DeepSpeed's.
    """
    decoupled = more.pop("adamw_mode", adam_w_mode)
    for without_effect in ("set_grad_none", "fp32_optimizer_states"):
        more.pop(without_effect, None)
    if more:
        raise TypeError(f"got an unexpected keyword argument {next(iter(more))!r}")
    options: dict[str, Any] = {"amsgrad": True} if amsgrad else {}
    cls: Any = ADAMS[decoupled, bias_correction]
    made = cls(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, **options)
    return cast("torch.optim.Optimizer", made)


DeepSpeedCPUAdam = FusedAdam
