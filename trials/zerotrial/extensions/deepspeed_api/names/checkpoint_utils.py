"""``deepspeed.checkpoint.utils``."""

from typing import Any

import torch

__all__ = ["clone_tensors_for_torch_save"]


def clone_tensors_for_torch_save(item: Any, device: Any = "cpu") -> Any:
    """Copy tensors out of the flat memory they lie in, so that a file holds no more than them.

    Tied weights, which are one tensor under several names, stay one tensor.

    Args:
        item: A tensor, or containers of them.
        device: Of the copies.
    """
    copies: dict[tuple[Any, ...], torch.Tensor] = {}

    def copy(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            key = (value.data_ptr(), value.shape, value.stride(), value.dtype, value.device)
            if key not in copies or value.numel() == 0:
                copies[key] = value.detach().clone().to(device)
            return copies[key]
        if isinstance(value, list | tuple):
            return type(value)(copy(part) for part in value)
        if isinstance(value, dict):
            return type(value)({name: copy(part) for name, part in value.items()})
        return value

    return copy(item)
