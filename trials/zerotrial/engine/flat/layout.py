"""Layout of parameters in buckets, their size, and the shard that each rank owns.

parameters   [--p0--][------p1------][-p2-]
bucket       [--p0--][------p1------][-p2-][0]     padded to a multiple of the ranks; large
                                                    parameters begin on cache lines
shards       [---- rank 0 ---][---- rank 1 ---]    cut regardless of parameter boundaries

Optimizers that need full parameters (LAMB, Muon) use another layout: every parameter lies in one
rank's shard, and each shard is padded to the largest. Parameters tied over pipeline stages lie in
separate buckets, which are equal on all owners.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from zerolab.config.engine.zero import ZeroConfig
from zerotrial.engine.comm.communicator import Buffer, Communicator
from zerotrial.engine.mesh import Tie, tie_of
from zerotrial.engine.protocols import ParamGroup

__all__ = [
    "Bucket",
    "ParameterSlot",
    "allocate_for",
    "build_buckets",
    "choose_bucket_numel",
]

_ALIGN = 32  # elements: a cache line in 16 bits, two in 32


@dataclass(frozen=True)
class ParameterSlot:
    """Range of a parameter in its bucket."""

    name: str
    parameter: nn.Parameter
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements of the parameter."""
        return self.stop - self.start


@dataclass(frozen=True)
class Bucket:
    """Parameters of one optimizer group and one type, reduced in one collective."""

    index: int
    group_index: int
    dtype: torch.dtype
    """Type of the parameters in forward."""

    slots: tuple[ParameterSlot, ...]
    shard_numel: int
    """S: number of elements of a rank's shard, with padding."""

    numel: int
    """N * S."""

    tie: Tie | None = None
    """Tie of its parameters to those of other pipeline stages, which have an equal bucket."""

    def gaps(self) -> list[slice]:
        """Return the ranges that belong to no parameter."""
        gaps, position = [], 0
        for slot in sorted(self.slots, key=lambda slot: slot.start):
            if slot.start > position:
                gaps.append(slice(position, slot.start))
            position = slot.stop
        if position < self.numel:
            gaps.append(slice(position, self.numel))
        return gaps

    def shard(self, rank: int) -> slice:
        """Return the range of a rank's shard."""
        return slice(rank * self.shard_numel, (rank + 1) * self.shard_numel)


@dataclass
class _Draft:
    group_index: int
    dtype: torch.dtype
    names: list[str]
    parameters: list[nn.Parameter]
    numel: int
    last: int
    """Position of the bucket's last gradient in the order of backward."""

    tie: Tie | None


def build_buckets(
    groups: Sequence[ParamGroup],
    order: Sequence[str],
    bucket_numel: int,
    ranks: int,
    compute: torch.dtype | None,
    *,
    keep: Collection[nn.Parameter] = (),
    whole_parameters: bool = False,
) -> list[Bucket]:
    """Assign all parameters to buckets.

    Args:
        groups: Parameter groups of the optimizer.
        order: Parameter names in module order; backward is expected in reverse order.
        bucket_numel: Largest number of elements of a bucket; a single parameter may exceed it.
        ranks: N.
        compute: Type of the parameters in buckets; None keeps each parameter's type.
        keep: Parameters that keep their type regardless of ``compute``.
        whole_parameters: Keep every parameter in one rank's shard.

    Returns:
        Buckets in the order in which backward is expected to complete them.
    """
    turn = {name: len(order) - index for index, name in enumerate(order)}
    drafts: list[_Draft] = []
    for group_index, group in enumerate(groups):
        open_drafts: dict[tuple[torch.dtype, str | None], _Draft] = {}
        for named in sorted(group.parameters, key=lambda item: turn[item.name]):
            parameter = named.parameter
            dtype = parameter.dtype if compute is None or parameter in keep else compute
            tie = tie_of(parameter)
            kind = dtype, None if tie is None else tie.key
            draft = open_drafts.get(kind)
            full = draft is not None and draft.numel + parameter.numel() > bucket_numel
            # A tied bucket is never split: all owners must have the same one.
            if draft is None or (full and not whole_parameters and tie is None):
                draft = _Draft(group_index, dtype, [], [], 0, 0, tie)
                open_drafts[kind] = draft
                drafts.append(draft)
            draft.names.append(named.name)
            draft.parameters.append(parameter)
            draft.numel += parameter.numel()
            draft.last = max(draft.last, turn[named.name])
    # Collectives start in this order on every rank. A bucket cannot be sent before its last
    # gradient, so sorting by it lets no bucket wait behind one that backward completes later.
    drafts.sort(key=lambda draft: draft.last)
    buckets: list[Bucket] = []
    for draft in drafts:
        lay_out = _unsplit_slots if whole_parameters else _contiguous_slots
        slots, shard_numel = lay_out(draft, ranks)
        numel = shard_numel * ranks
        buckets.append(
            Bucket(
                len(buckets), draft.group_index, draft.dtype, slots, shard_numel, numel, draft.tie
            )
        )
    return buckets


def allocate_for(
    buckets: Sequence[Bucket],
    dtypes: Sequence[torch.dtype],
    comm: Communicator,
    device: torch.device,
) -> list[Buffer]:
    """Allocate a buffer for each bucket, from one memory per type. **Collective**.

    Args:
        buckets: Buckets in order.
        dtypes: Type of each bucket's buffer.
        comm: Allocator.
        device: Device of the buffers.
    """
    # One memory per type: every allocation is a collective that passes file descriptors between all
    # ranks. Starts are on cache lines, so that ranks never write to one line at the same time.
    starts, totals = [], dict.fromkeys(dtypes, 0)
    for bucket, dtype in zip(buckets, dtypes, strict=True):
        starts.append(totals[dtype])
        totals[dtype] = _round_up(totals[dtype] + bucket.numel, _ALIGN)
    memory = {dtype: comm.allocate(total, dtype, device) for dtype, total in totals.items()}
    return [
        memory[dtype].part(start, start + bucket.numel)
        for bucket, dtype, start in zip(buckets, dtypes, starts, strict=True)
    ]


def _round_up(numel: int, unit: int) -> int:
    return -(-numel // unit) * unit


def _contiguous_slots(draft: _Draft, ranks: int) -> tuple[tuple[ParameterSlot, ...], int]:
    slots, position = [], 0
    for name, parameter in zip(draft.names, draft.parameters, strict=True):
        if parameter.numel() >= 64 * _ALIGN:  # matrix kernels are faster on cache lines
            position = _round_up(position, _ALIGN)
        slots.append(ParameterSlot(name, parameter, position, position + parameter.numel()))
        position += parameter.numel()
    # Small buckets are not aligned to cache lines: the padding would outweigh them.
    unit = _ALIGN if position >= 64 * _ALIGN * ranks else 1
    return tuple(slots), _round_up(_round_up(position, ranks) // ranks, unit)


def _unsplit_slots(draft: _Draft, ranks: int) -> tuple[tuple[ParameterSlot, ...], int]:
    fill = [0] * ranks
    owner: dict[str, tuple[int, int]] = {}
    items = list(zip(draft.names, draft.parameters, strict=True))
    for name, parameter in sorted(items, key=lambda item: -item[1].numel()):
        rank = fill.index(min(fill))
        owner[name] = (rank, fill[rank])
        fill[rank] += parameter.numel()
    shard_numel = max(fill)
    slots = []
    for name, parameter in items:
        rank, at = owner[name]
        start = rank * shard_numel + at
        slots.append(ParameterSlot(name, parameter, start, start + parameter.numel()))
    return tuple(slots), shard_numel


_OVERLAP_PARTS = 8  # number of buckets without a configured size
_SMALLEST = 1 << 20  # elements; a smaller collective costs more than it hides
_LARGEST_ON_HOST = 1 << 24  # elements updated by the CPU; more fall out of its cache
_LARGEST_ON_GPU = 1 << 27  # elements; their update hides the launch of the next one


def choose_bucket_numel(
    zero: ZeroConfig,
    numel: int,
    *,
    stage: int,
    offload_optimizer: Literal["none", "cpu", "nvme"],
    device: str,
) -> int:
    """Return the largest number of elements of a bucket: configured, or a part of the model.

    Args:
        zero: ``zero_optimization``; its ``stage`` and offload settings are ignored.
        numel: Number of trained elements of the model.
        stage: 0, 1 or 2.
        offload_optimizer: Memory of the optimizer states.
        device: Type of the training device: ``cpu``, or another.

    Returns:
        A number from 1 to ``numel``.
    """
    limit = zero.reduce_bucket_size
    if stage:
        limit = min(limit, zero.allgather_bucket_size)
    if zero.overlap_comm is not False and "reduce_bucket_size" not in zero.model_fields_set:
        part = max(numel // _OVERLAP_PARTS, _SMALLEST)
        on_host = device == "cpu" or offload_optimizer != "none"
        limit = min(limit, part, _LARGEST_ON_HOST if on_host else _LARGEST_ON_GPU)
    if offload_optimizer == "nvme":
        limit = min(limit, _LARGEST_ON_HOST)  # three buckets of states are in memory at a time
    return max(1, min(limit, numel))
