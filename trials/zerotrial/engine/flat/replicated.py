"""Full gradients on every rank until the boundary: stages 0 and 1."""

from collections.abc import Sequence

import torch
from torch import Tensor

from zerotrial.engine.comm.communicator import Communicator, Work
from zerotrial.engine.flat.gradients import (
    GradientPolicy,
    Gradients,
    late_gradient_error,
    take_gradient,
)
from zerotrial.engine.flat.layout import Bucket, allocate_for

__all__ = ["ReplicatedGradients"]


class ReplicatedGradients(Gradients):
    """Gradients of the full model, in memory until the boundary.

    Args:
        buckets: Buckets of the stage, in order.
        comm: Communicator of the data-parallel ranks.
        policy: Configuration.
        everywhere: All-reduce (stage 0) instead of reduce-scatter (stage 1).
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        comm: Communicator,
        policy: GradientPolicy,
        *,
        everywhere: bool,
    ) -> None:
        super().__init__(buckets, comm, policy)
        device = policy.device
        self._everywhere = everywhere
        self._transport = allocate_for(buckets, policy.communicate, comm, device)
        self._store = [
            buffer.tensor
            if dtype == buffer.tensor.dtype
            else torch.zeros(bucket.numel, dtype=dtype, device=device)
            for bucket, dtype, buffer in zip(
                buckets, policy.accumulate, self._transport, strict=True
            )
        ]
        self._views = [
            [store[slot.start : slot.stop].view(slot.parameter.shape) for slot in bucket.slots]
            for bucket, store in zip(buckets, self._store, strict=True)
        ]
        self._written: list[set[int]] = [set() for _ in buckets]
        self._earlier_averages: dict[int, Tensor] = {}
        """By bucket: averages of earlier passes, to be added to the next ones."""

        self.local_to_average = policy.averaging.after

    def begin(self, *, boundary: bool) -> None:
        """Prepare for a backward pass."""
        if self._next:  # a second backward after the boundary's: keep the averages and add
            self.send_rest()
            self._save_averages()
        self._start_pass(sending=boundary)

    def finish(self) -> None:
        """Wait until :meth:`result` is final."""
        super().finish()
        if self._everywhere:
            for store, buffer in zip(self._store, self._transport, strict=True):
                if store is not buffer.tensor:
                    store.copy_(buffer.tensor)
        if self._earlier_averages:
            self._comm.fence()  # other ranks may still copy the memory that changes here
            for index, carried in self._earlier_averages.items():
                self.result(index).add_(carried)
            self._earlier_averages = {}

    def result(self, bucket: int) -> Tensor:
        """Return the averaged gradient that this rank applies: (S,), or (N * S,) at stage 0."""
        if self._everywhere:
            return self.exposed.get(bucket, self._store[bucket])
        return self.norm_part(bucket)

    def norm_part(self, bucket: int) -> Tensor:
        """Return the (S,) elements that this rank adds to the norm."""
        full = self.exposed.get(bucket, self._store[bucket])
        return full[self._buckets[bucket].shard(self._comm.rank)]

    def reset(self) -> None:
        """Clear all gradients."""
        super().reset()
        for written in self._written:
            written.clear()
        self._earlier_averages = {}
        self._start_pass(sending=False)

    def tensors_by_kind(self) -> dict[str, list[Tensor]]:
        """Return the tensors of kinds ``gradients`` and ``buckets``."""
        pairs = zip(self._store, self._transport, strict=True)
        separate = [buffer.tensor for store, buffer in pairs if store is not buffer.tensor]
        return {"gradients": list(self._store), "buckets": separate}

    def _accumulate(self, bucket: int, slot: int) -> None:
        if bucket < self._next:
            raise late_gradient_error(self._buckets[bucket], slot)
        gradient = take_gradient(self._buckets[bucket], slot)
        view, factor = self._views[bucket][slot], self._averaging.before * self.pass_weight
        if slot in self._written[bucket]:
            view.add_(gradient, alpha=factor)
            return
        self._written[bucket].add(slot)
        if factor == 1.0:
            view.copy_(gradient)
        else:
            torch.mul(gradient, factor, out=view)

    def _send(self, bucket: int) -> Work:
        for slot, view in enumerate(self._views[bucket]):
            if slot not in self._written[bucket]:
                view.zero_()
        buffer, store = self._transport[bucket], self._store[bucket]
        if store is not buffer.tensor:
            buffer.tensor.copy_(store)
        if self._everywhere:
            return self._comm.all_reduce(buffer, self._averaging.after)
        local_shard = self.norm_part(bucket)
        return self._comm.reduce_scatter(buffer, local_shard, self._averaging.after, add=False)

    def _save_averages(self) -> None:
        self.finish()
        self._comm.fence()  # all ranks have read this rank's buckets
        self._earlier_averages = {
            index: self.result(index).clone() for index in range(len(self._buckets))
        }
        self.exposed = {}
        for written in self._written:
            written.clear()

    def settle(self) -> None:
        """Finish averaging in progress, before the methods below. **Collective**."""
        if self._next:
            self.send_rest()
            self._save_averages()
            self._start_pass(sending=False)

    def averaged(self, bucket: int) -> Tensor | None:
        """Return the averages so far, laid out like :meth:`result`; None if there are none."""
        return self._earlier_averages.get(bucket)

    def average_buffer(self, bucket: int) -> Tensor:
        """Return zeros to fill with the bucket's average; call it for all buckets."""
        self._earlier_averages[bucket] = torch.zeros_like(self.result(bucket))
        return self._earlier_averages[bucket]

    def unreduced(self, bucket: int) -> dict[int, Tensor]:
        """Return gradients that are not averaged, by slot: (numel,), with the factor before."""
        return {slot: self.unreduced_buffer(bucket, slot) for slot in sorted(self._written[bucket])}

    def unreduced_buffer(self, bucket: int, slot: int) -> Tensor:
        """Return the memory of one share: (numel,), uninitialized."""
        return self._views[bucket][slot].view(-1)

    def mark_unreduced(self, bucket: int, slot: int) -> None:
        """Mark the content of :meth:`unreduced_buffer` as valid."""
        self._written[bucket].add(slot)
