"""Collection of gradients in buckets during backward, and their averaging over ranks.

Hooks pass each parameter's gradient to :meth:`Gradients.arrived`. Every rank sends the buckets in
the same fixed order, whatever the order in which backward completes them. A bucket that is full
early waits for the ones before it. At the end of backward the remaining buckets are sent with zeros
for missing gradients. Between two gradients, collectives in progress are advanced without waiting.
:class:`~zerotrial.engine.flat.replicated.ReplicatedGradients` and
:class:`~zerotrial.engine.flat.sharded.ShardedGradients` define the memory of the gradients.
"""

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zerolab.errors import EngineError
from zerotrial.engine.comm.communicator import Communicator, Work
from zerotrial.engine.flat.layout import Bucket
from zerotrial.engine.module.gradient_access import get_raw_gradient, set_raw_gradient

__all__ = [
    "Averaging",
    "GradientHooks",
    "GradientPolicy",
    "Gradients",
    "late_gradient_error",
    "raise_if_unused",
    "take_gradient",
]

_MAX_LISTED = 10


@dataclass(frozen=True)
class Averaging:
    """Factors applied to gradients before and after the sum over ranks."""

    before: float
    after: float

    @classmethod
    def of(cls, ranks: int, *, operation: str, prescale: bool, predivide: float) -> "Averaging":
        """Return the factors for DeepSpeed's three keys.

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

    def before_replica_mean(self, replicas: int) -> "Averaging":
        """Return the factors of shards that are averaged over ``replicas`` afterwards."""
        return Averaging(self.before, self.after * replicas)


@dataclass(frozen=True)
class GradientPolicy:
    """Configuration of the gradients."""

    averaging: Averaging
    device: torch.device
    """Device of the gradients."""

    accumulate: Sequence[torch.dtype]
    """Accumulation type of each bucket."""

    communicate: Sequence[torch.dtype]
    """Communication type of each bucket."""

    overlap: bool
    """Whether to start collectives during backward."""

    needs_all_gradients: bool
    """Whether to raise if a parameter has no gradient."""


class Gradients:
    """Base class: arrival of gradients, order of the buckets, and collectives in progress."""

    def __init__(
        self, buckets: Sequence[Bucket], comm: Communicator, policy: GradientPolicy
    ) -> None:
        self._buckets = buckets
        self._comm = comm
        self._averaging = policy.averaging
        self.pass_weight = 1.0
        """Weight of the current pass among the micro-batches of a step."""
        self._overlap = policy.overlap
        self._needs_all_gradients = policy.needs_all_gradients
        self._arrived: list[set[int]] = [set() for _ in buckets]
        self._touched: list[set[int] | None] = [set() for _ in buckets]
        """Parameters with a gradient since the last step; None means all of them."""
        self._dropped: list[set[int]] = [set() for _ in buckets]
        """Parameters whose gradient user code set to None."""
        self.exposed: dict[int, Tensor] = {}
        """By bucket, (N * S,): averages that user code may read and write; the step uses them."""
        self._next = 0
        self._works: deque[Work] = deque()
        self._sending = False

    def begin(self, *, boundary: bool) -> None:
        """Prepare for a backward pass."""
        raise NotImplementedError

    def arrived(self, bucket: int, slot: int) -> None:
        """Accept a parameter's gradient as soon as backward has produced it."""
        self._accumulate(bucket, slot)
        self._arrived[bucket].add(slot)
        # In the order of the buckets on every rank: collectives must match. A full bucket waits
        # for its predecessors; the rest is sent at the end of backward.
        if self._sending and self._overlap:
            while self._next < len(self._buckets) and self._full(self._next):
                self._send_next()
            self._advance()

    def end(self, *, boundary: bool) -> None:
        """End a backward pass; send the remaining buckets."""
        if self._needs_all_gradients and boundary:
            self._check_unused()
        for index, arrived in enumerate(self._arrived):
            touched = self._touched[index]
            if touched is not None:
                full = len(arrived) == len(self._buckets[index].slots)
                self._touched[index] = None if full else touched | arrived
            self._dropped[index] -= arrived
        if self._sending:
            self.send_rest()

    def idle(self, bucket: int) -> list[int]:
        """Return the parameters that the next step must not update.

        These are frozen parameters that got no gradient since the last step, and parameters whose
        gradient user code set to None.
        """
        if self._touched[bucket] is None:
            return sorted(self._dropped[bucket])
        slots = range(len(self._buckets[bucket].slots))
        return [slot for slot in slots if self._is_idle(bucket, slot)]

    def _is_idle(self, bucket: int, slot: int) -> bool:
        if slot in self._dropped[bucket]:
            return True
        touched = self._touched[bucket]
        if touched is None or slot in touched:
            return False
        return not self._buckets[bucket].slots[slot].parameter.requires_grad

    def read(self, bucket: int, slot: int) -> Tensor | None:
        """Return a parameter's averaged gradient from :attr:`exposed`."""
        if self._is_idle(bucket, slot):
            return None
        entry = self._buckets[bucket].slots[slot]
        return self.exposed[bucket][entry.start : entry.stop].view(entry.parameter.shape)

    def write(self, bucket: int, slot: int, value: Tensor | None) -> None:
        """Replace a parameter's averaged gradient in :attr:`exposed`; None removes it."""
        entry = self._buckets[bucket].slots[slot]
        view = self.exposed[bucket][entry.start : entry.stop].view(entry.parameter.shape)
        if value is None:
            view.zero_()
            self._dropped[bucket].add(slot)
            return
        view.copy_(value.to_dense() if value.layout != torch.strided else value)
        self._dropped[bucket].discard(slot)
        touched = self._touched[bucket]
        if touched is not None:
            touched.add(slot)

    @property
    def all_sent(self) -> bool:
        """Whether the averaging of all buckets has started."""
        return self._next == len(self._buckets)

    def send_rest(self) -> None:
        """Send the remaining buckets, full or not."""
        while self._next < len(self._buckets):
            self._send_next()

    def finish(self) -> None:
        """Wait until :meth:`result` is final."""
        while self._works:
            self._works.popleft().wait()

    def result(self, bucket: int) -> Tensor:
        """Return the averaged gradient that this rank applies: (S,), or (N * S,) at stage 0."""
        raise NotImplementedError

    def norm_part(self, bucket: int) -> Tensor:
        """Return the (S,) elements that this rank adds to the norm."""
        raise NotImplementedError

    def reset(self) -> None:
        """Clear all gradients."""
        self._touched = [set() for _ in self._buckets]
        self._dropped = [set() for _ in self._buckets]
        self.exposed = {}

    def abandon(self) -> None:
        """Clear all gradients at any time. **Collective** if some were sent.

        Ranks may have sent different buckets when a backward raised. Each sends the remaining
        ones, so that no rank waits for another, and none writes to memory that is being read.
        """
        if self._sending:
            self.send_rest()
            self.finish()
            self._comm.fence()
        self.reset()

    def tensors_by_kind(self) -> dict[str, list[Tensor]]:
        """Return the tensors of kinds ``gradients`` and ``buckets``."""
        raise NotImplementedError

    def _accumulate(self, bucket: int, slot: int) -> None:
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

    # State between two accumulation boundaries, for checkpoints: averages of earlier passes,
    # and gradients of this rank that are not reduced yet.

    local_to_average: float | None = None
    """Factor from the sum of :meth:`unreduced` gradients to the average; None without any."""

    def settle(self) -> None:
        """Finish reductions in progress, before the state is read or written. **Collective**."""
        raise NotImplementedError

    def averaged(self, bucket: int) -> Tensor | None:
        """Return the averages so far, laid out like :meth:`result`; None if there are none."""
        raise NotImplementedError

    def average_buffer(self, bucket: int) -> Tensor:
        """Return zeros to fill with the bucket's average; call it for all buckets."""
        raise NotImplementedError

    def unreduced(self, bucket: int) -> dict[int, Tensor]:
        """Return gradients that are not reduced, by slot: (numel,), times ``Averaging.before``."""
        del bucket
        return {}

    def unreduced_buffer(self, bucket: int, slot: int) -> Tensor:
        """Return the memory of one unreduced gradient: (numel,), uninitialized."""
        raise NotImplementedError

    def mark_unreduced(self, bucket: int, slot: int) -> None:
        """Mark the content of :meth:`unreduced_buffer` as valid."""
        raise NotImplementedError

    def _check_unused(self) -> None:
        unused = [
            slot.name
            for bucket, arrived in zip(self._buckets, self._arrived, strict=True)
            for index, slot in enumerate(bucket.slots)
            if index not in arrived and slot.parameter.requires_grad
        ]
        raise_if_unused(unused)


