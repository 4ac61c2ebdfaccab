"""Activation checkpointing: blocks are computed again in backward instead of being remembered.

A block keeps its inputs only. With ``cpu_checkpointing`` even those wait in host memory. What is
random in a block (dropout) is drawn again from the same state.

References:
    Chen et al., Training Deep Nets with Sublinear Memory Cost, arXiv:1604.06174.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from zerotrial.engine.module.units import find_blocks

if TYPE_CHECKING:
    from zerolab.config.engine.runtime import ActivationCheckpointingConfig

_Forward = Callable[..., Any]


def checkpoint_blocks(module: nn.Module, config: ActivationCheckpointingConfig) -> list[str]:
    """Make a model's blocks recompute, where the config asks for it.

    Only the forward of each block is replaced; names, parameters and hooks stay. To be called
    before the model is sharded and after it is compiled.

    Args:
        module: The whole model.
        config: The ``activation_checkpointing`` block.

    Returns:
        Names of the blocks; empty when the config is off.
    """
    if not config.active:
        return []
    names = []
    for name, block in find_blocks(module):
        forward = _offloaded if config.cpu_checkpointing else _recomputed
        block.forward = forward(block.forward)
        names.append(name)
    return names


def _recomputed(forward: _Forward) -> _Forward:
    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return call


def _offloaded(forward: _Forward) -> _Forward:
    """As above, with the block's inputs copied to the host between forward and backward."""

    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        leaves, structure = tree_flatten((args, kwargs))
        waiting = _Waiting(leaves)

        def compute(_device: Tensor | None) -> Any:
            inner_args, inner_kwargs = tree_unflatten(waiting.take(), structure)
            return forward(*inner_args, **inner_kwargs)

        # An empty tensor tells checkpoint() of which device to keep the random state.
        device = next((leaf.device for leaf in leaves if isinstance(leaf, Tensor)), None)
        return checkpoint(compute, torch.empty(0, device=device), use_reentrant=False)

    return call


class _Waiting:
    """A block's inputs: as they came for the forward, from host memory for the backward.

    Args:
        leaves: Tensors and other values; tensors on the host stay as they are.
    """

    def __init__(self, leaves: list[Any]) -> None:
        self._fresh: list[Any] | None = leaves
        self._kept = [_to_host(leaf) for leaf in leaves]

    def take(self) -> list[Any]:
        """Return the inputs on their own devices; the originals the first time only."""
        if self._fresh is not None:
            fresh, self._fresh = self._fresh, None
            return fresh
        return [kept.on_device() if isinstance(kept, _HostCopy) else kept for kept in self._kept]


class _HostCopy:
    """A tensor's values in host memory, and what is needed to make it again."""

    def __init__(self, tensor: Tensor) -> None:
        self._device = tensor.device
        self._requires_grad = tensor.requires_grad
        source = tensor.detach()
        pinned = source.device.type == "cuda"
        self._values = torch.empty_like(source, device="cpu", pin_memory=pinned)
        self._values.copy_(source, non_blocking=pinned)

    def on_device(self) -> Tensor:
        tensor = self._values.to(self._device, non_blocking=True)
        return tensor.requires_grad_(self._requires_grad)


def _to_host(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and leaf.device.type != "cpu":
        return _HostCopy(leaf)
    return leaf
