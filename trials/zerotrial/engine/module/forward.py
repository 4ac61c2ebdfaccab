"""A module's ``forward`` with something around it, in models that can be copied and pickled."""

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["AroundForward"]


class AroundForward:
    """Stands for ``module.forward``; a copy of the module, or a pickled one, has the original.

    A function in its place could not be pickled, and in a copy would run the module copied from.

    Args:
        inner: The ``forward`` that was there.
        call: What is called instead; it calls ``inner``.
        by: What made ``call``.
    """

    def __init__(self, inner: Callable[..., Any], call: Callable[..., Any], by: Any = None) -> None:
        functools.update_wrapper(self, inner)
        self._inner, self._call, self.by = inner, call, by

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call what is there instead."""
        return self._call(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle, and copy, the original."""
        return _itself, (self._inner,)


def _itself(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward
