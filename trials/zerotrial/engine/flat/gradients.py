"""Gathering gradients in buckets while backward runs, and averaging them over ranks.

Backward hands each parameter's gradient to :meth:`Gradients.arrived`. Collectives go out in the
fixed order of the buckets, whatever the order in which a rank completes them: a bucket that is full
early waits for the ones before it, and at the end of backward those that are not full are sent with
zeros in place of what is missing. Between two arrivals, collectives under way are advanced without
waiting. Where gradients wait until then is what
:class:`~zerotrial.engine.flat.replicated.WholeGradients` and
:class:`~zerotrial.engine.flat.sharded.ShardedGradients` say.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zerolab.errors import EngineError
from zerotrial.engine.comm.communicator import Communicator, Work
from zerotrial.engine.flat.layout import Bucket
from zerotrial.engine.module.gradient_access import get_raw_gradient, set_raw_gradient

__all__ = ["Averaging", "Gradients", "Handling", "late", "refuse_unused", "take_gradient"]

_NAMED = 10


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

    def within(self, replicas: int) -> "Averaging":
        """As much for each of so many replicas, whose mean is taken afterwards."""
        return Averaging(self.before, self.after * replicas)


@dataclass(frozen=True)
class Handling:
    """What the file says about gradients."""

    averaging: Averaging
    device: torch.device
    """Of the gradients."""

    accumulate: Sequence[torch.dtype]
    """For each bucket, the type in which gradients add up."""

    communicate: Sequence[torch.dtype]
    """For each bucket, the type in which it travels."""

    overlap: bool
    """Start collectives while backward runs."""

    refuse_unused: bool
    """Raise when a parameter gets no gradient."""


class Gradients:
    """What the two kinds have in common: arrivals, order, and works under way.

    Args:
        buckets: Of the stage, in order.
        comm: Between the data-parallel ranks.
        handling: What the file says.
    """

    def __init__(self, buckets: Sequence[Bucket], comm: Communicator, handling: Handling) -> None:
        self._buckets = buckets
        self._comm = comm
        self._averaging = handling.averaging
        self.share = 1.0
        """What the gradients of the pass under way are multiplied by, besides."""
        self._overlap = handling.overlap
        self._refuse_unused = handling.refuse_unused
        self._arrived: list[set[int]] = [set() for _ in buckets]
        self._touched: list[set[int] | None] = [set() for _ in buckets]
        """Parameters that have had a gradient since the last step; None: all of them."""
        self._dropped: list[set[int]] = [set() for _ in buckets]
        """Parameters whose gradient user code has removed."""
        self.exposed: dict[int, Tensor] = {}
        """By bucket, (N * S,): averages that user code may read and write. They count then."""
        self._next = 0
        self._works: deque[Work] = deque()
        self._sending = False

    def begin(self, *, boundary: bool) -> None:
        """Get ready for a backward pass."""
        raise NotImplementedError

    def arrived(self, bucket: int, place: int) -> None:
        """Take a parameter's gradient; called as soon as backward has produced it."""
        self._take(bucket, place)
        self._arrived[bucket].add(place)
        if self._sending and self._overlap:
            while self._next < len(self._buckets) and self._full(self._next):
                self._send_next()
            self._advance()

    def end(self, *, boundary: bool) -> None:
        """End a backward pass: send what has not been sent."""
        if self._refuse_unused and boundary:
            self._check_unused()
        for index, arrived in enumerate(self._arrived):
            touched = self._touched[index]
            if touched is not None:
                full = len(arrived) == len(self._buckets[index].places)
                self._touched[index] = None if full else touched | arrived
            self._dropped[index] -= arrived
        if self._sending:
            self.send_rest()

    def idle(self, bucket: int) -> list[int]:
        """Return the parameters that the next step leaves alone.

        They are frozen and have had no gradient since the last step, or user code has removed it.
        """
        if self._touched[bucket] is None:
            return sorted(self._dropped[bucket])
        places = range(len(self._buckets[bucket].places))
        return [place for place in places if self._is_idle(bucket, place)]

    def _is_idle(self, bucket: int, place: int) -> bool:
        if place in self._dropped[bucket]:
            return True
        touched = self._touched[bucket]
        if touched is None or place in touched:
            return False
        return not self._buckets[bucket].places[place].parameter.requires_grad

    def read(self, bucket: int, place: int) -> Tensor | None:
        """Return a parameter's average, in its shape, out of :attr:`exposed`."""
        if self._is_idle(bucket, place):
            return None
        at = self._buckets[bucket].places[place]
        return self.exposed[bucket][at.start : at.stop].view(at.parameter.shape)

    def write(self, bucket: int, place: int, value: Tensor | None) -> None:
        """Replace a parameter's average in :attr:`exposed`; None removes it."""
        at = self._buckets[bucket].places[place]
        view = self.exposed[bucket][at.start : at.stop].view(at.parameter.shape)
        if value is None:
            view.zero_()
            self._dropped[bucket].add(place)
            return
        view.copy_(value.to_dense() if value.layout != torch.strided else value)
        self._dropped[bucket].discard(place)
        touched = self._touched[bucket]
        if touched is not None:
            touched.add(place)

    @property
    def all_sent(self) -> bool:
        """Whether the averaging of all buckets has begun."""
        return self._next == len(self._buckets)

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
        self._touched = [set() for _ in self._buckets]
        self._dropped = [set() for _ in self._buckets]
        self.exposed = {}

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

    def _take(self, bucket: int, place: int) -> None:
        raise NotImplementedError

    def _send(self, bucket: int) -> Work:
        raise NotImplementedError

    def _send_next(self) -> None:
        work = self._send(self._next)
        self._next += 1
        self._works.append(work)

    def _full(self, bucket: int) -> bool:
        return len(self._arrived[bucket]) == len(self._buckets[bucket].places)

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
        """By place, (numel,): gradients that are not averaged, multiplied by the factor before."""
        del bucket
        return {}

    def share_room(self, bucket: int, place: int) -> Tensor:
        """Where :meth:`shares` has a parameter's; (numel,), of any value until kept."""
        raise NotImplementedError

    def keep_share(self, bucket: int, place: int) -> None:
        """Count what was put into :meth:`share_room`."""
        raise NotImplementedError

    def _check_unused(self) -> None:
        unused = [
            place.name
            for bucket, arrived in zip(self._buckets, self._arrived, strict=True)
            for index, place in enumerate(bucket.places)
            if index not in arrived and place.parameter.requires_grad
        ]
        refuse_unused(unused)


