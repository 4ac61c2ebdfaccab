"""Transfer of micro-batches to a device."""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

__all__ = ["TorchData", "choose_device", "to_device"]

TorchData = dict[str, torch.Tensor] | Sequence[torch.Tensor] | torch.Tensor
"""Usual type of a data loader's batches; the name is Determined's, for annotations."""

logger = logging.getLogger(__name__)

_IMMOVABLE = (str, bytes, int, float, bool, complex, type(None))
_warned: set[type] = set()


def choose_device(local_rank: int) -> torch.device:
    """Return this rank's GPU, or else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def to_device(data: Any, device: torch.device) -> Any:  # noqa: PLR0911 - one return for each type
    """Move tensors and numeric arrays, in any nesting, to a device.

    Numbers and strings are returned unchanged. Other objects are too, with one warning per type.

    Args:
        data: Tensors, arrays, objects with ``.to``; or mappings, lists, tuples, named tuples and
            dataclasses of these.
        device: Target device.

    Returns:
        Data of the same structure. NumPy arrays and scalars become tensors.

    Example:
        >>> batch = {"image": torch.zeros(2, 3), "name": "cat"}
        >>> moved = zerotrial.to_device(batch, torch.device("cpu"))
        >>> moved["image"].shape, moved["name"]
        (torch.Size([2, 3]), 'cat')
    """
    if isinstance(data, torch.Tensor):
        return data.to(device, non_blocking=True)
    if isinstance(data, np.ndarray) and data.dtype.kind in "fciub":
        return torch.as_tensor(data).to(device, non_blocking=True)
    if isinstance(data, np.generic) and data.dtype.kind in "fciub":
        return torch.as_tensor(data.item(), device=device)
    if isinstance(data, Mapping):
        moved = {key: to_device(value, device) for key, value in data.items()}
        return moved if type(data) is dict else _rebuild_mapping(data, moved)
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(to_device(value, device) for value in data))
    if isinstance(data, list | tuple):
        return type(data)(to_device(value, device) for value in data)
    if hasattr(data, "to"):
        return data.to(device)
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        values = {f.name: getattr(data, f.name) for f in dataclasses.fields(data) if f.init}
        return dataclasses.replace(data, **to_device(values, device))
    if not isinstance(data, _IMMOVABLE) and type(data) not in _warned:
        _warned.add(type(data))
        logger.warning("to_device: cannot move %s; it is left unchanged", type(data).__name__)
    return data


def _rebuild_mapping(original: Mapping[Any, Any], moved: dict[Any, Any]) -> Any:
    try:
        return type(original)(moved)  # type: ignore[call-arg]  # OrderedDict, UserDict, AttrDict, ...
    except TypeError:
        return moved
