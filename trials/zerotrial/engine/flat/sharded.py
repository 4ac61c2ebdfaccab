"""Gradients of which a rank keeps its shard: stage 2."""

from collections.abc import Sequence

import torch
from torch import Tensor

from zerotrial.engine.comm.communicator import Buffer, Communicator, Work
from zerotrial.engine.comm.ring import Ring
from zerotrial.engine.flat.gradients import Gradients, Handling, late, take_gradient
from zerotrial.engine.flat.layout import Bucket

__all__ = ["ShardedGradients"]


class ShardedGradients(Gradients):
    """Each micro-batch's gradients are reduced at once, and only the shard is kept.

    Buckets travel in two transport buffers in turn; a buffer is used again when all ranks have read
    it. If a bucket's buffer is free when a gradient arrives, the gradient is copied at once, while
    it is in the cache; if not, it stays with its parameter until the bucket is sent.

    Args:
        buckets: See :class:`Gradients`.
        comm: See :class:`Gradients`.
        handling: See :class:`Gradients`; of each bucket the shard is kept, (S,).
    """

    _BUFFERS = 2

    def __init__(self, buckets: Sequence[Bucket], comm: Communicator, handling: Handling) -> None:
        super().__init__(buckets, comm, handling)
        device, communicate = handling.device, handling.communicate
        self._types = communicate
        self._gaps = [bucket.gaps() for bucket in buckets]
        nbytes = max(
            bucket.numel * sent.itemsize for bucket, sent in zip(buckets, communicate, strict=True)
        )
        count = min(self._BUFFERS, len(buckets))
        self._ring = Ring(comm, device, count, self._works, nbytes)
        """Its turn is that of the next bucket which is sent."""
        self._filling: dict[int, Buffer] = {}
        """Buffers that take gradients now, by bucket."""
        self._filled: list[set[int]] = [set() for _ in buckets]
        self._shards = [
            torch.zeros(bucket.shard_numel, dtype=kept, device=device)
            for bucket, kept in zip(buckets, handling.accumulate, strict=True)
        ]
        self._begun = False
        """Whether the shards hold gradients of an earlier pass."""

    def begin(self, *, boundary: bool) -> None:
        """See :class:`Gradients`."""
        del boundary
        self.settle()
        self._begun = self._begun or self._next > 0
        self._start_pass(sending=True)

    def result(self, bucket: int) -> Tensor:
        """See :class:`Gradients`."""
        if bucket in self.exposed:
            return self.exposed[bucket][self._buckets[bucket].shard(self._comm.rank)]
        return self._shards[bucket]

    def norm_part(self, bucket: int) -> Tensor:
        """See :class:`Gradients`."""
        return self.result(bucket)

    def reset(self) -> None:
        """See :class:`Gradients`."""
        super().reset()
        self._begun = False
        self._start_pass(sending=False)

    def held(self) -> dict[str, list[Tensor]]:
        """See :class:`Gradients`."""
        return {
            "gradients": list(self._shards),
            "buckets": self._ring.tensors,
        }

    def _start_pass(self, *, sending: bool) -> None:
        super()._start_pass(sending=sending)
        self._filling.clear()
        for filled in self._filled:
            filled.clear()

    def _take(self, bucket: int, place: int) -> None:
        if bucket < self._next:
            raise late(self._buckets[bucket], place)
        if bucket not in self._filling and self._ring.is_free(bucket - self._next):
            self._open(bucket)
        if bucket in self._filling:
            self._fill(bucket, place)

    def _open(self, bucket: int) -> None:
        numel, sent = self._buckets[bucket].numel, self._types[bucket]
        self._filling[bucket] = self._ring.get(numel, sent, bucket - self._next)

    def _fill(self, bucket: int, place: int) -> None:
        at = self._buckets[bucket].places[place]
        gradient = take_gradient(self._buckets[bucket], place)
        view = self._filling[bucket].tensor[at.start : at.stop].view(at.parameter.shape)
        factor = self._averaging.before * self.share
        if place in self._filled[bucket]:
            view.add_(gradient, alpha=factor)
        elif factor == 1.0:
            view.copy_(gradient)
        else:
            torch.mul(gradient, factor, out=view)
        self._filled[bucket].add(place)

    def _send(self, bucket: int) -> Work:
        if bucket not in self._filling:
            self._ring.wait()
            self._open(bucket)
        for place in self._arrived[bucket] - self._filled[bucket]:
            self._fill(bucket, place)
        buffer = self._filling.pop(bucket)
        for place, at in enumerate(self._buckets[bucket].places):
            if place not in self._filled[bucket]:
                buffer.tensor[at.start : at.stop].zero_()
        for gap in self._gaps[bucket]:
            buffer.tensor[gap].zero_()  # what another bucket left there must not be summed
        work = self._comm.reduce_scatter(
            buffer, self._shards[bucket], self._averaging.after, add=self._begun
        )
        self._ring.advance_turn(work)
        return work

    def settle(self) -> None:
        """See :class:`Gradients`."""
        self.finish()
        for bucket in self.exposed:
            self._shards[bucket].copy_(self.result(bucket))
        self.exposed = {}

    def averaged(self, bucket: int) -> Tensor | None:
        """See :class:`Gradients`."""
        return self._shards[bucket] if self._begun or self._next else None

    def average_room(self, bucket: int) -> Tensor:
        """See :class:`Gradients`."""
        self._begun = True
        return self._shards[bucket].zero_()
