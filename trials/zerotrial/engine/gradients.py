"""Gathering gradients in buckets while backward runs, and averaging them over ranks.

Backward hands each parameter's gradient to :meth:`Gradients.arrived`. Collectives go out in the
fixed order of the buckets, whatever the order in which a rank completes them: a bucket that is full
early waits for the ones before it, and at the end of backward those that are not full are sent with
zeros in place of what is missing. Between two arrivals, collectives under way are advanced without
waiting.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zerolab.errors import ZerolabError
from zerotrial.engine.comm import Buffer, Communicator, Work
from zerotrial.engine.flat import Bucket, allocate_for

__all__ = ["Averaging", "Gradients", "ShardedGradients", "WholeGradients"]


@dataclass(frozen=True)
class Averaging:
    """What gradients are multiplied by on either side of the sum over ranks."""

    before: float
    after: float

    @classmethod
    def of(cls, ranks: int, *, operation: str, prescale: bool, predivide: float) -> "Averaging":
        """Read DeepSpeed's three keys.

        Args:
            ranks: N.
            operation: ``gradient_allreduce_op``: mean or sum.
            prescale: ``prescale_gradients``.
            predivide: ``gradient_predivide_factor``.
        """
        if operation == "sum":
            return cls(1.0, 1.0)
        if prescale:
            return cls(1.0 / ranks, 1.0)
        return cls(1.0 / predivide, predivide / ranks)


class Gradients:
    """What the two kinds have in common: arrivals, order, and works under way.

    Args:
        buckets: Of the stage, in order.
        comm: Between the data-parallel ranks.
        averaging: Factors before and after the sum.
        overlap: Start collectives while backward runs.
        refuse_unused: Raise when a parameter gets no gradient.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        comm: Communicator,
        averaging: Averaging,
        *,
        overlap: bool,
        refuse_unused: bool,
    ) -> None:
        self._buckets = buckets
        self._comm = comm
        self._averaging = averaging
        self._overlap = overlap
        self._refuse_unused = refuse_unused
        self._arrived: list[set[int]] = [set() for _ in buckets]
        self._next = 0
        self._works: deque[Work] = deque()
        self._sending = False

    def begin(self, *, boundary: bool) -> None:
        """Get ready for a backward pass."""
        raise NotImplementedError

    def arrived(self, bucket: int, slot: int) -> None:
        """Take a parameter's gradient; called as soon as backward has produced it."""
        self._take(bucket, slot)
        self._arrived[bucket].add(slot)
        if self._sending and self._overlap:
            while self._next < len(self._buckets) and self._full(self._next):
                self._send_next()
            self._advance()

    def end(self, *, boundary: bool) -> None:
        """End a backward pass: send what has not been sent."""
        if self._refuse_unused and boundary:
            self._check_unused()
        if self._sending:
            self.send_rest()

    def send_rest(self) -> None:
        """Send all buckets that have not been sent, full or not."""
        while self._next < len(self._buckets):
            self._send_next()

    def finish(self) -> None:
        """Wait until :meth:`result` is final."""
        while self._works:
            self._works.popleft().wait()

    def result(self, bucket: int) -> Tensor:
        """The averaged gradient of what this rank updates: (S,), or (N * S,) at stage 0."""
        raise NotImplementedError

    def norm_part(self, bucket: int) -> Tensor:
        """The (S,) elements whose squares this rank adds up."""
        raise NotImplementedError

    def reset(self) -> None:
        """Forget all gradients."""
        raise NotImplementedError

    def abandon(self) -> None:
        """Forget all gradients at any moment. **Collective** if some were sent.

        Ranks may have come to different buckets when a backward raised: each sends the rest, so
        that none waits for another, and nobody writes to what another still reads.
        """
        if self._sending:
            self.send_rest()
            self.finish()
            self._comm.fence()
        self.reset()

    def held(self) -> dict[str, list[Tensor]]:
        """Tensors of kind ``gradients`` and ``buckets``."""
        raise NotImplementedError

    def _take(self, bucket: int, slot: int) -> None:
        raise NotImplementedError

    def _send(self, bucket: int) -> Work:
        raise NotImplementedError

    def _send_next(self) -> None:
        work = self._send(self._next)
        self._next += 1
        self._works.append(work)

    def _full(self, bucket: int) -> bool:
        return len(self._arrived[bucket]) == len(self._buckets[bucket].slots)

    def _advance(self) -> None:
        while self._works and self._works[0].advance():
            self._works.popleft()

    def _start_pass(self, *, sending: bool) -> None:
        for arrived in self._arrived:
            arrived.clear()
        self._next = 0
        self._sending = sending

    # Between two boundaries, for checkpoints: what earlier passes have left averaged, and what is
    # this rank's own still.

    share_factor: float | None = None
    """Turns the sum of the ranks' :meth:`shares` into the average; None: all is averaged."""

    def settle(self) -> None:
        """Finish the averaging under way, before one of the following. **Collective**."""
        raise NotImplementedError

    def averaged(self, bucket: int) -> Tensor | None:
        """What is averaged, laid out like :meth:`result`; None when nothing is."""
        raise NotImplementedError

    def average_room(self, bucket: int) -> Tensor:
        """Zeros to be filled: from now on the bucket's average so far. To be called for all."""
        raise NotImplementedError

    def shares(self, bucket: int) -> dict[int, Tensor]:
        """By slot, (numel,): gradients that are not averaged, multiplied by the factor before."""
        del bucket
        return {}

    def share_room(self, bucket: int, slot: int) -> Tensor:
        """Where :meth:`shares` has a parameter's; (numel,), of any value until kept."""
        raise NotImplementedError

    def keep_share(self, bucket: int, slot: int) -> None:
        """Count what was put into :meth:`share_room`."""
        raise NotImplementedError

    def _check_unused(self) -> None:
        unused = [
            slot.name
            for bucket, arrived in zip(self._buckets, self._arrived, strict=True)
            for index, slot in enumerate(bucket.slots)
            if index not in arrived and slot.parameter.requires_grad
        ]
        if unused:
            msg = (
                f"parameters without a gradient: {', '.join(unused[:10])}"
                f"{', ...' if len(unused) > 10 else ''}; set "
                "zero_optimization.ignore_unused_parameters to true, or requires_grad_(False) on "
                "what the loss does not use"
            )
            raise ZerolabError(msg)


