"""Where a rank's part of a stage 3 model lies: one piece of memory for each unit and group.

::

    parameter   [ row 0 | row 1 | row 2 | row 3 | row 4 ]      gathered for forward and backward
    rank 0      [ row 0 | row 1 | row 2 ]                      fp32, updated in place
    rank 1      [ row 3 | row 4 |   0   ]                      padded to the same length

    bucket      [- p0, my rows -][--- p1, my rows ---][- p2 -]   what the optimizer sees

N is the number of data-parallel ranks, S the elements of a bucket on one of them.
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

from zerotrial.engine.memory.mapped_files import release
from zerotrial.engine.module.gradient_access import get_raw_gradient, set_raw_gradient
from zerotrial.engine.module.replicated_parameters import ReplicatedBucket, make_buckets
from zerotrial.engine.stage3.internals import (
    ShardedParameter,
    UnitParameters,
    local_part,
    parameters_of,
)

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

    from zerotrial.engine.comm.communicator import Communicator
    from zerotrial.engine.memory.mapped_files import FileMemory
    from zerotrial.engine.protocols import StageInputs


@dataclass(frozen=True)
class Shard:
    """One trainable parameter, as this rank sees it."""

    name: str
    """In ``module.named_parameters()``; of tied parameters the first."""

    parameter: DTensor | nn.Parameter
    """Its ``grad`` is sharded alike; a plain parameter is replicated."""

    start: int
    """First element of the flattened parameter that this rank keeps."""

    stop: int
    """One after the last; equal to ``start`` on ranks that have no row."""

    bucket: int
    """Of the flat memory in which this rank's elements lie."""

    offset: int
    """Where they begin in it, in elements."""

    padded: int
    """Elements of every rank's part, the padding included."""

    counts: bool
    """Whether it counts on this rank; see :class:`~zerotrial.engine.mesh.Mesh`."""

    @property
    def span(self) -> slice:
        """This rank's elements in the bucket."""
        return slice(self.offset, self.offset + self.stop - self.start)


@dataclass(frozen=True)
class FlatBucket:
    """Shards of one unit and one optimizer group, end to end, in one piece of memory.

    A shard is padded to the length that the first rank has; the padding is and stays zero.
    """

    master: Tensor
    """(S,) fp32; the shards are views of it."""

    group_index: int
    parameters: Sequence[DTensor]
    paddeds: Sequence[int]
    """Elements of each parameter's shard with its padding."""

    unit: UnitParameters
    """That the parameters are of."""

    def take_gradient(self) -> Tensor | None:
        """Take the shards' gradients away from them, laid out like ``master``.

        A unit's gradients come out of one reduction, so that they lie as the shards do and need
        not be copied, unless some parameter has none.

        Returns:
            (S,), or None when backward reached none of them.
        """
        found = [_local(get_raw_gradient(parameter)) for parameter in self.parameters]
        for parameter in self.parameters:
            set_raw_gradient(parameter, None)
        first = found[0]
        if all(gradient is None for gradient in found):
            return None
        if first is not None and self._lie_as_shards(first, found):
            return first.as_strided((self.master.numel(),), (1,), first.storage_offset())
        # Pinned memory is used again from step to step; other memory comes page by page.
        together = torch.zeros_like(self.master, pin_memory=self.master.is_pinned())
        at = 0
        for gradient, padded in zip(found, self.paddeds, strict=True):
            if gradient is not None:
                together[at : at + gradient.numel()].copy_(gradient.reshape(-1))
            at += padded
        return together

    def _lie_as_shards(self, first: Tensor, found: Sequence[Tensor | None]) -> bool:
        memory, at = first.untyped_storage().data_ptr(), first.storage_offset()
        for gradient, padded in zip(found, self.paddeds, strict=True):
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
    """Where everything that this rank keeps lies."""

    shards: Sequence[Shard]
    """One for each trainable parameter."""

    buckets: Sequence[FlatBucket | ReplicatedBucket]
    """The replicated ones last."""

    @property
    def replicated(self) -> Sequence[ReplicatedBucket]:
        """The buckets of the parameters that are not sharded."""
        return [bucket for bucket in self.buckets if isinstance(bucket, ReplicatedBucket)]

    @functools.cached_property
    def shards_in(self) -> Sequence[Sequence[Shard]]:
        """Those of each bucket."""
        found: list[list[Shard]] = [[] for _ in self.buckets]
        for shard in self.shards:
            found[shard.bucket].append(shard)
        return found

    def counted(self) -> list[list[slice]]:
        """For each bucket, where the elements lie whose squares this rank adds to the norm."""
        if all(shard.counts for shard in self.shards):  # in one piece each, since padding is zero
            return [[slice(0, bucket.master.numel())] for bucket in self.buckets]
        return [[shard.span for shard in shards if shard.counts] for shards in self.shards_in]


