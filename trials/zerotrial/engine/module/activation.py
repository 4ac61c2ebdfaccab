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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from zerotrial.engine.module.forward import AroundForward
from zerotrial.engine.module.units import find_blocks

if TYPE_CHECKING:
    from zerolab.config.engine.runtime import ActivationCheckpointingConfig
    from zerotrial.engine.tensor.redistribution import TensorRanks

Forward = Callable[..., Any]
_LOOKED_AT = 64
"""At most so many elements of an input tell whether it is the same on all ranks."""

Recompute = Callable[[Forward], Forward]
"""Makes of a computation one that keeps its inputs, and is made again in backward."""


def checkpoint_blocks(
    module: nn.Module, config: ActivationCheckpointingConfig, line: TensorRanks | None = None
) -> list[str]:
    """Make a model's blocks recompute, where the config asks for it.

    Only the forward of each block is replaced; names, parameters and hooks stay. To be called
    before the model is sharded and after it is compiled.

    Args:
        module: The whole model.
        config: The ``activation_checkpointing`` block.
        line: Tensor-parallel ranks that may share what is kept.

    Returns:
        Names of the blocks; empty when the config is off.
    """
    if not config.active:
        return []
    recompute = recomputing(config, line)
    names = []
    for name, block in find_blocks(module):
        block.forward = AroundForward(block.forward, recompute(block.forward))
        names.append(name)
    return names


def recomputing(
    config: ActivationCheckpointingConfig, line: TensorRanks | None = None
) -> Recompute:
    """Choose where the inputs of what is computed again wait.

    Args:
        config: The ``activation_checkpointing`` block.
        line: Tensor-parallel ranks that may share what is kept.
    """
    divides = config.partition_activations and line is not None and line.size > 1
    if not divides and not config.cpu_checkpointing:
        return recomputed
    return lambda forward: _kept(
        forward, _Keep(line if divides else None, on_host=config.cpu_checkpointing)
    )


def recomputed(forward: Forward) -> Forward:
    """Have a computation keep its inputs alone, and made again in backward."""

    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return call


@dataclass(frozen=True)
class _Keep:
    """How a block's inputs wait for backward."""

    line: TensorRanks | None
    """Ranks that each keep a part of what is whole on all of them."""

    on_host: bool
    whole: dict[tuple[int, int], bool] = field(default_factory=dict)
    """Which of so many inputs are whole on all ranks, as far as that is known."""

    def divides(self, leaf: Tensor, place: tuple[int, int]) -> bool:
        """Whether each rank is to keep a part of an input. **Collective** until that is known.

        What a layer cut by columns gives to the next one is another tensor on each rank. One look
        tells, but for a tensor of equal numbers, which says nothing.
        """
        if self.line is None or not leaf.is_floating_point() or not leaf.numel():
            return False
        if place not in self.whole:
            flat = leaf.detach().reshape(-1)
            sample = flat[:: -(-flat.numel() // _LOOKED_AT)].float()
            found = self.line.gather(sample, 0).view(self.line.size, -1)
            if bool((found == found[0, 0]).all()):
                return False
            self.whole[place] = torch.allclose(found, found[:1].expand_as(found), rtol=1e-2)
        return self.whole[place]


def _kept(forward: Forward, keep: _Keep) -> Forward:
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
        self._kept = [_put_away(leaf, keep, (len(leaves), at)) for at, leaf in enumerate(leaves)]

    def take(self) -> list[Any]:
        """Return the inputs on their own devices; the originals the first time only."""
        if self._fresh is not None:
            fresh, self._fresh = self._fresh, None
            return fresh
        return [kept.bring() if isinstance(kept, _Away) else kept for kept in self._kept]


class _Away:
    """A tensor's values, in part or in host memory, and what is needed to make it again."""

    def __init__(self, tensor: Tensor, line: TensorRanks | None, *, on_host: bool) -> None:
        self._device, self._shape = tensor.device, tensor.shape
        self._requires_grad = tensor.requires_grad
        self._line = line
        source = tensor.detach()
        if self._line is not None:
            source = _own_part(source.reshape(-1), self._line)
        if on_host and source.device.type != "cpu":
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


def _own_part(flat: Tensor, line: TensorRanks) -> Tensor:
    """Copy this rank's part, as long as the others'."""
    length = -(-flat.numel() // line.size)
    part = flat.new_zeros(length)
    mine = flat[line.rank * length : (line.rank + 1) * length]
    part[: mine.numel()].copy_(mine)
    return part


def _put_away(leaf: Any, keep: _Keep, place: tuple[int, int]) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    line = keep.line if keep.divides(leaf, place) else None
    if line is None and (leaf.device.type == "cpu" or not keep.on_host):
        return leaf
    return _Away(leaf, line, on_host=keep.on_host)
