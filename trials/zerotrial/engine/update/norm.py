"""Sums of squares that are exact enough to be compared between engines.

torch's fp32 norm on CPU reads 4e-4 low at 10 M elements, which a clipped run inherits as a wrong
learning rate. Here rows of 256 elements are summed in fp32 and the rows in fp64 (error below 1e-7
in the end); a fp64 cast of everything would cost seven times as much.
"""

import torch
from torch import Tensor

__all__ = ["squared_norm"]

_ROW = 1 << 8
_BLOCK = 1 << 6  # rows of 16 bits that are cast at a time, and stay in the cache


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
    whole = values.numel() // _ROW * _ROW
    rows, rest = values[:whole].view(-1, _ROW), values[whole:].float()
    norms = torch.empty(len(rows))
    if values.dtype == torch.float32:  # in one call, which torch divides among its threads
        torch.linalg.vector_norm(rows, dim=1, out=norms)
    else:
        pairs = zip(torch.split(rows, _BLOCK), torch.split(norms, _BLOCK), strict=True)
        for block, part in pairs:
            torch.linalg.vector_norm(block.float(), dim=1, out=part)
    return norms.double().square().sum() + torch.dot(rest, rest)
