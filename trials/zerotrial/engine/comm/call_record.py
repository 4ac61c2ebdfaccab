"""Record of an engine's collective calls, which a watchdog compares between ranks."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from zerotrial.engine.protocols import ENGINE_PARTS

if TYPE_CHECKING:
    from zerotrial.engine.mesh import Mesh

__all__ = ["CallRecord", "collective", "record_calls", "watched_call"]

P = ParamSpec("P")
R = TypeVar("R")


def record_calls(mesh: Mesh) -> CallRecord:
    """Create the record of an engine's calls. **Collective**."""
    if "watchdog" not in ENGINE_PARTS:
        return CallRecord()
    record: CallRecord = ENGINE_PARTS["watchdog"].of(mesh)
    return record


def watched_call(name: str) -> AbstractContextManager[None]:
    """Watch a call of all ranks in torch's world, before they have an engine."""
    if "watchdog" not in ENGINE_PARTS:
        return nullcontext()
    watched: AbstractContextManager[None] = ENGINE_PARTS["watchdog"].watched_call(name)
    return watched


class CallRecord:
    """Record of one engine's current call."""

    def __init__(self) -> None:
        self._depth = 0
        self._name = ""
        self._calls = 0
        self._since = 0.0

    def call(self, name: str) -> _Call:
        """Return a context manager that records a call; nested calls belong to the outer one."""
        return _Call(self, name)

    def open_call(self, name: str) -> OpenCall:
        """Return a record of a call that begins and ends in different methods."""
        return OpenCall(self, name)

    def wait_for_ranks(self, name: str, timeout_s: float) -> list[int]:
        """Return the ranks that a watchdog misses in a call; here none."""
        del name, timeout_s
        return []

    def enter(self, name: str) -> None:
        """Record the start of a call."""
        self._depth += 1
        if self._depth == 1:
            self._calls += 1
            self._since = time.monotonic()
            self._name = name

    def leave(self) -> None:
        """Record the end of a call."""
        self._depth -= 1
        if self._depth == 0:
            self._name = ""

    def close(self) -> None:
        """Do nothing: nothing watches this engine."""


class _Call:
    """Context manager of :meth:`CallRecord.call`; a generator would cost more."""

    __slots__ = ("_name", "_watchdog")

    def __init__(self, watchdog: CallRecord, name: str) -> None:
        self._watchdog = watchdog
        self._name = name

    def __enter__(self) -> None:
        self._watchdog.enter(self._name)

    def __exit__(self, *_: object) -> None:
        self._watchdog.leave()


class OpenCall:
    """Record of a call that begins and ends in different methods."""

    def __init__(self, watchdog: CallRecord, name: str) -> None:
        self._watchdog = watchdog
        self._name = name
        self._is_open = False

    def enter(self) -> None:
        """Record the start of the call."""
        self._is_open = True
        self._watchdog.enter(self._name)

    def leave(self) -> None:
        """Record the end of the call, if it has begun."""
        if self._is_open:
            self._is_open = False
            self._watchdog.leave()


def collective(
    name: str,
) -> Callable[[Callable[Concatenate[Any, P], R]], Callable[Concatenate[Any, P], R]]:
    """Mark a method as collective; its object has the :class:`CallRecord` as ``watchdog``.

    Args:
        name: Name of the call in errors.
    """

    def mark(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
        @functools.wraps(method)
        def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
            with self.watchdog.call(name):
                return method(self, *args, **kwargs)

        return call

    return mark
