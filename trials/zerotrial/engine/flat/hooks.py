"""Handing gradients over as backward produces them."""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from zerotrial.engine.flat.layout import Bucket
from zerotrial.engine.module.gradient_access import get_raw_gradient, set_raw_gradient

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
        # A parameter keeps its hooks alive out of the garbage collector's sight. If they kept the
        # engine alive in turn, an engine that is dropped without close() would never be freed.
        hooks = weakref.ref(self)
        for bucket in buckets:
            for index, place in enumerate(bucket.places):
                call = partial(_hand_over, hooks, bucket.index, index)
                register: Any = place.parameter.register_post_accumulate_grad_hook
                self._handles.append(register(call))

    def sweep(self) -> None:
        """Hand over what was written to ``.grad`` with no hook called."""
        for bucket in self._buckets:
            for index, place in enumerate(bucket.places):
                if get_raw_gradient(place.parameter) is not None:
                    self._arrived(bucket.index, index)

    def remove(self) -> None:
        """Stop listening for good."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def hand_over(self, bucket: int, place: int, parameter: nn.Parameter) -> None:
        """Take one parameter's gradient, or drop it while nobody listens."""
        if not self.listening and self.unannounced is not None:
            self.unannounced()
        if self.listening:
            self._arrived(bucket, place)
        else:
            set_raw_gradient(parameter, None)


def _hand_over(
    hooks: "weakref.ref[GradientHooks]", bucket: int, place: int, parameter: nn.Parameter
) -> None:
    """Hand a gradient over, unless the engine is gone."""
    if (receiver := hooks()) is not None:
        receiver.hand_over(bucket, place, parameter)
