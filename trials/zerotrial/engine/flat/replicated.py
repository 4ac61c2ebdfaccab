"""Gradients of the whole model, kept until the boundary: stages 0 and 1."""

from collections.abc import Sequence

import torch
from torch import Tensor

from zerotrial.engine.comm.communicator import Communicator, Work
from zerotrial.engine.flat.gradients import Gradients, Handling, late, take_gradient
from zerotrial.engine.flat.layout import Bucket, allocate_for

__all__ = ["WholeGradients"]


class WholeGradients(Gradients):
    """Gradients of the whole model wait in memory until the boundary.

    Args:
        buckets: See :class:`Gradients`.
        comm: See :class:`Gradients`.
        handling: See :class:`Gradients`.
        everywhere: All-reduce (stage 0) in place of reduce-scatter (stage 1).
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        comm: Communicator,
        handling: Handling,
        *,
        everywhere: bool,
    ) -> None:
        super().__init__(buckets, comm, handling)
        device = handling.device
        self._everywhere = everywhere
        self._transport = allocate_for(buckets, handling.communicate, comm, device)
        self._store = [
            buffer.tensor
            if kept == buffer.tensor.dtype
            else torch.zeros(bucket.numel, dtype=kept, device=device)
            for bucket, kept, buffer in zip(
                buckets, handling.accumulate, self._transport, strict=True
            )
        ]
        self._views = [
            [store[place.start : place.stop].view(place.parameter.shape) for place in bucket.places]
            for bucket, store in zip(buckets, self._store, strict=True)
        ]
        self._written: list[set[int]] = [set() for _ in buckets]
        self._carried: dict[int, Tensor] = {}
        """By bucket: averages of earlier passes, to which the next ones are added."""

        self.share_factor = handling.averaging.after

    def begin(self, *, boundary: bool) -> None:
        """See :class:`Gradients`."""
        if self._next:  # a second backward after the boundary's: keep what was reduced, and add
            self.send_rest()
            self._carry()
        self._start_pass(sending=boundary)

    def finish(self) -> None:
        """See :class:`Gradients`."""
        super().finish()
        if self._everywhere:
            for store, buffer in zip(self._store, self._transport, strict=True):
                if store is not buffer.tensor:
                    store.copy_(buffer.tensor)
        if self._carried:
            self._comm.fence()  # others may still copy what is changed here
            for index, carried in self._carried.items():
                self.result(index).add_(carried)
            self._carried = {}

    def result(self, bucket: int) -> Tensor:
        """See :class:`Gradients`."""
        if self._everywhere:
            return self.exposed.get(bucket, self._store[bucket])
        return self.norm_part(bucket)

    def norm_part(self, bucket: int) -> Tensor:
        """See :class:`Gradients`."""
        full = self.exposed.get(bucket, self._store[bucket])
        return full[self._buckets[bucket].shard(self._comm.rank)]

    def reset(self) -> None:
        """See :class:`Gradients`."""
        super().reset()
        for written in self._written:
            written.clear()
        self._carried = {}
        self._start_pass(sending=False)

    def held(self) -> dict[str, list[Tensor]]:
        """See :class:`Gradients`."""
        pairs = zip(self._store, self._transport, strict=True)
        apart = [buffer.tensor for store, buffer in pairs if store is not buffer.tensor]
        return {"gradients": list(self._store), "buckets": apart}

    def _take(self, bucket: int, place: int) -> None:
        if bucket < self._next:
            raise late(self._buckets[bucket], place)
        gradient = take_gradient(self._buckets[bucket], place)
        view, factor = self._views[bucket][place], self._averaging.before * self.share
        if place in self._written[bucket]:
            view.add_(gradient, alpha=factor)
            return
        self._written[bucket].add(place)
        if factor == 1.0:
            view.copy_(gradient)
        else:
            torch.mul(gradient, factor, out=view)

    def _send(self, bucket: int) -> Work:
        for place, view in enumerate(self._views[bucket]):
            if place not in self._written[bucket]:
                view.zero_()
        buffer, store = self._transport[bucket], self._store[bucket]
        if store is not buffer.tensor:
            buffer.tensor.copy_(store)
        if self._everywhere:
            return self._comm.all_reduce(buffer, self._averaging.after)
        own = self.norm_part(bucket)
        return self._comm.reduce_scatter(buffer, own, self._averaging.after, add=False)

    def _carry(self) -> None:
        self.finish()
        self._comm.fence()  # all ranks have read this rank's buckets
        self._carried = {index: self.result(index).clone() for index in range(len(self._buckets))}
        self.exposed = {}
        for written in self._written:
            written.clear()

    def settle(self) -> None:
        """See :class:`Gradients`."""
        if self._next:
            self.send_rest()
            self._carry()
            self._start_pass(sending=False)

    def averaged(self, bucket: int) -> Tensor | None:
        """See :class:`Gradients`."""
        return self._carried.get(bucket)

    def average_room(self, bucket: int) -> Tensor:
        """See :class:`Gradients`."""
        self._carried[bucket] = torch.zeros_like(self.result(bucket))
        return self._carried[bucket]

    def shares(self, bucket: int) -> dict[int, Tensor]:
        """See :class:`Gradients`."""
        return {place: self.share_room(bucket, place) for place in sorted(self._written[bucket])}

    def share_room(self, bucket: int, place: int) -> Tensor:
        """See :class:`Gradients`."""
        return self._views[bucket][place].view(-1)

    def keep_share(self, bucket: int, place: int) -> None:
        """See :class:`Gradients`."""
        self._written[bucket].add(place)
