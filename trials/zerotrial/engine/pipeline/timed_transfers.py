"""The time that a schedule's transfers take, where the file asks for a breakdown of steps.

torch's schedules start all transfers through one function of their module, and wait for what it
returns; there is no other place to stand. It is replaced while a batch runs, and only where an
observer times phases, or before torch 2.8: there only the last of several transfers is waited for.
"""

# ruff: noqa: SLF001 - the one file that may

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.pipelining import schedules

if TYPE_CHECKING:
    from zerotrial.engine.protocols import Observer

__all__ = ["observed_transfers"]

_WAITS_FOR_ALL = hasattr(schedules, "_wait_batch_p2p")

_Start = Callable[..., list[Any]]


@contextmanager
def observed_transfers(observer: Observer) -> Iterator[None]:
    """Tell an observer how long schedules that run inside send and receive.

    Args:
        observer: Of the engine; receives nothing unless it times phases.
    """
    module: Any = schedules
    before = module._batch_p2p
    start = before if _WAITS_FOR_ALL else _start_all
    if observer.times_phases:
        start = _timed(start, observer)
    module._batch_p2p = start if _WAITS_FOR_ALL else _joined(start)
    try:
        yield
    finally:
        module._batch_p2p = before


def _timed(start: _Start, observer: Observer) -> _Start:
    def timed_start(operations: Sequence[dist.P2POp], *args: Any, **kwargs: Any) -> list[Any]:
        kinds = [_kind(operation) for operation in operations]
        # Those that go out together and cannot be told apart are waited for by who receives.
        both = "receive" if "receive" in kinds else "send"
        with observer.phase(both):
            works = start(operations, *args, **kwargs)
        if len(works) != len(kinds):
            kinds = [both] * len(works)
        timed = [_Timed(work, kind, observer) for work, kind in zip(works, kinds, strict=True)]
        # Who waits for both waits for what it needs: a send may take until the other side has come.
        return sorted(timed, key=lambda work: work.kind != "receive")

    return timed_start


def _start_all(operations: list[dist.P2POp], *_: Any, **__: Any) -> list[Any]:
    return dist.batch_isend_irecv(operations) if operations else []


def _joined(start: _Start) -> Callable[..., _Joined]:
    """Return one transfer for several, as schedules before torch 2.8 expect it."""
    return lambda *args, **kwargs: _Joined(start(*args, **kwargs))


class _Joined:
    """Several transfers under way."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        """Wait until all are done."""
        for work in self._works:
            work.wait()


def _kind(operation: dist.P2POp) -> str:
    return "receive" if operation.op is dist.irecv else "send"


class _Timed:
    """A transfer under way."""

    def __init__(self, work: Any, kind: str, observer: Observer) -> None:
        self._work = work
        self.kind = kind
        self._observer = observer

    def wait(self) -> None:
        """Wait until it is done."""
        with self._observer.phase(self.kind):
            self._work.wait()
