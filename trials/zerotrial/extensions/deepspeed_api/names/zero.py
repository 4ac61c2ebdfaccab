"""``deepspeed.zero``, and ``deepspeed.runtime.zero.partition_parameters``."""

import enum
from collections.abc import Callable
from typing import Any

import torch

from zerotrial.extensions.deepspeed_api.init import Init
from zerotrial.extensions.deepspeed_api.names.accelerator import get_accelerator
from zerotrial.extensions.deepspeed_api.names.z3_leaf_module import set_z3_leaf_modules
from zerotrial.extensions.deepspeed_api.parameter_access import GatheredParameters, ZeroParamStatus

__all__ = [
    "GatheredParameters",
    "Init",
    "OffloadDeviceEnum",
    "OffloadStateTypeEnum",
    "ZeroParamStatus",
    "_orig_torch_arange",
    "get_accelerator",
    "register_external_parameter",
    "set_z3_leaf_modules",
    "unregister_external_parameter",
    "zero_wrapper_for_fp_tensor_constructor",
]

_orig_torch_arange = torch.arange


class OffloadDeviceEnum(enum.StrEnum):
    """Values of ``offload_param.device`` and ``offload_optimizer.device``."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(enum.StrEnum):
    """Kinds of state that ``engine.offload_states`` of DeepSpeed takes."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., Any], *unused: Any, **options: Any
) -> Callable[..., Any]:
    """Return the function: no constructor of tensors is changed here."""
    del unused, options
    return fn


def register_external_parameter(module: Any, parameter: Any) -> None:
    """Do nothing; stage 3 gathers a weight that a module reads from another one."""


def unregister_external_parameter(module: Any, parameter: Any) -> None:
    """Do nothing."""
