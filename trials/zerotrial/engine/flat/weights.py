"""Weights of stages 0, 1 and 2: flattening into buffers, and detection of user writes.

Without the detection a value written to a 16-bit weight would last only until the next update,
which starts from the master: a loaded state dict, clipped weights, a copied average.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zerotrial.engine.comm.communicator import Buffer, Communicator
from zerotrial.engine.flat.layout import Bucket, allocate_for
from zerotrial.engine.module.frozen_parameters import FrozenOriginals
from zerotrial.engine.module.precision import uncast_parameters
from zerotrial.engine.protocols import StageInputs, Updater

__all__ = ["FlatWeights", "WeightWrites", "flatten_parameters"]


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
    offload = inputs.config.zero_optimization.offload_optimizer
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
        if offload.device != "none":
            local_master = local_master.to("cpu")
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
        parameter.data = parameter.data.to(inputs.device)
        comm.broadcast(parameter.data)
        if compute is not None and parameter.is_floating_point() and parameter not in uncast:
            if buckets and torch.promote_types(parameter.dtype, compute) != compute:
                originals.keep(name, parameter)
            parameter.data = parameter.data.to(compute)
    for value in inputs.module.buffers():
        value.data = value.data.to(inputs.device)
        comm.broadcast(value)


class WeightWrites:
    """Detector of writes to parameters, by autograd's version counters.

    ``parameter.data`` has a separate counter, so writes through it are not detected.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        weights: Sequence[Tensor],
        owned: Sequence[slice],
        updater: Updater,
    ) -> None:
        self._buckets = list(zip(buckets, weights, owned, strict=True))
        self._updater = updater
        self._counts = self._versions()

    def _versions(self) -> list[list[int]]:
        # The stage writes to buffers, not to parameters, which leaves the counters alone.
        return [
            [slot.parameter._version for slot in bucket.slots]  # noqa: SLF001 - no public name
            for bucket, _, _ in self._buckets
        ]

    def forget(self) -> None:
        """Regard the weights as unwritten: the masters have just been loaded."""
        self._counts = self._versions()

    def update_masters(self) -> None:
        """Copy values written since the last call into the masters.

        Only elements that differ from their rounded master: the others keep full precision.
        """
        before, self._counts = self._counts, self._versions()
        for (bucket, weights, owned), old, new in zip(
            self._buckets, before, self._counts, strict=True
        ):
            if old == new:
                continue
            with self._updater.states(bucket.index, write=True) as states:
                for slot, previous, count in zip(bucket.slots, old, new, strict=True):
                    start, stop = max(slot.start, owned.start), min(slot.stop, owned.stop)
                    if previous != count and start < stop:
                        part = slice(start - owned.start, stop - owned.start)
                        _update_master(weights[start:stop], states["master"][part])


def _update_master(weights: Tensor, master: Tensor) -> None:
    values = weights.to(master.device)
    unchanged = values == master.to(values.dtype)
    master.copy_(torch.where(unchanged, master, values.to(master.dtype)))
