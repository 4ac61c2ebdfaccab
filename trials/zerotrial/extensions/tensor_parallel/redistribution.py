"""Redistribution of activations between layouts of tensor-parallel ranks.

T ranks; an activation is

- **replicate**: full on every rank, and so is its gradient;
- **split**: sharded along its last dimension, features or heads;
- **sequence**: sharded along dimension 1, the tokens;
- **partial**: to be summed over ranks, such as the output of a matrix sharded by rows.

The gradient of a sharded matrix's input is partial, too, because each rank only knows the
contribution of its own columns. Hence forward and backward mirror each other:

======================  ============================  ==========================
step                    forward                       backward
======================  ============================  ==========================
:func:`enter`           nothing; or gather            sum; or sum and scatter
:func:`leave`           sum; or sum and scatter       nothing; or gather
:func:`gather`          gather                        take the local part
:func:`take`            take the local part           gather
======================  ============================  ==========================

References:
    Shoeybi et al., Megatron-LM, arXiv:1909.08053, section 3.
    Korthikanti et al., Reducing Activation Recomputation, arXiv:2205.05198, section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerotrial.engine.comm.communicator import Traffic
from zerotrial.engine.protocols import COMMUNICATION

__all__ = ["SEQUENCE", "SPLIT", "TensorRanks", "enter", "gather", "leave", "take"]

_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""The function under its newest name."""

SEQUENCE, SPLIT = 1, -1
"""Dimensions along which activations are sharded."""

_Map = Callable[[Tensor], Tensor]


@dataclass
class _Entered:
    """Last activation that entered."""

    source: Tensor | None = None
    key: tuple[int, bool, bool] | None = None
    result: Tensor | None = None

    def forget(self) -> None:
        """Drop references to activations."""
        self.source = self.key = self.result = None


@dataclass(frozen=True)
class TensorRanks:
    """Ranks along the tensor axis."""

    group: Any
    rank: int
    size: int
    phase: Callable[[str], AbstractContextManager[None]]
    """Timer of phases, see :class:`~zerotrial.engine.protocols.Observer`."""

    traffic: Traffic = field(default_factory=Traffic)
    """Elements of activations and their gradients, counted as elsewhere in the engine."""

    entered: _Entered = field(default_factory=_Entered)

    def sum(self, values: Tensor) -> Tensor:
        """Sum all ranks' values. **Collective**."""
        total = values.clone(memory_format=torch.contiguous_format)
        with self.phase(COMMUNICATION):
            dist.all_reduce(total, group=self.group)
        self.traffic.add("all_reduce", 2 * total.numel())
        return total

    def gather(self, values: Tensor, dim: int) -> Tensor:
        """Concatenate all ranks' values along a dimension. **Collective**."""
        local = values.contiguous()
        gathered = [torch.empty_like(local) for _ in range(self.size)]
        with self.phase(COMMUNICATION):
            dist.all_gather(gathered, local, group=self.group)
        self.traffic.add("all_gather", self.size * local.numel())
        return torch.cat(gathered, dim=dim)

    def scatter(self, values: Tensor, dim: int) -> Tensor:
        """Sum all ranks' values, and return this rank's part along a dimension. **Collective**."""
        parts = torch.stack(self._parts(values, dim))  # (T, ...)
        local = torch.empty_like(parts[0])
        with self.phase(COMMUNICATION):
            _reduce_scatter(local.view(-1), parts.view(-1), group=self.group)
        self.traffic.add("reduce_scatter", parts.numel())
        return local

    def local_part(self, values: Tensor, dim: int) -> Tensor:
        """Return a copy of this rank's part along a dimension."""
        return self._parts(values, dim)[self.rank].clone(memory_format=torch.contiguous_format)

    def _parts(self, values: Tensor, dim: int) -> tuple[Tensor, ...]:
        length = values.shape[dim]
        if length % self.size:
            axis = "tokens" if dim == SEQUENCE else "features"
            msg = (
                f"tensor_parallel: an activation of shape {tuple(values.shape)} must have a "
                f"multiple of {self.size} {axis} in dimension {dim}, got {length}; pad the batch"
            )
            raise ValueError(msg)
        return values.chunk(self.size, dim)


class _Redistribute(torch.autograd.Function):
    """One function in forward, and its transpose in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: _Map, transposed: _Map) -> Tensor:
        ctx.transposed = transposed
        return run(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.transposed(gradients[0]), None, None


def _redistribute(x: Tensor, run: _Map, transposed: _Map) -> Tensor:
    return _Redistribute.apply(x, run, transposed)  # type: ignore[no-untyped-call, no-any-return]


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


def enter(x: Tensor, ranks: TensorRanks, *, sequence: bool = False) -> Tensor:
    """Pass an activation, or a replicated parameter, into a sharded computation.

    Consecutive matrices that read the same activation (query, key, value) share one call, and so
    one collective in backward.

    Args:
        x: Replicated activation, or each rank's tokens.
        ranks: Tensor-parallel ranks.
        sequence: Whether it is each rank's tokens.
    """
    key = (x._version, sequence, torch.is_grad_enabled())  # noqa: SLF001 - torch's, documented
    last = ranks.entered
    if last.source is x and last.key == key and last.result is not None:
        return last.result
    run: _Map = _same
    transposed: _Map = ranks.sum
    if sequence:
        run = partial(ranks.gather, dim=SEQUENCE)
        transposed = partial(ranks.scatter, dim=SEQUENCE)
    result = _redistribute(x, run, transposed)
    last.result, last.source, last.key = result, x, key
    return result


def leave(x: Tensor, ranks: TensorRanks, *, sequence: bool = False) -> Tensor:
    """Sum partial results of all ranks.

    Args:
        x: This rank's partial result.
        ranks: Tensor-parallel ranks.
        sequence: Whether each rank gets only its tokens.
    """
    if not sequence:
        return _redistribute(x, ranks.sum, _same)
    gathered = partial(ranks.gather, dim=SEQUENCE)
    return _redistribute(x, partial(ranks.scatter, dim=SEQUENCE), gathered)


def gather(x: Tensor, ranks: TensorRanks, dim: int) -> Tensor:
    """Gather an activation that is sharded along a dimension."""
    return _redistribute(x, partial(ranks.gather, dim=dim), partial(ranks.local_part, dim=dim))


def take(x: Tensor, ranks: TensorRanks, dim: int) -> Tensor:
    """Return this rank's part of a replicated activation."""
    return _redistribute(x, partial(ranks.local_part, dim=dim), partial(ranks.gather, dim=dim))
