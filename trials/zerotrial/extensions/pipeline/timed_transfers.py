"""Timing of a schedule's transfers, for step breakdowns.

torch's schedules start all transfers through one function of their module, and wait for its result;
there is no other hook. It is replaced while a batch runs, if an observer times phases, and before
torch 2.8, where only the last of several transfers is waited for.
"""

# ruff: noqa: SLF001 - replaces a private function of torch

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.pipelining import schedules

if TYPE_CHECKING:
    from zerotrial.engine.protocols import Observer

__all__ = ["timed_transfers_of"]

_WAITS_FOR_ALL = hasattr(schedules, "_wait_batch_p2p")

_Start = Callable[..., list[Any]]


@contextmanager
def timed_transfers_of(observer: Observer) -> Iterator[None]:
    """Report send and receive times of the block's schedules to an observer.

    Args:
        observer: The engine's observer; gets nothing unless it times phases.
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
        # Indistinguishable transfers that start together count as receiving.
        both = "receive" if "receive" in kinds else "send"
        with observer.phase(both):
            works = start(operations, *args, **kwargs)
        if len(works) != len(kinds):
            kinds = [both] * len(works)
        timed = [_Timed(work, kind, observer) for work, kind in zip(works, kinds, strict=True)]
        # Receives first: a send may complete only when its receiver arrives.
        return sorted(timed, key=lambda work: work.kind != "receive")

    return timed_start


def _start_all(operations: list[dist.P2POp], *_: Any, **__: Any) -> list[Any]:
    return dist.batch_isend_irecv(operations) if operations else []


def _joined(start: _Start) -> Callable[..., _Joined]:
    """Return one transfer for several, as schedules before torch 2.8 expect."""
    return lambda *args, **kwargs: _Joined(start(*args, **kwargs))


class _Joined:
    """Several transfers in progress."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        """Wait for all transfers."""
        for work in self._works:
            work.wait()


def _kind(operation: dist.P2POp) -> str:
    return "receive" if operation.op is dist.irecv else "send"


class _Timed:
    """Transfer in progress."""

    def __init__(self, work: Any, kind: str, observer: Observer) -> None:
        self._work = work
        self.kind = kind
        self._observer = observer

    def wait(self) -> None:
        """Wait for the transfer."""
        with self._observer.phase(self.kind):
            self._work.wait()
