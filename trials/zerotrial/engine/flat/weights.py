"""Lays a model's parameters into the flat buffers of stages 0, 1 and 2."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zerotrial.engine.comm.communicator import Buffer, Communicator
from zerotrial.engine.flat.layout import Bucket, allocate_for
from zerotrial.engine.module.frozen import FrozenOriginals
from zerotrial.engine.module.precision import kept_in_full
from zerotrial.engine.protocols import StageInputs

__all__ = ["FlatWeights", "flatten_parameters"]


@dataclass(frozen=True)
class FlatWeights:
    """What :func:`flatten_parameters` makes, by bucket."""

    buffers: list[Buffer]
    """In the type in which forward computes; the parameters are views of them."""

    masters: list[Tensor]
    """What this rank updates, (S,) or (N * S,); part of the buffer where the types are the same."""


def flatten_parameters(
    inputs: StageInputs,
    buckets: Sequence[Bucket],
    comm: Communicator,
    owned: Callable[[Bucket], slice],
    originals: FrozenOriginals,
) -> FlatWeights:
    """Lay the parameters into buffers, from rank 0's values. **Collective**.

    What is not trained gets rank 0's values too, and the type in which forward computes.

    Args:
        inputs: Of the stage.
        buckets: Which parameter lies where.
        comm: Between the data-parallel ranks.
        originals: Get the frozen parameters that are rounded.
        owned: Says which elements of a bucket this rank updates.
    """
    dtypes = [bucket.dtype for bucket in buckets]
    weights = FlatWeights(allocate_for(buckets, dtypes, comm, inputs.device), [])
    for bucket, buffer in zip(buckets, weights.buffers, strict=True):
        wide = _master_type(inputs, bucket)
        flat = torch.zeros(bucket.numel, dtype=wide, device=inputs.device)
        for place in bucket.places:
            flat[place.start : place.stop].copy_(place.parameter.detach().reshape(-1))
        comm.broadcast(flat)
        buffer.tensor.copy_(flat)
        for place in bucket.places:
            view = buffer.tensor[place.start : place.stop]
            place.parameter.data = view.view(place.parameter.shape)
        own = owned(bucket)
        mine = flat if own == slice(0, bucket.numel) else flat[own].clone()
        weights.masters.append(buffer.tensor[own] if wide == bucket.dtype else mine)
    _spread_the_rest(inputs, buckets, comm, originals)
    return weights


def _master_type(inputs: StageInputs, bucket: Bucket) -> torch.dtype:
    if bucket.dtype in {torch.float16, torch.bfloat16} and inputs.precision.compute:
        return inputs.precision.master
    return torch.promote_types(bucket.dtype, bucket.places[0].parameter.dtype)


def _spread_the_rest(
    inputs: StageInputs,
    buckets: Sequence[Bucket],
    comm: Communicator,
    originals: FrozenOriginals,
) -> None:
    """Give every rank rank 0's frozen parameters and buffers; cast the former."""
    trained = {place.parameter for bucket in buckets for place in bucket.places}
    compute = inputs.precision.compute
    kept = kept_in_full(inputs.module)
    for name, parameter in inputs.module.named_parameters():
        if parameter in trained:
            continue
        comm.broadcast(parameter.data)
        if compute is not None and parameter.is_floating_point() and parameter not in kept:
            if buckets and torch.promote_types(parameter.dtype, compute) != compute:
                originals.keep(name, parameter)
            parameter.data = parameter.data.to(compute)
    for value in inputs.module.buffers():
        comm.broadcast(value)
