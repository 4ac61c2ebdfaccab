"""How activations pass from one layout to another between tensor-parallel ranks, and back.

T ranks; an activation is

- **replicate**: whole on every rank, and its gradient too;
- **split**: cut along its last dimension, features or heads;
- **sequence**: cut along dimension 1, the tokens;
- in **parts** that are still to be summed: what a matrix cut by rows gives.

What enters a cut matrix comes back in parts too, as gradients: each rank knows what its own columns
have to say. Hence forward and backward are each other's mirror:

======================  ============================  ==========================
step                    forward                       backward
======================  ============================  ==========================
:func:`enter`           nothing; or gather            sum; or sum and scatter
:func:`leave`           sum; or sum and scatter       nothing; or gather
:func:`gather`          gather                        take one's own part
:func:`take`            take one's own part           gather
======================  ============================  ==========================

References:
    Shoeybi et al., Megatron-LM, arXiv:1909.08053, section 3.
    Korthikanti et al., Reducing Activation Recomputation, arXiv:2205.05198, section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerotrial.engine.comm.communicator import Traffic
from zerotrial.engine.comm.timed_collectives import COMMUNICATION

__all__ = ["SEQUENCE", "SPLIT", "Line", "enter", "gather", "leave", "take"]

_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Under the name that the newest torch has for it."""

SEQUENCE, SPLIT = 1, -1
"""Dimensions along which activations are cut."""


@dataclass
class _Entered:
    """What entered last."""

    source: Tensor | None = None
    key: tuple[int, bool, bool] | None = None
    result: Tensor | None = None

    def forget(self) -> None:
        """Keep no activation alive."""
        self.source = self.key = self.result = None


@dataclass(frozen=True)
class Line:
    """The ranks along the tensor axis."""

    group: Any
    rank: int
    size: int
    phase: Callable[[str], AbstractContextManager[None]]
    """Times what runs inside; see :class:`~zerotrial.engine.protocols.Observer`."""

    traffic: Traffic = field(default_factory=Traffic)
    """Elements of activations and their gradients, counted as everywhere in the engine."""

    entered: _Entered = field(default_factory=_Entered)

    def sum(self, values: Tensor) -> Tensor:
        """Add up all ranks' values. **Collective**."""
        total = values.clone(memory_format=torch.contiguous_format)
        with self.phase(COMMUNICATION):
            dist.all_reduce(total, group=self.group)
        self.traffic.add("all_reduce", 2 * total.numel())
        return total

    def gather(self, values: Tensor, dim: int) -> Tensor:
        """Put all ranks' values together along a dimension. **Collective**."""
        own = values.contiguous()
        found = [torch.empty_like(own) for _ in range(self.size)]
        with self.phase(COMMUNICATION):
            dist.all_gather(found, own, group=self.group)
        self.traffic.add("all_gather", self.size * own.numel())
        return torch.cat(found, dim=dim)

    def scatter(self, values: Tensor, dim: int) -> Tensor:
        """Add up all ranks' values, and keep this rank's part along a dimension. **Collective**."""
        parts = torch.stack(self._parts(values, dim))  # (T, ...)
        own = torch.empty_like(parts[0])
        with self.phase(COMMUNICATION):
            _reduce_scatter(own.view(-1), parts.view(-1), group=self.group)
        self.traffic.add("reduce_scatter", parts.numel())
        return own

    def own(self, values: Tensor, dim: int) -> Tensor:
        """Copy this rank's part along a dimension."""
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


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, line: Line) -> Tensor:
        ctx.line = line
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.line.sum(gradients[0]), None


class _EnterGathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, line: Line) -> Tensor:
        ctx.line = line
        return line.gather(x, SEQUENCE)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.line.scatter(gradients[0], SEQUENCE), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, line: Line) -> Tensor:
        return line.sum(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _LeaveScattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, line: Line) -> Tensor:
        ctx.line = line
        return line.scatter(x, SEQUENCE)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.line.gather(gradients[0], SEQUENCE), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, line: Line, dim: int) -> Tensor:
        ctx.line, ctx.dim = line, dim
        return line.gather(x, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.line.own(gradients[0], ctx.dim), None, None


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, line: Line, dim: int) -> Tensor:
        ctx.line, ctx.dim = line, dim
        return line.own(x, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.line.gather(gradients[0], ctx.dim), None, None


def enter(x: Tensor, line: Line, *, sequence: bool = False) -> Tensor:
    """Let an activation, or a whole parameter, into what ranks compute in parts.

    Several matrices that read one activation one after the other (query, key, value) share one
    entrance, and so one collective in backward.

    Args:
        x: The same on all ranks, or each rank's tokens.
        line: The ranks.
        sequence: Whether it is each rank's tokens.
    """
    key = (x._version, sequence, torch.is_grad_enabled())  # noqa: SLF001 - torch's, documented
    last = line.entered
    if last.source is x and last.key == key and last.result is not None:
        return last.result
    function = _EnterGathered if sequence else _Enter
    last.result = function.apply(x, line)  # type: ignore[no-untyped-call]
    last.source, last.key = x, key
    assert last.result is not None
    return last.result


def leave(x: Tensor, line: Line, *, sequence: bool = False) -> Tensor:
    """Sum what all ranks have computed in parts.

    Args:
        x: This rank's part of the sum.
        line: The ranks.
        sequence: Whether each is to have only its tokens.
    """
    function = _LeaveScattered if sequence else _Leave
    return function.apply(x, line)  # type: ignore[no-untyped-call, no-any-return]


def gather(x: Tensor, line: Line, dim: int) -> Tensor:
    """Make an activation whole that is cut along a dimension."""
    return _Gather.apply(x, line, dim)  # type: ignore[no-untyped-call, no-any-return]


def take(x: Tensor, line: Line, dim: int) -> Tensor:
    """Cut an activation that is whole on all ranks."""
    return _Take.apply(x, line, dim)  # type: ignore[no-untyped-call, no-any-return]
