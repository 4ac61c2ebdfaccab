"""Collectives whose time an observer is told, where the file asks for a breakdown of steps.

What a rank spends inside a call of its communicator is communication that is not hidden: it starts
a collective, brings it on, or waits for the others. Between the start and the end of a collective
the rank does something else, behind which the rest is hidden.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

if TYPE_CHECKING:
    from zerotrial.engine.comm.communicator import Buffer, Communicator, Work
    from zerotrial.engine.protocols import Observer

__all__ = ["COMMUNICATION", "observed"]

COMMUNICATION = "communication"
"""The phase that all of it counts as."""


def observed(comm: Communicator, observer: Observer) -> Communicator:
    """Have an observer told what a communicator does, if it times phases at all.

    Args:
        comm: Does the work.
        observer: Of the engine.
    """
    if comm.size == 1 or not observer.times_phases:
        return comm
    return cast("Communicator", _Observed(comm, observer))


class _Observed:
    def __init__(self, comm: Communicator, observer: Observer) -> None:
        self._comm = comm
        self._observer = observer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def reduce_scatter(self, buffer: Buffer, out: Tensor, factor: float, *, add: bool) -> Work:
        """See :class:`~zerotrial.engine.comm.communicator.Communicator`."""
        with self._observer.phase(COMMUNICATION):
            return self._started(self._comm.reduce_scatter(buffer, out, factor, add=add))

    def all_reduce(self, buffer: Buffer, factor: float) -> Work:
        """See :class:`~zerotrial.engine.comm.communicator.Communicator`."""
        with self._observer.phase(COMMUNICATION):
            return self._started(self._comm.all_reduce(buffer, factor))

    def all_gather(self, buffer: Buffer) -> Work:
        """See :class:`~zerotrial.engine.comm.communicator.Communicator`."""
        with self._observer.phase(COMMUNICATION):
            return self._started(self._comm.all_gather(buffer))

    def sum(self, values: Tensor) -> Tensor:
        """See :class:`~zerotrial.engine.comm.communicator.Communicator`."""
        with self._observer.phase(COMMUNICATION):
            return self._comm.sum(values)

    def broadcast(self, tensor: Tensor) -> None:
        """See :class:`~zerotrial.engine.comm.communicator.Communicator`."""
        with self._observer.phase(COMMUNICATION):
            self._comm.broadcast(tensor)

    def fence(self) -> None:
        """See :class:`~zerotrial.engine.comm.communicator.Communicator`."""
        with self._observer.phase(COMMUNICATION):
            self._comm.fence()

    def _started(self, work: Work) -> Work:
        self._observer.under_way(1)
        return _ObservedWork(work, self._observer)


class _ObservedWork:
    def __init__(self, work: Work, observer: Observer) -> None:
        self._work = work
        self._observer = observer
        self._is_done = False

    def advance(self) -> bool:
        """See :class:`~zerotrial.engine.comm.communicator.Work`."""
        with self._observer.phase(COMMUNICATION):
            done = self._work.advance()
            if done:
                self._end()
        return done

    def wait(self) -> None:
        """See :class:`~zerotrial.engine.comm.communicator.Work`."""
        with self._observer.phase(COMMUNICATION):
            self._work.wait()
            self._end()

    def release(self) -> None:
        """See :class:`~zerotrial.engine.comm.communicator.Work`."""
        with self._observer.phase(COMMUNICATION):
            self._work.release()

    def is_free(self) -> bool:
        """See :class:`~zerotrial.engine.comm.communicator.Work`."""
        return self._work.is_free()

    def _end(self) -> None:
        if not self._is_done:
            self._observer.under_way(-1)
        self._is_done = True
