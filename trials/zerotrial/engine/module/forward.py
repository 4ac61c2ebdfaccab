"""Replaceable ``forward`` of modules that can still be copied and pickled."""

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["ForwardReplacement"]


class ForwardReplacement:
    """Replacement of ``module.forward``; copies and pickles of the module have the original.

    A plain function could not be pickled, and in a copy would run the original module.

    Args:
        inner: Original ``forward``.
        call: Replacement, which calls ``inner``.
        by: Object that made ``call``.
    """

    def __init__(self, inner: Callable[..., Any], call: Callable[..., Any], by: Any = None) -> None:
        functools.update_wrapper(self, inner)
        self._inner, self._call, self.by = inner, call, by

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the replacement."""
        return self._call(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy the original."""
        return _identity, (self._inner,)


def _identity(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward
