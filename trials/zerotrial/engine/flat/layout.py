"""How parameters lie end to end in buckets, and which part of a bucket each rank owns.

    parameters   [--p0--][------p1------][-p2-]
    bucket       [--p0--][------p1------][-p2-][0]     padded to a multiple of the ranks; large
                                                       parameters begin on cache lines
    shards       [---- rank 0 ---][---- rank 1 ---]    cut without regard to parameter edges

An optimizer that needs whole parameters (LAMB, Muon) gets another layout: every parameter lies in
one rank's shard, and each shard is padded to the largest. Parameters that are tied over pipeline
stages lie in buckets of their own, which are alike on all their owners.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from zerotrial.engine.comm.communicator import Buffer, Communicator
from zerotrial.engine.mesh import Tie, tie_of
from zerotrial.engine.protocols import ParamGroup

__all__ = ["Bucket", "Place", "allocate_for", "cut_into_buckets"]

_ALIGN = 32  # elements: a cache line in 16 bits, two in 32


@dataclass(frozen=True)
class Place:
    """Where a parameter lies in its bucket."""

    name: str
    parameter: nn.Parameter
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return self.stop - self.start


@dataclass(frozen=True)
class Bucket:
    """Parameters of one optimizer group and one type, reduced in one collective."""

    index: int
    group_index: int
    dtype: torch.dtype
    """Of the parameters while the model computes."""

    places: tuple[Place, ...]
    shard_numel: int
    """S: elements that each rank owns, padding included."""

    numel: int
    """N * S."""

    tie: Tie | None = None
    """Its parameters are tied to those of other pipeline stages, where a bucket like it lies."""

    def gaps(self) -> list[slice]:
        """Elements that belong to no parameter."""
        found, at = [], 0
        for place in sorted(self.places, key=lambda place: place.start):
            if place.start > at:
                found.append(slice(at, place.start))
            at = place.stop
        if at < self.numel:
            found.append(slice(at, self.numel))
        return found

    def shard(self, rank: int) -> slice:
        """Elements of the bucket that a rank owns."""
        return slice(rank * self.shard_numel, (rank + 1) * self.shard_numel)


@dataclass
class _Draft:
    group_index: int
    dtype: torch.dtype
    names: list[str]
    parameters: list[nn.Parameter]
    numel: int
    last: int
    """Place of the bucket's last gradient in the order of backward."""

    tie: Tie | None


def cut_into_buckets(
    groups: Sequence[ParamGroup],
    order: Sequence[str],
    bucket_numel: int,
    ranks: int,
    compute: torch.dtype | None,
    *,
    keep: Collection[nn.Parameter] = (),
    whole_parameters: bool = False,
) -> list[Bucket]:
    """Lay all parameters out.

    Args:
        groups: Of the optimizer.
        order: Names as the module lists them; backward is expected to go the other way.
        bucket_numel: Largest number of elements of a bucket; one parameter may exceed it.
        ranks: N.
        compute: Type of the parameters in buckets; None keeps each parameter's own.
        keep: Parameters that keep their own type all the same.
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
            # A tied bucket is never cut: its owners must all have the same one.
            if draft is None or (full and not whole_parameters and tie is None):
                draft = _Draft(group_index, dtype, [], [], 0, 0, tie)
                open_drafts[kind] = draft
                drafts.append(draft)
            draft.names.append(named.name)
            draft.parameters.append(parameter)
            draft.numel += parameter.numel()
            draft.last = max(draft.last, turn[named.name])
    drafts.sort(key=lambda draft: draft.last)
    buckets: list[Bucket] = []
    for draft in drafts:
        lay_out = _places_whole if whole_parameters else _places_in_a_row
        places, shard_numel = lay_out(draft, ranks)
        numel = shard_numel * ranks
        buckets.append(
            Bucket(
                len(buckets), draft.group_index, draft.dtype, places, shard_numel, numel, draft.tie
            )
        )
    return buckets


def allocate_for(
    buckets: Sequence[Bucket],
    dtypes: Sequence[torch.dtype],
    comm: Communicator,
    device: torch.device,
) -> list[Buffer]:
    """Make a buffer for each bucket, all of one type in one piece of memory. **Collective**.

    Args:
        buckets: In order.
        dtypes: Of each one's buffer.
        comm: Allocates.
        device: Of the buffers.
    """
    starts, totals = [], dict.fromkeys(dtypes, 0)
    for bucket, dtype in zip(buckets, dtypes, strict=True):
        starts.append(totals[dtype])
        totals[dtype] = _round_up(totals[dtype] + bucket.numel, _ALIGN)
    whole = {dtype: comm.allocate(total, dtype, device) for dtype, total in totals.items()}
    return [
        whole[dtype].part(start, start + bucket.numel)
        for bucket, dtype, start in zip(buckets, dtypes, starts, strict=True)
    ]


def _round_up(numel: int, unit: int) -> int:
    return -(-numel // unit) * unit


def _places_in_a_row(draft: _Draft, ranks: int) -> tuple[tuple[Place, ...], int]:
    places, at = [], 0
    for name, parameter in zip(draft.names, draft.parameters, strict=True):
        if parameter.numel() >= 64 * _ALIGN:  # matrix kernels like to begin on a cache line
            at = _round_up(at, _ALIGN)
        places.append(Place(name, parameter, at, at + parameter.numel()))
        at += parameter.numel()
    # Small buckets are not padded to cache lines: the padding would outweigh them.
    unit = _ALIGN if at >= 64 * _ALIGN * ranks else 1
    return tuple(places), _round_up(_round_up(at, ranks) // ranks, unit)


def _places_whole(draft: _Draft, ranks: int) -> tuple[tuple[Place, ...], int]:
    fill = [0] * ranks
    owner: dict[str, tuple[int, int]] = {}
    items = list(zip(draft.names, draft.parameters, strict=True))
    for name, parameter in sorted(items, key=lambda item: -item[1].numel()):
        rank = fill.index(min(fill))
        owner[name] = (rank, fill[rank])
        fill[rank] += parameter.numel()
    shard_numel = max(fill)
    places = []
    for name, parameter in items:
        rank, at = owner[name]
        start = rank * shard_numel + at
        places.append(Place(name, parameter, start, start + parameter.numel()))
    return tuple(places), shard_numel
