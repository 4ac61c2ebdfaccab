"""Activation checkpointing: backward recomputes blocks instead of keeping their activations.

A block keeps only its inputs; an extension keeps them in host memory, or a part on each rank. A
block draws its random numbers (dropout) again from the same state.

References:
    Chen et al., Training Deep Nets with Sublinear Memory Cost, arXiv:1604.06174.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from zerotrial.engine.module.forward import ForwardReplacement
from zerotrial.engine.module.units import find_blocks
from zerotrial.engine.protocols import ENGINE_PARTS

if TYPE_CHECKING:
    from zerolab.config.engine.runtime import ActivationCheckpointingConfig
    from zerotrial.engine.protocols import TensorRanks

Forward = Callable[..., Any]
Recompute = Callable[[Forward], Forward]
"""Wrapper of a computation that keeps only its inputs and recomputes it in backward."""


def checkpoint_blocks(
    module: nn.Module, config: ActivationCheckpointingConfig, ranks: TensorRanks | None = None
) -> list[str]:
    """Make a model's blocks recompute, if configured.

    Only the forward of each block is replaced; names, parameters and hooks stay. Call it before
    the model is sharded and after it is compiled.

    Args:
        module: The full model.
        config: The ``activation_checkpointing`` block.
        ranks: Tensor-parallel ranks that may divide kept inputs.

    Returns:
        Names of the blocks; empty if it is disabled.
    """
    if not config.active:
        return []
    recompute = recomputing(config, ranks)
    names = []
    for name, block in find_blocks(module):
        block.forward = ForwardReplacement(block.forward, recompute(block.forward))
        names.append(name)
    return names


def recomputing(
    config: ActivationCheckpointingConfig, ranks: TensorRanks | None = None
) -> Recompute:
    """Return the wrapper that recomputes, by the memory of the kept inputs.

    Args:
        config: The ``activation_checkpointing`` block.
        ranks: Tensor-parallel ranks that may divide kept inputs.
    """
    divides = config.partition_activations and ranks is not None and ranks.size > 1
    if not divides and not config.cpu_checkpointing:
        return recomputed
    recompute: Recompute = ENGINE_PARTS["activation_storage"](
        ranks if divides else None, on_host=config.cpu_checkpointing
    )
    return recompute


def recomputed(forward: Forward) -> Forward:
    """Wrap a computation to keep only its inputs and to recompute it in backward."""

    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return call
