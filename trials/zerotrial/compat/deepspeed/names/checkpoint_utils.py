"""``deepspeed.checkpoint.utils``."""

from typing import Any

import torch

__all__ = ["clone_tensors_for_torch_save"]


def clone_tensors_for_torch_save(item: Any, device: Any = "cpu") -> Any:
    """Copy tensors out of the flat memory they lie in, so that a file holds no more than them.

    Args:
        item: A tensor, or containers of them.
        device: Of the copies.
    """
    if isinstance(item, torch.Tensor):
        return item.detach().clone().to(device)
    if isinstance(item, list | tuple):
        return type(item)(clone_tensors_for_torch_save(value, device) for value in item)
    if isinstance(item, dict):
        return type(item)(
            {key: clone_tensors_for_torch_save(value, device) for key, value in item.items()}
        )
    return item