def refuse_unused(names: Sequence[str]) -> None:
    """Refuse a backward that has reached too little, where the file asks for that.

    Args:
        names: Of the trainable parameters without a gradient.

    Raises:
        EngineError: If there are any.
    """
    if names:
        more = ", ..." if len(names) > _NAMED else ""
        msg = (
            f"parameters without a gradient: {', '.join(names[:_NAMED])}{more}; set "
            "zero_optimization.ignore_unused_parameters to true, or requires_grad_(False) on "
            "what the loss does not use"
        )
        raise EngineError(msg)


def late(bucket: Bucket, place: int) -> EngineError:
    """Say why a gradient that comes after its bucket was sent cannot be taken."""
    return EngineError(
        f"{bucket.places[place].name}: got a second gradient in one backward pass after the first "
        "was sent (reentrant checkpointing does that to shared parameters); use "
        "checkpoint(..., use_reentrant=False), or set zero_optimization.overlap_comm to false"
    )


def take_gradient(bucket: Bucket, place: int) -> Tensor:
    """Take a parameter's gradient away from it."""
    parameter = bucket.places[place].parameter
    gradient: Tensor = get_raw_gradient(parameter)
    set_raw_gradient(parameter, None)
    return gradient.to_dense() if gradient.layout != torch.strided else gradient
