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
        self._handles: dict[tuple[int, int], RemovableHandle] = {}
        self._waiting: dict[tuple[int, int], None] = {}
        """Gradients that hooks of user code have not seen yet, in the order of arrival."""
        # A parameter keeps its hooks alive out of the garbage collector's sight. If they kept the
        # engine alive in turn, an engine that is dropped without close() would never be freed.
        for bucket in buckets:
            for index, place in enumerate(bucket.places):
                self._register(bucket.index, index, place.parameter)

    def _register(self, bucket: int, place: int, parameter: nn.Parameter) -> None:
        call = partial(_hand_over, weakref.ref(self), bucket, place)
        register: Any = parameter.register_post_accumulate_grad_hook
        self._handles[bucket, place] = register(call)

    def sweep(self) -> None:
        """Hand over what was written to ``.grad`` with no hook called."""
        for bucket in self._buckets:
            for index, place in enumerate(bucket.places):
                if get_raw_gradient(place.parameter) is not None:
                    self._arrived(bucket.index, index)

    def end(self) -> None:
        """Hand over, at the end of a backward, what hooks registered later have seen by now."""
        for bucket, place in self._waiting:
            parameter = self._buckets[bucket].places[place].parameter
            if get_raw_gradient(parameter) is not None:
                self._arrived(bucket, place)
            self._handles[bucket, place].remove()  # comes last from now on
            self._register(bucket, place, parameter)
        self._waiting.clear()

    def remove(self) -> None:
        """Stop listening for good."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()


def _hand_over(
    receiver: "weakref.ref[GradientHooks]", bucket: int, place: int, parameter: nn.Parameter
) -> None:
    """Take one parameter's gradient, or drop it while nobody listens; one call, for speed."""
    own = receiver()
    if own is None:  # the engine is gone
        return
    if not own.listening and own.unannounced is not None:
        own.unannounced()
    if own.listening:
        hooks: Any = parameter._post_accumulate_grad_hooks  # noqa: SLF001
        if len(hooks) == 1:
            own._arrived(bucket, place)  # noqa: SLF001 - own class
        elif next(reversed(hooks)) != own._handles[bucket, place].id:  # noqa: SLF001
            own._waiting[bucket, place] = None  # noqa: SLF001
        elif get_raw_gradient(parameter) is not None:  # no other hook has taken it
            own._arrived(bucket, place)  # noqa: SLF001
    else:
        set_raw_gradient(parameter, None)