def raise_if_unused(names: Sequence[str]) -> None:
    """Raise for parameters without a gradient, if the configuration demands gradients.

    Args:
        names: Trainable parameters without a gradient.

    Raises:
        EngineError: If ``names`` is not empty.
    """
    if names:
        more = ", ..." if len(names) > _MAX_LISTED else ""
        msg = (
            f"parameters without a gradient: {', '.join(names[:_MAX_LISTED])}{more}; set "
            "zero_optimization.ignore_unused_parameters to true, or requires_grad_(False) on "
            "what the loss does not use"
        )
        raise EngineError(msg)


def late_gradient_error(bucket: Bucket, slot: int) -> EngineError:
    """Return the error for a gradient that arrives after its bucket was sent."""
    return EngineError(
        f"{bucket.slots[slot].name}: got a second gradient in one backward pass after the first "
        "was sent (reentrant checkpointing does that to shared parameters); use "
        "checkpoint(..., use_reentrant=False), or set zero_optimization.overlap_comm to false"
    )


def take_gradient(bucket: Bucket, slot: int) -> Tensor:
    """Remove and return a parameter's gradient."""
    parameter = bucket.slots[slot].parameter
    gradient: Tensor = get_raw_gradient(parameter)
    set_raw_gradient(parameter, None)
    return gradient.to_dense() if gradient.layout != torch.strided else gradient


