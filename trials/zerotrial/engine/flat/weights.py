"""Flattening of a model's parameters into the buffers of stages 0, 1 and 2."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zerotrial.engine.comm.communicator import Buffer, Communicator
from zerotrial.engine.flat.layout import Bucket, allocate_for
from zerotrial.engine.module.frozen_parameters import FrozenOriginals
from zerotrial.engine.module.precision import uncast_parameters
from zerotrial.engine.protocols import StageInputs

__all__ = ["FlatWeights", "flatten_parameters"]


@dataclass(frozen=True)
class FlatWeights:
    """Flat weights and masters of all buckets."""

    buffers: list[Buffer]
    """Weights in the type of forward; the parameters are views of them."""

    masters: list[Tensor]
    """Masters that this rank updates, (S,) or (N * S,); views of the buffer for equal types."""


def flatten_parameters(
    inputs: StageInputs,
    buckets: Sequence[Bucket],
    comm: Communicator,
    owned: Callable[[Bucket], slice],
    originals: FrozenOriginals,
) -> FlatWeights:
    """Move the parameters into buffers, with rank 0's values. **Collective**.

    Parameters that are not trained also get rank 0's values and the type of forward.

    Args:
        inputs: Inputs of the stage.
        buckets: Assignment of parameters to buckets.
        comm: Communicator of the data-parallel ranks.
        originals: Keeps the full precision of frozen parameters that are rounded.
        owned: Returns the range of a bucket that this rank updates.
    """
    dtypes = [bucket.dtype for bucket in buckets]
    weights = FlatWeights(allocate_for(buckets, dtypes, comm, inputs.device), [])
    for bucket, buffer in zip(buckets, weights.buffers, strict=True):
        wide = _master_type(inputs, bucket)
        flat = torch.zeros(bucket.numel, dtype=wide, device=inputs.device)
        for slot in bucket.slots:
            flat[slot.start : slot.stop].copy_(slot.parameter.detach().reshape(-1))
        comm.broadcast(flat)
        buffer.tensor.copy_(flat)
        for slot in bucket.slots:
            view = buffer.tensor[slot.start : slot.stop]
            slot.parameter.data = view.view(slot.parameter.shape)
        owned_span = owned(bucket)
        local_master = flat if owned_span == slice(0, bucket.numel) else flat[owned_span].clone()
        weights.masters.append(buffer.tensor[owned_span] if wide == bucket.dtype else local_master)
    _broadcast_frozen(inputs, buckets, comm, originals)
    return weights


def _master_type(inputs: StageInputs, bucket: Bucket) -> torch.dtype:
    if bucket.dtype in {torch.float16, torch.bfloat16} and inputs.precision.compute:
        return inputs.precision.master
    return torch.promote_types(bucket.dtype, bucket.slots[0].parameter.dtype)


def _broadcast_frozen(
    inputs: StageInputs,
    buckets: Sequence[Bucket],
    comm: Communicator,
    originals: FrozenOriginals,
) -> None:
    """Broadcast rank 0's frozen parameters and buffers; cast the parameters."""
    trained = {slot.parameter for bucket in buckets for slot in bucket.slots}
    compute = inputs.precision.compute
    uncast = uncast_parameters(inputs.module)
    for name, parameter in inputs.module.named_parameters():
        if parameter in trained:
            continue
        comm.broadcast(parameter.data)
        if compute is not None and parameter.is_floating_point() and parameter not in uncast:
            if buckets and torch.promote_types(parameter.dtype, compute) != compute:
                originals.keep(name, parameter)
            parameter.data = parameter.data.to(compute)
    for value in inputs.module.buffers():
        comm.broadcast(value)
