"""Communicator that reports the time of collectives to an observer, for step breakdowns.

Time inside a communicator's call (starting, advancing, waiting) is exposed communication. Between
the start and the end of a collective the rank does other work, which hides the remaining
communication.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from zerotrial.engine.comm.communicator import Work
from zerotrial.engine.protocols import COMMUNICATION

if TYPE_CHECKING:
    from zerotrial.engine.comm.communicator import Buffer, Communicator
    from zerotrial.engine.protocols import Observer

__all__ = ["timed_communicator"]


def timed_communicator(comm: Communicator, observer: Observer) -> Communicator:
    """Wrap a communicator of several ranks to report its phases."""
    if comm.size == 1:
        return comm
    return cast("Communicator", _TimedCommunicator(comm, observer))


class _TimedCommunicator:
    def __init__(self, comm: Communicator, observer: Observer) -> None:
        self._comm = comm
        self._observer = observer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def reduce_scatter(self, buffer: Buffer, out: Tensor, factor: float, *, add: bool) -> Work:
        with self._observer.phase(COMMUNICATION):
            return self._track(self._comm.reduce_scatter(buffer, out, factor, add=add))

    def all_reduce(self, buffer: Buffer, factor: float) -> Work:
        with self._observer.phase(COMMUNICATION):
            return self._track(self._comm.all_reduce(buffer, factor))

    def all_gather(self, buffer: Buffer) -> Work:
        with self._observer.phase(COMMUNICATION):
            return self._track(self._comm.all_gather(buffer))

    def sum(self, values: Tensor) -> Tensor:
        with self._observer.phase(COMMUNICATION):
            return self._comm.sum(values)

    def broadcast(self, tensor: Tensor) -> None:
        with self._observer.phase(COMMUNICATION):
            self._comm.broadcast(tensor)

    def fence(self) -> None:
        with self._observer.phase(COMMUNICATION):
            self._comm.fence()

    def _track(self, work: Work) -> Work:
        self._observer.under_way(1)
        return _TimedWork(work, self._observer)


class _TimedWork(Work):
    def __init__(self, work: Work, observer: Observer) -> None:
        self._work = work
        self._observer = observer
        self._is_done = False

    def advance(self) -> bool:
        with self._observer.phase(COMMUNICATION):
            done = self._work.advance()
            if done:
                self._end()
        return done

    def wait(self) -> None:
        with self._observer.phase(COMMUNICATION):
            self._work.wait()
            self._end()

    def release(self) -> None:
        with self._observer.phase(COMMUNICATION):
            self._work.release()

    def is_free(self) -> bool:
        return self._work.is_free()

    def _end(self) -> None:
        if not self._is_done:
            self._observer.under_way(-1)
        self._is_done = True