class GradientHooks:
    """Hooks that call back with the slot of each parameter whose gradient was accumulated.

    Active only while :attr:`listening`. A gradient from another engine's loss (the generator's,
    through the discriminator) does not belong to this engine and is dropped.
    """

    def __init__(self, buckets: Sequence[Bucket], arrived: Callable[[int, int], None]) -> None:
        self.listening = False
        self.on_unexpected: Callable[[], None] | None = None
        """Called for a gradient while not listening; may start listening."""
        self._buckets = buckets
        self._arrived = arrived
        self._handles: dict[tuple[int, int], RemovableHandle] = {}
        self._deferred: dict[tuple[int, int], None] = {}
        """Gradients that later hooks of user code have not seen yet, in order of arrival."""
        # A parameter keeps its hooks alive invisibly to the garbage collector. Hooks with
        # a strong reference to the engine would keep an engine without close() alive forever.
        for bucket in buckets:
            for index, slot in enumerate(bucket.slots):
                self._register(bucket.index, index, slot.parameter)

    def _register(self, bucket: int, slot: int, parameter: nn.Parameter) -> None:
        # A post-accumulate hook runs after autograd has written `.grad`, so it may take the
        # gradient away: the model's gradients never exist all at once. A tensor hook runs before
        # that, and could not.
        call = partial(_on_gradient, weakref.ref(self), bucket, slot)
        register: Any = parameter.register_post_accumulate_grad_hook
        self._handles[bucket, slot] = register(call)

    def sweep(self) -> None:
        """Pass on gradients that were written to ``.grad`` without a hook call."""
        for bucket in self._buckets:
            for index, slot in enumerate(bucket.slots):
                if get_raw_gradient(slot.parameter) is not None:
                    self._arrived(bucket.index, index)

    def end(self) -> None:
        """Pass on, at the end of backward, gradients that later hooks have now seen."""
        for bucket, slot in self._deferred:
            parameter = self._buckets[bucket].slots[slot].parameter
            if get_raw_gradient(parameter) is not None:
                self._arrived(bucket, slot)
            # Registered again, so that it runs after user hooks registered in between.
            self._handles[bucket, slot].remove()
            self._register(bucket, slot, parameter)
        self._deferred.clear()

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()


def _on_gradient(
    listener_ref: "weakref.ref[GradientHooks]", bucket: int, slot: int, parameter: nn.Parameter
) -> None:
    """Pass on or drop one parameter's gradient; a single function for speed."""
    listener = listener_ref()
    if listener is None:  # the engine was freed
        return
    if not listener.listening and listener.on_unexpected is not None:
        listener.on_unexpected()
    if listener.listening:
        # Torch runs hooks in order of registration. If user code registered one after ours,
        # it must see the gradient first: then the gradient is passed on in end().
        hooks: Any = parameter._post_accumulate_grad_hooks  # noqa: SLF001
        if len(hooks) == 1:
            listener._arrived(bucket, slot)  # noqa: SLF001 - own class
        elif next(reversed(hooks)) != listener._handles[bucket, slot].id:  # noqa: SLF001
            listener._deferred[bucket, slot] = None  # noqa: SLF001
        elif get_raw_gradient(parameter) is not None:  # no user hook has consumed it
            listener._arrived(bucket, slot)  # noqa: SLF001
    else:
        set_raw_gradient(parameter, None)
