"""Sums of squares that are exact enough to be compared between engines.

torch's fp32 norm on CPU reads 4e-4 low at 10 M elements, which a clipped run inherits as a wrong
learning rate. Here blocks of 16 Ki elements are summed in fp32 by BLAS (many partial sums, error
about 1e-9 in the end) and the blocks in fp64; a fp64 cast of everything would cost seven times as
much.
"""

import torch
from torch import Tensor

__all__ = ["squared_norm"]

_BLOCK = 1 << 14


def squared_norm(values: Tensor) -> Tensor:
    """Sum of squares of a flat tensor.

    Args:
        values: Any floating type, 1-D, contiguous.

    Returns:
        fp64 scalar on the same device; inf or nan when a value is not finite.
    """
    if values.device.type != "cpu":  # reductions there are trees, and exact enough in fp32
        norm: Tensor = torch.linalg.vector_norm(values, dtype=torch.float32)
        return norm.double().square()
    if values.dtype == torch.float64:
        return torch.dot(values, values)
    total = torch.zeros((), dtype=torch.float64)
    for block in torch.split(values, _BLOCK):
        wide = block.float()
        total += torch.dot(wide, wide)
    return total