def _late(bucket: Bucket, slot: int) -> ZerolabError:
    return ZerolabError(
        f"{bucket.slots[slot].name}: got a second gradient in one backward pass after the first "
        "was sent (reentrant checkpointing does that to shared parameters); use "
        "checkpoint(..., use_reentrant=False), or set zero_optimization.overlap_comm to false"
    )


def _gradient_of(bucket: Bucket, slot: int) -> Tensor:
    """Take a parameter's gradient away from it."""
    parameter = bucket.slots[slot].parameter
    gradient = parameter.grad
    assert gradient is not None
    parameter.grad = None
    return gradient.to_dense() if gradient.layout != torch.strided else gradient


class WholeGradients(Gradients):
    """Stages 0 and 1: gradients of the whole model wait in memory until the boundary.

    Args:
        buckets: See :class:`Gradients`.
        comm: See :class:`Gradients`.
        averaging: See :class:`Gradients`.
        device: Of the gradients.
        accumulate: Type of the gradients in each bucket.
        communicate: Type in which each bucket travels.
        everywhere: All-reduce (stage 0) in place of reduce-scatter (stage 1).
        overlap: See :class:`Gradients`.
        refuse_unused: See :class:`Gradients`.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        comm: Communicator,
        averaging: Averaging,
        *,
        device: torch.device,
        accumulate: Sequence[torch.dtype],
        communicate: Sequence[torch.dtype],
        everywhere: bool,
        overlap: bool,
        refuse_unused: bool,
    ) -> None:
        super().__init__(buckets, comm, averaging, overlap=overlap, refuse_unused=refuse_unused)
        self._everywhere = everywhere
        self._transport = allocate_for(buckets, communicate, comm, device)
        self._store = [
            buffer.tensor
            if kept == buffer.tensor.dtype
            else torch.zeros(bucket.numel, dtype=kept, device=device)
            for bucket, kept, buffer in zip(buckets, accumulate, self._transport, strict=True)
        ]
        self._views = [
            [store[slot.start : slot.stop].view(slot.parameter.shape) for slot in bucket.slots]
            for bucket, store in zip(buckets, self._store, strict=True)
        ]
        self._written: list[set[int]] = [set() for _ in buckets]
        self._carried: dict[int, Tensor] = {}
        """By bucket: averages of earlier passes, to which the next ones are added."""

        self.share_factor = averaging.after

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
        return self._store[bucket] if self._everywhere else self.norm_part(bucket)

    def norm_part(self, bucket: int) -> Tensor:
        """See :class:`Gradients`."""
        return self._store[bucket][self._buckets[bucket].shard(self._comm.rank)]

    def reset(self) -> None:
        """See :class:`Gradients`."""
        for written in self._written:
            written.clear()
        self._carried = {}
        self._start_pass(sending=False)

    def held(self) -> dict[str, list[Tensor]]:
        """See :class:`Gradients`."""
        pairs = zip(self._store, self._transport, strict=True)
        apart = [buffer.tensor for store, buffer in pairs if store is not buffer.tensor]
        return {"gradients": list(self._store), "buckets": apart}

    def _take(self, bucket: int, slot: int) -> None:
        if bucket < self._next:
            raise _late(self._buckets[bucket], slot)
        gradient = _gradient_of(self._buckets[bucket], slot)
        view, factor = self._views[bucket][slot], self._averaging.before
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
        own = self.norm_part(bucket)
        return self._comm.reduce_scatter(buffer, own, self._averaging.after, add=False)

    def _carry(self) -> None:
        self.finish()
        self._comm.fence()  # all ranks have read this rank's buckets
        self._carried = {index: self.result(index).clone() for index in range(len(self._buckets))}
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
        return {slot: self.share_room(bucket, slot) for slot in sorted(self._written[bucket])}

    def share_room(self, bucket: int, slot: int) -> Tensor:
        """See :class:`Gradients`."""
        return self._views[bucket][slot].view(-1)

    def keep_share(self, bucket: int, slot: int) -> None:
        """See :class:`Gradients`."""
        self._written[bucket].add(slot)


class ShardedGradients(Gradients):
    """Stage 2: each micro-batch's gradients are reduced at once, and only the shard is kept.

    Buckets travel in two transport buffers in turn; a buffer is used again when all ranks have read
    it. If a bucket's buffer is free when a gradient arrives, the gradient is copied at once, while
    it is in the cache; if not, it stays with its parameter until the bucket is sent.
    """

    _BUFFERS = 2

    def __init__(
        self,
        buckets: Sequence[Bucket],
        comm: Communicator,
        averaging: Averaging,
        *,
        device: torch.device,
        accumulate: Sequence[torch.dtype],
        communicate: Sequence[torch.dtype],
        overlap: bool,
        refuse_unused: bool,
    ) -> None:
        super().__init__(buckets, comm, averaging, overlap=overlap, refuse_unused=refuse_unused)
        self._types = communicate
        self._gaps = [bucket.gaps() for bucket in buckets]
        nbytes = max(
            bucket.numel * sent.itemsize for bucket, sent in zip(buckets, communicate, strict=True)
        )
        count = min(self._BUFFERS, len(buckets))
        self._transport = [comm.allocate(nbytes, torch.uint8, device) for _ in range(count)]
        self._users: list[Work | None] = [None] * count
        self._turn = 0
        """The buffer of the next bucket that is sent."""
        self._filling: dict[int, Buffer] = {}
        """Buffers that take gradients now, by bucket."""
        self._filled: list[set[int]] = [set() for _ in buckets]
        self._shards = [
            torch.zeros(bucket.shard_numel, dtype=kept, device=device)
            for bucket, kept in zip(buckets, accumulate, strict=True)
        ]
        self._begun = False
        """Whether the shards hold gradients of an earlier pass."""

    def begin(self, *, boundary: bool) -> None:
        """See :class:`Gradients`."""
        del boundary
        self.finish()
        self._begun = self._begun or self._next > 0
        self._start_pass(sending=True)

    def result(self, bucket: int) -> Tensor:
        """See :class:`Gradients`."""
        return self._shards[bucket]

    def norm_part(self, bucket: int) -> Tensor:
        """See :class:`Gradients`."""
        return self._shards[bucket]

    def reset(self) -> None:
        """See :class:`Gradients`."""
        self._begun = False
        self._start_pass(sending=False)

    def held(self) -> dict[str, list[Tensor]]:
        """See :class:`Gradients`."""
        return {
            "gradients": list(self._shards),
            "buckets": [buffer.tensor for buffer in self._transport],
        }

    def _start_pass(self, *, sending: bool) -> None:
        super()._start_pass(sending=sending)
        self._filling.clear()
        for filled in self._filled:
            filled.clear()

    def _take(self, bucket: int, slot: int) -> None:
        if bucket < self._next:
            raise _late(self._buckets[bucket], slot)
        if bucket not in self._filling and self._is_free(bucket):
            self._open(bucket)
        if bucket in self._filling:
            self._fill(bucket, slot)

    def _is_free(self, bucket: int) -> bool:
        """Whether the buffer that a bucket will use can be written to now."""
        ahead = bucket - self._next
        if ahead >= len(self._transport):
            return False
        user = self._users[(self._turn + ahead) % len(self._transport)]
        return user is None or user.is_free()

    def _open(self, bucket: int) -> None:
        turn = (self._turn + bucket - self._next) % len(self._transport)
        layout, sent = self._buckets[bucket], self._types[bucket]
        buffer = self._transport[turn].part(0, layout.numel * sent.itemsize).cast(sent)
        self._filling[bucket] = buffer

    def _fill(self, bucket: int, slot: int) -> None:
        place = self._buckets[bucket].slots[slot]
        gradient = _gradient_of(self._buckets[bucket], slot)
        view = self._filling[bucket].tensor[place.start : place.stop].view(place.parameter.shape)
        factor = self._averaging.before
        if slot in self._filled[bucket]:
            view.add_(gradient, alpha=factor)
        elif factor == 1.0:
            view.copy_(gradient)
        else:
            torch.mul(gradient, factor, out=view)
        self._filled[bucket].add(slot)

    def _send(self, bucket: int) -> Work:
        turn = self._turn
        if bucket not in self._filling:
            user = self._users[turn]
            if user is not None:
                while self._works and not user.advance():
                    self._works.popleft().wait()
                user.release()
            self._open(bucket)
        for slot in self._arrived[bucket] - self._filled[bucket]:
            self._fill(bucket, slot)
        buffer = self._filling.pop(bucket)
        for slot, place in enumerate(self._buckets[bucket].slots):
            if slot not in self._filled[bucket]:
                buffer.tensor[place.start : place.stop].zero_()
        for gap in self._gaps[bucket]:
            buffer.tensor[gap].zero_()  # what another bucket left there must not be summed
        work = self._comm.reduce_scatter(
            buffer, self._shards[bucket], self._averaging.after, add=self._begun
        )
        self._users[turn] = work
        self._turn = (turn + 1) % len(self._transport)
        return work

    def settle(self) -> None:
        """See :class:`Gradients`."""
        self.finish()

    def averaged(self, bucket: int) -> Tensor | None:
        """See :class:`Gradients`."""
        return self._shards[bucket] if self._begun or self._next else None

    def average_room(self, bucket: int) -> Tensor:
        """See :class:`Gradients`."""
        self._begun = True
        return self._shards[bucket].zero_()
