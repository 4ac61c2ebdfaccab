"""Gradients sharded over ranks: stage 2."""

from collections.abc import Sequence

import torch
from torch import Tensor

from zerotrial.engine.comm.communicator import Buffer, Communicator, Ring, Work
from zerotrial.engine.flat.gradients import (
    GradientPolicy,
    Gradients,
    late_gradient_error,
    take_gradient,
)
from zerotrial.engine.flat.layout import Bucket

__all__ = ["ShardedGradients"]


class ShardedGradients(Gradients):
    """Gradients that are reduced in every micro-batch; a rank keeps its shard.

    Buckets are sent from two transport buffers in turn; a buffer is reused when all ranks have
    read it. If a bucket's buffer is free when a gradient arrives, the gradient is copied at
    once, while it is in the cache. Otherwise it stays with its parameter until the bucket is
    sent.

    Args:
        buckets: Buckets of the stage, in order.
        comm: Communicator of the data-parallel ranks.
        policy: Configuration; the kept shards are (S,).
    """

    _BUFFERS = 2

    def __init__(
        self, buckets: Sequence[Bucket], comm: Communicator, policy: GradientPolicy
    ) -> None:
        super().__init__(buckets, comm, policy)
        device, communicate = policy.device, policy.communicate
        self._types = communicate
        self._gaps = [bucket.gaps() for bucket in buckets]
        nbytes = max(
            bucket.numel * dtype.itemsize
            for bucket, dtype in zip(buckets, communicate, strict=True)
        )
        count = min(self._BUFFERS, len(buckets))
        self._ring = Ring(comm, device, count, self._works, nbytes)
        """Ring of transport buffers; its turn is that of the next bucket to send."""
        self._filling: dict[int, Buffer] = {}
        """Buffers that accept gradients now, by bucket."""
        self._filled: list[set[int]] = [set() for _ in buckets]
        self._shards = [
            torch.zeros(bucket.shard_numel, dtype=kind, device=device)
            for bucket, kind in zip(buckets, policy.accumulate, strict=True)
        ]
        self._has_earlier = False
        """Whether the shards contain gradients of an earlier pass."""

    def begin(self, *, boundary: bool) -> None:
        """Prepare for a backward pass."""
        del boundary
        self.settle()
        self._has_earlier = self._has_earlier or self._next > 0
        self._start_pass(sending=True)

    def result(self, bucket: int) -> Tensor:
        """Return the averaged gradient that this rank applies: (S,), or (N * S,) at stage 0."""
        if bucket in self.exposed:
            return self.exposed[bucket][self._buckets[bucket].shard(self._comm.rank)]
        return self._shards[bucket]

    def norm_part(self, bucket: int) -> Tensor:
        """Return the (S,) elements that this rank adds to the norm."""
        return self.result(bucket)

    def reset(self) -> None:
        """Clear all gradients."""
        super().reset()
        self._has_earlier = False
        self._start_pass(sending=False)

    def tensors_by_kind(self) -> dict[str, list[Tensor]]:
        """Return the tensors of kinds ``gradients`` and ``buckets``."""
        return {
            "gradients": list(self._shards),
            "buckets": self._ring.tensors,
        }

    def _start_pass(self, *, sending: bool) -> None:
        super()._start_pass(sending=sending)
        self._filling.clear()
        for filled in self._filled:
            filled.clear()

    def _accumulate(self, bucket: int, slot: int) -> None:
        if bucket < self._next:
            raise late_gradient_error(self._buckets[bucket], slot)
        if bucket not in self._filling and self._ring.is_free(bucket - self._next):
            self._open(bucket)
        if bucket in self._filling:
            self._fill(bucket, slot)

    def _open(self, bucket: int) -> None:
        numel, dtype = self._buckets[bucket].numel, self._types[bucket]
        self._filling[bucket] = self._ring.get(numel, dtype, bucket - self._next)

    def _fill(self, bucket: int, slot: int) -> None:
        entry = self._buckets[bucket].slots[slot]
        gradient = take_gradient(self._buckets[bucket], slot)
        view = self._filling[bucket].tensor[entry.start : entry.stop].view(entry.parameter.shape)
        factor = self._averaging.before * self.pass_weight
        if slot in self._filled[bucket]:
            view.add_(gradient, alpha=factor)
        elif factor == 1.0:
            view.copy_(gradient)
        else:
            torch.mul(gradient, factor, out=view)
        self._filled[bucket].add(slot)

    def _send(self, bucket: int) -> Work:
        if bucket not in self._filling:
            self._ring.wait()
            self._open(bucket)
        for slot in self._arrived[bucket] - self._filled[bucket]:
            self._fill(bucket, slot)
        buffer = self._filling.pop(bucket)
        # Zeros for missing gradients: another rank may have them, and all send the same elements.
        for slot, entry in enumerate(self._buckets[bucket].slots):
            if slot not in self._filled[bucket]:
                buffer.tensor[entry.start : entry.stop].zero_()
        for gap in self._gaps[bucket]:
            buffer.tensor[gap].zero_()  # stale values of another bucket would be summed
        work = self._comm.reduce_scatter(
            buffer, self._shards[bucket], self._averaging.after, add=self._has_earlier
        )
        self._ring.advance_turn(work)
        return work

    def settle(self) -> None:
        """Finish averaging in progress, before the methods below. **Collective**."""
        self.finish()
        for bucket in self.exposed:
            self._shards[bucket].copy_(self.result(bucket))
        self.exposed = {}

    def averaged(self, bucket: int) -> Tensor | None:
        """Return the averages so far, laid out like :meth:`result`; None if there are none."""
        return self._shards[bucket] if self._has_earlier or self._next else None

    def average_buffer(self, bucket: int) -> Tensor:
        """Return zeros to fill with the bucket's average; call it for all buckets."""
        self._has_earlier = True
        return self._shards[bucket].zero_()
