"""Activation checkpointing: blocks are computed again in backward instead of being remembered.

A block keeps its inputs only. With ``cpu_checkpointing`` even those wait in host memory; with
``partition_activations`` each tensor-parallel rank keeps a part of those that are whole on all.
What is random in a block (dropout) is drawn again from the same state.

References:
    Chen et al., Training Deep Nets with Sublinear Memory Cost, arXiv:1604.06174.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from zerotrial.engine.module.units import find_blocks

if TYPE_CHECKING:
    from zerolab.config.engine.runtime import ActivationCheckpointingConfig
    from zerotrial.engine.tensor.moves import Line

_Forward = Callable[..., Any]


def checkpoint_blocks(
    module: nn.Module, config: ActivationCheckpointingConfig, line: Line | None = None
) -> list[str]:
    """Make a model's blocks recompute, where the config asks for it.

    Only the forward of each block is replaced; names, parameters and hooks stay. To be called
    before the model is sharded and after it is compiled.

    Args:
        module: The whole model.
        config: The ``activation_checkpointing`` block.
        line: Tensor-parallel ranks, which may share what is kept.

    Returns:
        Names of the blocks; empty when the config is off.
    """
    if not config.active:
        return []
    names = []
    divides = config.partition_activations and line is not None and line.size > 1
    keep = _Keep(line if divides else None, on_host=config.cpu_checkpointing)
    for name, block in find_blocks(module):
        elsewhere = divides or config.cpu_checkpointing
        block.forward = _kept(block.forward, keep) if elsewhere else _recomputed(block.forward)
        names.append(name)
    return names


def _recomputed(forward: _Forward) -> _Forward:
    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return call


@dataclass(frozen=True)
class _Keep:
    """How a block's inputs wait for backward."""

    line: Line | None
    """Ranks that each keep a part of what is whole on all of them."""

    on_host: bool


def _kept(forward: _Forward, keep: _Keep) -> _Forward:
    """As above, with the block's inputs kept elsewhere between forward and backward."""

    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        leaves, structure = tree_flatten((args, kwargs))
        waiting = _Waiting(leaves, keep)

        def compute(_device: Tensor | None) -> Any:
            inner_args, inner_kwargs = tree_unflatten(waiting.take(), structure)
            return forward(*inner_args, **inner_kwargs)

        # An empty tensor tells checkpoint() of which device to keep the random state.
        device = next((leaf.device for leaf in leaves if isinstance(leaf, Tensor)), None)
        return checkpoint(compute, torch.empty(0, device=device), use_reentrant=False)

    return call


class _Waiting:
    """A block's inputs: as they came for the forward, from where they are kept for the backward.

    Args:
        leaves: Tensors and other values.
        keep: How.
    """

    def __init__(self, leaves: list[Any], keep: _Keep) -> None:
        self._fresh: list[Any] | None = leaves
        self._kept = [_put_away(leaf, keep) for leaf in leaves]

    def take(self) -> list[Any]:
        """Return the inputs on their own devices; the originals the first time only."""
        if self._fresh is not None:
            fresh, self._fresh = self._fresh, None
            return fresh
        return [kept.bring() if isinstance(kept, _Away) else kept for kept in self._kept]


class _Away:
    """A tensor's values, in part or in host memory, and what is needed to make it again."""

    def __init__(self, tensor: Tensor, keep: _Keep) -> None:
        self._device, self._shape = tensor.device, tensor.shape
        self._requires_grad = tensor.requires_grad
        self._line = keep.line if tensor.is_floating_point() else None
        source = tensor.detach()
        if self._line is not None:
            source = _own_part(source.reshape(-1), self._line)
        if keep.on_host and source.device.type != "cpu":
            pinned = source.device.type == "cuda"
            there = torch.empty_like(source, device="cpu", pin_memory=pinned)
            source = there.copy_(source, non_blocking=pinned)
        self.values = source

    def bring(self) -> Tensor:
        """Make the tensor again. **Collective** where each rank has a part."""
        tensor = self.values.to(self._device, non_blocking=True)
        if self._line is not None:
            tensor = self._line.gather(tensor, 0)[: self._shape.numel()].view(self._shape)
        return tensor.requires_grad_(self._requires_grad)


def _own_part(flat: Tensor, line: Line) -> Tensor:
    """Copy this rank's part, as long as the others'."""
    length = -(-flat.numel() // line.size)
    part = flat.new_zeros(length)
    mine = flat[line.rank * length : (line.rank + 1) * length]
    part[: mine.numel()].copy_(mine)
    return part


def _put_away(leaf: Any, keep: _Keep) -> Any:
    if isinstance(leaf, Tensor) and (leaf.device.type != "cpu" or keep.line is not None):
        return _Away(leaf, keep)
    return leaf
