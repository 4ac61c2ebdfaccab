"""Gradient hooks: pass on gradients as backward produces them."""

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
    """Hooks that call back with the slot of each parameter whose gradient was accumulated.

    Active only while :attr:`listening`. A gradient from another engine's loss (the generator's,
    through the discriminator) does not belong to this engine and is dropped.

    Args:
        buckets: Buckets of the parameters to hook.
        arrived: Callback with the indices of bucket and slot.
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
