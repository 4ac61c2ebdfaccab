"""Handing gradients over as backward produces them."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from zerotrial.engine.flat.layout import Bucket

__all__ = ["GradientHooks"]


class GradientHooks:
    """Calls back with the place of each parameter whose gradient has been accumulated.

    Only while :attr:`listening`: a gradient that comes from another engine's loss (the generator's,
    through the discriminator) is not this engine's, and is dropped.

    Args:
        buckets: Whose parameters to listen to.
        arrived: Called with the indices of bucket and place.
    """

    def __init__(self, buckets: Sequence[Bucket], arrived: Callable[[int, int], None]) -> None:
        self.listening = False
        self.unannounced: Callable[[], None] | None = None
        """Called when a gradient comes while nobody listens; may begin to."""
        self._buckets = buckets
        self._arrived = arrived
        self._handles: list[RemovableHandle] = []
        for bucket in buckets:
            for index, place in enumerate(bucket.places):
                call = partial(self._hand_over, bucket.index, index)
                register: Any = place.parameter.register_post_accumulate_grad_hook
                self._handles.append(register(call))

    def sweep(self) -> None:
        """Hand over what was written to ``.grad`` with no hook called."""
        for bucket in self._buckets:
            for index, place in enumerate(bucket.places):
                if place.parameter.grad is not None:
                    self._arrived(bucket.index, index)

    def remove(self) -> None:
        """Stop listening for good."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hand_over(self, bucket: int, place: int, parameter: nn.Parameter) -> None:
        if not self.listening and self.unannounced is not None:
            self.unannounced()
        if self.listening:
            self._arrived(bucket, place)
        else:
            parameter.grad = None
