"""Sums of squares that are exact enough to be compared between engines.

torch's fp32 norm on CPU reads 4e-4 low at 10 M elements, which a clipped run inherits as a wrong
learning rate. Here rows of 256 elements are summed in fp32 and the rows in fp64 (error about 1e-9
in the end); a fp64 cast of everything would cost seven times as much. What has 16 bits goes through
BLAS, in blocks that stay in the cache when they are cast.
"""

import torch
from torch import Tensor

__all__ = ["squared_norm"]

_ROW = 1 << 8
_BLOCK = 1 << 14


def squared_norm(values: Tensor) -> Tensor:
    """Sum of squares of a flat tensor.

    Args:
        values: Any floating type, 1-D, contiguous.

    Returns:
        fp64 scalar on the same device; inf or nan when a value is not finite.
    """
    if values.device.type != "cpu":  # reductions there are trees, and exact enough in fp32
        wide = torch.promote_types(values.dtype, torch.float32)
        norm: Tensor = torch.linalg.vector_norm(values, dtype=wide)
        return norm.double().square()
    if values.dtype == torch.float64:
        return torch.dot(values, values)
    if values.dtype == torch.float32:
        return _by_rows(values)
    total = torch.zeros((), dtype=torch.float64)
    for block in torch.split(values, _BLOCK):
        floats = block.float()
        total += torch.dot(floats, floats)
    return total


def _by_rows(values: Tensor) -> Tensor:
    """All rows in one call, which torch divides among its threads."""
    whole = values.numel() // _ROW * _ROW
    rows, rest = values[:whole].view(-1, _ROW), values[whole:]
    squares: Tensor = torch.linalg.vector_norm(rows, dim=1).double().square().sum()
    return squares + torch.dot(rest, rest)
