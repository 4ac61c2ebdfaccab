"""Sharding of a model's matrices over the tensor axis, and its reversal.

Parameters remain plain parameters with this rank's part as their value. The stages lay them out
like any other, and stage 3 shards each part over the data axis. The communication between ranks is
in wrappers around the forward of each sharded layer, see
:mod:`zerotrial.extensions.tensor_parallel.redistribution`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from zerolab.errors import ConfigError
from zerotrial.engine.comm.replicas import broadcast_module
from zerotrial.engine.module.equal_batches import check_batches
from zerotrial.engine.module.shard_spec import ShardSpec, mark
from zerotrial.engine.module.sharded_model import ShardedModel
from zerotrial.engine.protocols import NullObserver
from zerotrial.extensions.tensor_parallel.experts import replicated_parts
from zerotrial.extensions.tensor_parallel.first_batch import watch_first_batch
from zerotrial.extensions.tensor_parallel.forward_wrappers import wrap
from zerotrial.extensions.tensor_parallel.plan import find_layers
from zerotrial.extensions.tensor_parallel.plan_validation import (
    Stages,
    cuts_of,
    differently_sharded_ties,
    indivisible_heads,
    layouts_of,
    tied_embeddings,
    undeclared_blocks,
    unplanned_users,
)
from zerotrial.extensions.tensor_parallel.redistribution import TensorRanks

if TYPE_CHECKING:
    from zerolab.config.engine.parallel import TensorParallelConfig
    from zerotrial.engine.mesh import Mesh

__all__ = ["shard_model"]

logger = logging.getLogger(__name__)

_UNTIMED = NullObserver().phase


def shard_model(
    module: nn.Module,
    config: TensorParallelConfig,
    mesh: Mesh,
    device: torch.device,
    phase: Callable[[str], AbstractContextManager[None]] = _UNTIMED,
) -> ShardedModel:
    """Shard a model in place, from the first rank's values. **Collective** over a model's ranks.

    Afterwards all ranks of the axis draw the same random numbers, because dropout of replicated
    activations must be equal.

    Args:
        module: The model, or a pipeline stage of it; equal along the tensor axis except for its
            values.
        config: The ``tensor_parallel`` block.
        mesh: The mesh.
        device: Device for the transfer of values.
        phase: Timer of phases, see :class:`~zerotrial.engine.protocols.Observer`.

    Raises:
        ConfigError: If the plan does not fit the model; the model is not changed.
    """
    axis = mesh.tensor
    if axis.size == 1 or mesh.all_ranks is None:  # with an mpu the user has sharded the model
        return ShardedModel.none(module)
    stages = Stages(mesh.pipe.group)
    layers, problems = find_layers(module, config, stages.union)
    names = {parameter: name for name, parameter in module.named_parameters()}
    followers = tied_embeddings(module, layers)
    cuts: dict[nn.Parameter, ShardSpec] = {}
    for layer in [*layers, *followers]:
        for parameter, cut in cuts_of(layer, axis, problems):
            if cuts.setdefault(parameter, cut) != cut:
                problems.append(
                    f"{layer.name}: cuts {names[parameter]} along dimension {cut.dim}, and a layer "
                    f"that shares it along dimension {cuts[parameter].dim}; cut both alike"
                )
    problems += unplanned_users(module, [*layers, *followers], cuts, names)
    problems += indivisible_heads(module, axis.size)
    problems += differently_sharded_ties(module, cuts, names, stages)
    problems += replicated_parts(layers)
    by_tokens = any(stages.allgather(any("sequence" in layouts_of(layer) for layer in layers)))
    if by_tokens:
        problems += [
            f"{layer.name}: experts must get all tokens; use no 'sequence' layout in this plan"
            for layer in layers
            if layer.plan.style == "experts"
        ]
    # Each stage has different layers, so problems are merged: all ranks raise, or none.
    if problems := sorted(stages.union(set(problems))):
        raise ConfigError("tensor_parallel", problems)
    ranks = TensorRanks(axis.group, axis.rank, axis.size, phase)
    broadcast_module(module, axis, device)
    _synchronize_random_state(ranks, device)
    for parameter, cut in cuts.items():
        parameter.data = cut.take(parameter.data)
        mark(parameter, cut)
    divided = ShardedModel(
        module,
        {names[parameter]: cut for parameter, cut in cuts.items()},
        ranks,
        by_tokens=by_tokens,
    )
    for layer in [*layers, *followers]:
        wrap(layer, ranks, divided.on_undo)
    _watch_forwards(module, ranks)
    watch_first_batch(module, [*layers, *followers], axis.size)
    if mesh.saving.rank == 0:
        for text in undeclared_blocks(layers):
            logger.warning("%s", text)
    return divided


def _synchronize_random_state(ranks: TensorRanks, device: torch.device) -> None:
    """Copy the first rank's random state to every rank."""
    state = [torch.get_rng_state()]
    dist.broadcast_object_list(state, group=ranks.group, group_src=0)
    torch.set_rng_state(state[0])
    if device.type == "cuda":
        on_device = [torch.cuda.get_rng_state(device)]
        dist.broadcast_object_list(on_device, group=ranks.group, group_src=0)
        torch.cuda.set_rng_state(on_device[0], device)


def _watch_forwards(module: nn.Module, ranks: TensorRanks) -> None:
    """Check that the ranks read the same micro-batch; drop cached activations after forward."""

    def forget(*_: Any) -> None:
        ranks.entered.forget()

    check_batches(module, ranks.group, ranks.size, "tensor_parallel")
    module.register_forward_hook(forget)
