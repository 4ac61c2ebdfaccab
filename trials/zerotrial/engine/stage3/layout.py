"""Memory layout of a rank's shards at stage 3: one flat buffer per unit and optimizer group.

::

    parameter   [ row 0 | row 1 | row 2 | row 3 | row 4 ]      gathered for forward and backward
    rank 0      [ row 0 | row 1 | row 2 ]                      fp32, updated in place
    rank 1      [ row 3 | row 4 |   0   ]                      padded to the same length

    bucket      [ p0, own rows  ][  p1, own rows     ][  p2  ]   what the optimizer sees

N is the number of data-parallel ranks, S the elements of a bucket on one rank.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zerotrial.engine.module.full_tensor import full_tensor_of
from zerotrial.engine.module.gradient_access import get_raw_gradient, set_raw_gradient
from zerotrial.engine.module.replicated_parameters import ReplicatedBucket, make_buckets
from zerotrial.engine.stage3.internals import (
    ShardedParameter,
    UnitParameters,
    local_part,
    parameters_of,
    remove_fully_shard,
)

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

    from zerotrial.engine.comm.communicator import Communicator
    from zerotrial.engine.module.gradient_hooks import GradientHooks
    from zerotrial.engine.module.ownership import ModelOwnership
    from zerotrial.engine.protocols import ShardMemory, StageInputs


@dataclass(frozen=True)
class Shard:
    """This rank's shard of one trainable parameter."""

    name: str
    """First of its names in ``module.named_parameters()``."""

    parameter: DTensor | nn.Parameter
    """Its ``grad`` is sharded in the same way; a plain parameter is replicated."""

    start: int
    """First element of the flattened parameter on this rank."""

    stop: int
    """End of its elements; equal to ``start`` on ranks without rows."""

    bucket: int
    """Index of the flat buffer."""

    offset: int
    """First element in the bucket."""

    padded: int
    """Elements of each rank's shard, with padding."""

    counts: bool
    """Whether this rank counts it in norms; see :class:`~zerotrial.engine.mesh.Mesh`."""

    @property
    def span(self) -> slice:
        """This rank's elements in the bucket."""
        return slice(self.offset, self.offset + self.stop - self.start)


@dataclass(frozen=True)
class FlatBucket:
    """Shards of one unit and one optimizer group in contiguous memory.

    Each shard is padded to the length of the first rank's; padding is always zero.
    """

    master: Tensor
    """(S,) fp32; the shards are views."""

    group_index: int
    parameters: Sequence[DTensor]
    paddeds: Sequence[int]
    """Elements of each parameter's shard, with padding."""

    unit: UnitParameters
    """Unit of the parameters."""

    def take_gradient(self) -> Tensor | None:
        """Remove the shards' gradients and return them in the layout of ``master``.

        One reduction produces all gradients of a unit, so they already lie like the shards and
        need no copy, unless a parameter has none.

        Returns:
            (S,), or None if backward reached no parameter.
        """
        gradients = [_local(get_raw_gradient(parameter)) for parameter in self.parameters]
        for parameter in self.parameters:
            set_raw_gradient(parameter, None)
        first = gradients[0]
        if all(gradient is None for gradient in gradients):
            return None
        if first is not None and self._is_laid_out_like_shards(first, gradients):
            return first.as_strided((self.master.numel(),), (1,), first.storage_offset())
        # Pinned memory is reused in every step; other memory is allocated page by page.
        flat = torch.zeros_like(self.master, pin_memory=self.master.is_pinned())
        at = 0
        for gradient, padded in zip(gradients, self.paddeds, strict=True):
            if gradient is not None:
                flat[at : at + gradient.numel()].copy_(gradient.reshape(-1))
            at += padded
        return flat

    def _is_laid_out_like_shards(self, first: Tensor, gradients: Sequence[Tensor | None]) -> bool:
        memory, at = first.untyped_storage().data_ptr(), first.storage_offset()
        for gradient, padded in zip(gradients, self.paddeds, strict=True):
            if gradient is None or gradient.storage_offset() != at:
                return False
            if gradient.untyped_storage().data_ptr() != memory:
                return False
            at += padded
        return True