def lay_out(
    inputs: StageInputs,
    units: Sequence[FSDPModule],
    comm: Communicator,
    files: FileMemory | None = None,
    *,
    factor: float,
) -> Layout:
    """Move this rank's shards into flat memory, one piece for each unit and optimizer group.

    Args:
        inputs: Of the stage; ``groups`` hold the parameters from before they were sharded, which
            are found again by name.
        units: Of :func:`~zerotrial.engine.stage3.wrap.shard_module`; no forward has run yet.
        comm: Between the ranks that states are sharded over.
        files: Where the memory is; None: where the shards are.
        factor: Multiplies the sum of the ranks' gradients of a replicated parameter.

    Returns:
        The shards and buckets, in the order of the units.
    """
    group_of = {
        named.name: index for index, group in enumerate(inputs.groups) for named in group.parameters
    }
    named = [member for group in inputs.groups for member in group.parameters]
    whose = inputs.mesh.counted_parameters(member.parameter for member in named)
    counting = {member.name for member in named if member.parameter in whose}
    names: dict[Any, str] = {
        p: name for name, p in inputs.module.named_parameters() if name in group_of
    }
    shards: list[Shard] = []
    buckets: list[FlatBucket | ReplicatedBucket] = []
    for unit in units:
        if (parameters := parameters_of(unit)) is None:
            continue
        # Gradients come in this order: those of one optimizer group must be neighbours.
        trained = [p for p in parameters.members if p.sharded.requires_grad]
        trained.sort(key=lambda p: group_of[names[p.sharded]])
        frozen = [p for p in parameters.members if not p.sharded.requires_grad]
        parameters.reorder(trained + frozen)
        if not trained:
            continue
        flat, at = _memory_like([p.shard for p in trained], files), 0
        by_group = itertools.groupby(trained, key=lambda p: group_of[names[p.sharded]])
        for group_index, members in by_group:
            begin, kept, paddeds = at, [], []
            for member in members:
                parameter = member.sharded
                padded = _move(member, flat[at:])
                name = names[parameter]
                place = (len(buckets), at - begin, padded)
                shards.append(_shard(name, parameter, place, counts=name in counting))
                kept.append(parameter)
                paddeds.append(padded)
                at += padded
            buckets.append(FlatBucket(flat[begin:at], group_index, kept, paddeds, parameters))
        release(flat)
    on_host = inputs.config.zero_optimization.offload_param.device != "none"
    device = torch.device("cpu") if on_host else inputs.device
    for bucket in make_buckets(inputs, comm, factor, device):
        for offset, replicated in enumerate(bucket.parameters):
            name = names[replicated]
            # As a matrix of one row: rank 0 has it.
            start = 0 if comm.rank == 0 else 1
            place = (len(buckets), offset, 1)
            shards.append(Shard(name, replicated, start, 1, *place, counts=name in counting))
        buckets.append(bucket)
    return Layout(shards, buckets)


def _memory_like(tensors: Sequence[Tensor], files: FileMemory | None) -> Tensor:
    """Make room for tensors of one type end to end, where and as they are."""
    first = tensors[0]
    numel = sum(tensor.numel() for tensor in tensors)
    if files is not None:
        return files.allocate(numel, first.dtype)
    flat = torch.zeros(numel, dtype=first.dtype, device=first.device)
    return flat.pin_memory() if first.is_pinned() else flat


def _move(member: ShardedParameter, memory: Tensor) -> int:
    """Move a parameter's shard to the beginning of ``memory``; returns its padded length."""
    home = memory[: member.shard.numel()]
    home.copy_(member.shard)
    release(member.shard)
    member.move_shard(home)
    return home.numel()


def _shard(name: str, parameter: DTensor, place: tuple[int, int, int], *, counts: bool) -> Shard:
    rows = -(-parameter.shape[0] // parameter.device_mesh.size())
    row = math.prod(parameter.shape[1:])
    start = min(rows * parameter.device_mesh.get_local_rank(), parameter.shape[0]) * row
    stop = start + local_part(parameter).numel()
    return Shard(name, parameter, start, stop, *place, counts)


def whole_parameter(shard: Shard, comm: Communicator, device: torch.device) -> Tensor:
    """Gather one parameter. **Collective**.

    Args:
        shard: This rank's part of it; not a replicated one.
        comm: Between the data-parallel ranks.
        device: Where the collectives run.

    Returns:
        In the parameter's shape, fp32; nobody else's memory.
    """
    local = local_part(cast("DTensor", shard.parameter)).detach().reshape(-1)
    shape = shard.parameter.shape
    padded = -(-shape[0] // comm.size) * math.prod(shape[1:])
    buffer = comm.allocate(comm.size * padded, local.dtype, device)
    begin = comm.rank * padded
    buffer.tensor[begin : begin + local.numel()].copy_(local)
    comm.all_gather(buffer).wait()
    return buffer.tensor[: shape.numel()].view(shape)
