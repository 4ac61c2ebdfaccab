"""Arrays of numpy, torch and other libraries as arrays of numpy."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["is_torch", "to_numpy"]


def is_torch(value: Any) -> bool:
    """Return whether a value is a tensor of torch, without importing torch."""
    return type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "detach")


def to_numpy(value: Any) -> NDArray[Any]:
    """Return a value as an array of numbers.

    Raises:
        TypeError: If it is not one.
    """
    if is_torch(value):
        value = value.detach().cpu()
        if str(value.dtype) in {"torch.bfloat16", "torch.float8_e4m3fn", "torch.float8_e5m2"}:
            value = value.float()  # numpy has no such type
        value = value.numpy()
    try:
        array = np.asarray(value)
    except ValueError as error:  # rows of different lengths
        raise TypeError(str(error)) from error
    if array.dtype.kind not in "biuf":
        raise TypeError(f"must be numbers, got {type(value).__name__} of {array.dtype}")
    return array