def _local(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else local_part(cast("DTensor", tensor))


@dataclass(frozen=True)
class Layout:
    """Memory layout of everything that this rank stores."""

    shards: Sequence[Shard]
    """One per trainable parameter."""

    buckets: Sequence[FlatBucket | ReplicatedBucket]
    """Replicated buckets come last."""

    @property
    def replicated(self) -> Sequence[ReplicatedBucket]:
        """Buckets of parameters that are not sharded."""
        return [bucket for bucket in self.buckets if isinstance(bucket, ReplicatedBucket)]

    @functools.cached_property
    def shards_in(self) -> Sequence[Sequence[Shard]]:
        """Shards of each bucket."""
        by_bucket: list[list[Shard]] = [[] for _ in self.buckets]
        for shard in self.shards:
            by_bucket[shard.bucket].append(shard)
        return by_bucket

    def counted(self) -> list[list[slice]]:
        """For each bucket, the elements whose squares this rank adds to the norm."""
        if all(shard.counts for shard in self.shards):  # whole buckets: padding adds 0
            return [[slice(0, bucket.master.numel())] for bucket in self.buckets]
        return [[shard.span for shard in shards if shard.counts] for shards in self.shards_in]


def lay_out(
    inputs: StageInputs,
    units: Sequence[FSDPModule],
    comm: Communicator,
    *,
    factor: float,
) -> Layout:
    """Move this rank's shards to flat buffers, one per unit and optimizer group.

    Args:
        inputs: Inputs of the stage. Its ``groups`` hold the parameters from before sharding, which
            are matched by name.
        units: Result of :func:`~zerotrial.engine.stage3.sharding.shard_module`, before any forward.
        comm: Communicator of the ranks that shard states.
        factor: Factor of the sum over ranks of a replicated parameter's gradients.

    Returns:
        Shards and buckets in the order of the units.
    """
    group_of = {
        member.name: index
        for index, group in enumerate(inputs.groups)
        for member in group.parameters
    }
    named_parameters = [member for group in inputs.groups for member in group.parameters]
    counted = inputs.mesh.counted_parameters(member.parameter for member in named_parameters)
    counted_names = {member.name for member in named_parameters if member.parameter in counted}
    names: dict[Any, str] = {
        p: name for name, p in inputs.module.named_parameters() if name in group_of
    }
    shards: list[Shard] = []
    buckets: list[FlatBucket | ReplicatedBucket] = []
    for unit in units:
        if (parameters := parameters_of(unit)) is None:
            continue
        # Gradients come in this order; a bucket needs those of its optimizer group side by side.
        trained = [p for p in parameters.members if p.sharded.requires_grad]
        trained.sort(key=lambda p: group_of[names[p.sharded]])
        frozen = [p for p in parameters.members if not p.sharded.requires_grad]
        parameters.reorder(trained + frozen)
        if not trained:
            continue
        flat, at = _memory_like([p.shard for p in trained], inputs.memory), 0
        by_group = itertools.groupby(trained, key=lambda p: group_of[names[p.sharded]])
        for group_index, members in by_group:
            begin, sharded, paddeds = at, [], []
            for member in members:
                parameter = member.sharded
                padded = _move(member, flat[at:], inputs.memory)
                name = names[parameter]
                location = (len(buckets), at - begin, padded)
                shards.append(_shard(name, parameter, location, counts=name in counted_names))
                sharded.append(parameter)
                paddeds.append(padded)
                at += padded
            buckets.append(FlatBucket(flat[begin:at], group_index, sharded, paddeds, parameters))
        inputs.memory.release(flat)
    on_host = inputs.config.zero_optimization.offload_param.device != "none"
    device = torch.device("cpu") if on_host else inputs.device
    for bucket in make_buckets(inputs, comm, factor, device):
        for part in bucket.parts:
            name = names[part.parameter]
            location = (len(buckets), part.offset, part.padded)
            bounds = part.bounds(comm.rank)
            counts = name in counted_names
            shards.append(Shard(name, part.parameter, *bounds, *location, counts=counts))
        buckets.append(bucket)
    return Layout(shards, buckets)


def _memory_like(tensors: Sequence[Tensor], memory: ShardMemory) -> Tensor:
    """Allocate memory for tensors of one type in sequence, of the same kind as theirs."""
    return memory.allocate_like(sum(tensor.numel() for tensor in tensors), tensors[0])


def _move(member: ShardedParameter, target: Tensor, memory: ShardMemory) -> int:
    """Move a parameter's shard to the beginning of ``target``; return its padded length."""
    target = target[: member.shard.numel()]
    target.copy_(member.shard)
    memory.release(member.shard)
    member.move_shard(target)
    return target.numel()


def _shard(name: str, parameter: DTensor, location: tuple[int, int, int], *, counts: bool) -> Shard:
    rows = -(-parameter.shape[0] // parameter.device_mesh.size())
    row = math.prod(parameter.shape[1:])
    start = min(rows * parameter.device_mesh.get_local_rank(), parameter.shape[0]) * row
    stop = start + local_part(parameter).numel()
    return Shard(name, parameter, start, stop, *location, counts)


def gather_parameter(shard: Shard, comm: Communicator, device: torch.device) -> Tensor:
    """Gather one parameter. **Collective**.

    Args:
        shard: This rank's shard; not a replicated one.
        comm: Communicator of the data-parallel ranks.
        device: Device of the collectives.

    Returns:
        The full parameter in fp32, in its own memory.
    """
    local = local_part(cast("DTensor", shard.parameter)).detach().reshape(-1)
    shape = shard.parameter.shape
    padded = -(-shape[0] // comm.size) * math.prod(shape[1:])
    buffer = comm.allocate(comm.size * padded, local.dtype, device)
    begin = comm.rank * padded
    buffer.tensor[begin : begin + local.numel()].copy_(local)
    comm.all_gather(buffer).wait()
    return buffer.tensor[: shape.numel()].view(shape)


def unshard_model(  # noqa: PLR0917 - two callers
    units: Sequence[FSDPModule],
    layout: Layout,
    comm: Communicator,
    device: torch.device,
    ownership: ModelOwnership,
    hooks: GradientHooks,
) -> None:
    """Replace sharded parameters by full ones in the types of forward. **Collective**.

    Args:
        units: All units, the root last; none is gathered.
        layout: Locations of the shards.
        comm: Communicator of the ranks with the shards.
        device: Device of the full parameters.
        ownership: Has the parameters' former marks; records which new one replaces which old one.
        hooks: Gradient hooks, moved to the new parameters.
    """
    root = cast("nn.Module", units[-1])
    names: dict[Any, str] = {parameter: name for name, parameter in root.named_parameters()}
    shards: dict[Any, Any] = {shard.parameter: shard for shard in layout.shards}
    for unit in units:
        parameters = parameters_of(unit)
        full_parameters = []
        for member in [] if parameters is None else parameters.members:
            old: Any = member.sharded
            if old in shards:
                value = gather_parameter(shards[old], comm, device)
            else:
                value = full_tensor_of(old.detach())
            full = value.detach().to(device, member.forward_dtype, copy=True)
            new = ownership.replace(names[old], old, full)
            hooks.give_back(old, new)
            hooks.connect([(old, new)])
            full_parameters.append(new)
        remove_fully_shard(unit, full_parameters)
