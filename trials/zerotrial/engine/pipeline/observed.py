"""The time that a schedule's transfers take, where the file asks for a breakdown of steps.

torch's schedules start all transfers through one function of their module, and wait for what it
returns; there is no other place to stand. It is replaced while a batch runs, and only where an
observer times phases.
"""

# ruff: noqa: SLF001 - the one file that may

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.pipelining import schedules

if TYPE_CHECKING:
    from zerotrial.engine.seams import Observer

__all__ = ["observed_transfers"]


@contextmanager
def observed_transfers(observer: Observer) -> Iterator[None]:
    """Tell an observer how long schedules that run inside send and receive.

    Args:
        observer: Of the engine; nothing is done where it times no phases.
    """
    if not observer.times_phases:
        yield
        return
    module: Any = schedules
    start = module._batch_p2p

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

    module._batch_p2p = timed_start
    try:
        yield
    finally:
        module._batch_p2p = start


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
