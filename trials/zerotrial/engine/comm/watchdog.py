"""Says which ranks have not come, when a call that all must make has been waiting for long.

A collective call that one rank leaves out (``if rank == 0: engine.save_checkpoint(...)``) waits
without a word until the process group's timeout, which is half an hour with torch's defaults. Here
each rank notes the call that it is in, which costs a few assignments, and a thread looks at the
note a few times within the time that ranks may wait. Where a call has been open for long, it asks
the other ranks through the store by which torch's ranks met, and their threads answer with what
they are in: for every backend, and also for a rank that hangs.
"""

from __future__ import annotations

import atexit
import functools
import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

if TYPE_CHECKING:
    from zerotrial.engine.mesh import Mesh

__all__ = ["Attendance", "collective", "wait_for_all"]

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger(__name__)

VARIABLE = "ZEROLAB_RANK_WAIT_SECONDS"
"""How long ranks may wait for others before it is said; 0: never."""

_PATIENCE_S = 20.0
"""Where the variable says nothing: the line is there within 30 seconds."""

_STEPS = 8
"""The thread looks as often within the time that ranks may wait."""


@dataclass(frozen=True)
class _Answer:
    """What one rank is doing."""

    calls: int
    """How many it has begun."""
    name: str
    """That it is in; empty where it is in none."""
    question: int = 0
    """What was asked: how many calls the rank had begun that waits."""

    def has_come_to(self, other: _Answer) -> bool:
        """Whether it is in another rank's call, or has been."""
        return self.calls > other.calls or self.name == other.name

    def __str__(self) -> str:
        if not self.calls:
            return "has made no such call yet"
        return f"is in {self.name}()" if self.name else "is in no call of the engine"


class Attendance:
    """One engine's calls, and whether the other ranks make them.

    Args:
        ranks: All global ranks that make the same calls.
        rank: This one.
        token: The same on all of them, and no other engine's; None: nobody is watched.
    """

    def __init__(self, ranks: list[int], rank: int, token: str | None) -> None:
        self._ranks = ranks
        self._rank = rank
        self._token = token
        self._depth = 0
        self._name = ""
        self._calls = 0
        self._since = 0.0
        self._last = _Answer(0, "")
        """What was answered last."""
        self._meetings = 0
        self._told: tuple[int, list[int], list[int], float] = (-1, [], [], 0.0)
        """The last call of which was told that ranks are missing, which, which of them had not
        answered, and after how long."""
        self._looks = (0, 0)
        """The call that others are asked about, and how often this rank has looked since. No
        seconds: in those of a machine that was suspended nobody could have answered."""

    @classmethod
    def of(cls, mesh: Mesh) -> Attendance:
        """Watch the ranks of an engine. **Collective**."""
        found = mesh.gather((dist.get_rank() if dist.is_initialized() else 0, secrets.token_hex(8)))
        patience = _patience()
        if len(found) == 1 or patience <= 0:
            return cls([], 0, None)
        attendance = cls(sorted(rank for rank, _ in found), dist.get_rank(), min(found)[1])
        _watcher.add(attendance, patience)
        return attendance

    def call(self, name: str) -> _Call:
        """Note a call while it lasts; calls inside of it are a part of it.

        Args:
            name: Of the engine's method.
        """
        return _Call(self, name)

    def open_call(self, name: str) -> OpenCall:
        """Note a call that begins in one place and ends in another, or not at all if it raises.

        Args:
            name: As :meth:`call`.
        """
        return OpenCall(self, name)

    def meet(self, name: str, timeout_s: float) -> list[int]:
        """Wait until all ranks make a call, before its first collective. **Collective**.

        Args:
            name: Of the call.
            timeout_s: How long to wait.

        Returns:
            Ranks that have not come in time; empty if all have, or if nobody is watched.
        """
        store = _store()
        if store is None or self._token is None:
            return []
        self._meetings += 1
        key = f"{self._token}/{name}/{self._meetings}"
        missing = self._ranks
        end = time.monotonic() + timeout_s
        with self.call(name):
            store.set(f"{key}/{self._rank}", "here")
            while missing := [rank for rank in missing if not store.check([f"{key}/{rank}"])]:
                if time.monotonic() > end:
                    break
                time.sleep(0.05)  # not store.wait(), which the watching thread would wait for
        return missing

    def enter(self, name: str) -> None:
        """Begin a call."""
        self._depth += 1
        if self._depth == 1:
            self._calls += 1
            self._since = time.monotonic()
            self._name = name

    def leave(self) -> None:
        """End it."""
        self._depth -= 1
        if self._depth == 0:
            self._name = ""

    def come(self, store: Store) -> None:
        """Answer before anybody asks: this rank is in the call that it has just begun."""
        store.set(self._key(self._rank), json.dumps(asdict(_Answer(1, self._name, question=1))))

    def close(self) -> None:
        """Stop watching."""
        _watcher.remove(self)

    # -- in the thread ----------------------------------------------------------------------------

    def look(self, store: Store, patience: float) -> None:
        """Answer a rank that asks, ask if this one waits, and tell whom it waits for.

        Told again, after twice the time, where the ranks that are missing are no longer the same,
        or one of them has answered that did not.

        Args:
            store: Of all ranks.
            patience: Seconds that a call may be open before it is told.
        """
        own = _Answer(self._calls, self._name)
        question = self._asked(store)
        waited = time.monotonic() - self._since if own.name else 0.0
        if waited > patience / 2:
            call, looks = self._looks
            self._looks = own.calls, looks + 1 if call == own.calls else 1
            if question < own.calls:
                question = own.calls
                store.set(f"{self._token}/asked", str(question))
        self._answer(store, replace(own, question=question))
        call, *_, told_after = self._told
        if waited > (patience if call != own.calls else max(patience, 2 * told_after)):
            answers = self._answers(store, own)
            # One that does not answer hangs, or is slow: it gets more time.
            if len(answers) == len(self._ranks) or self._looks[1] > 0.9 * _STEPS:
                self._tell(answers, own, waited)

    def _asked(self, store: Store) -> int:
        key = f"{self._token}/asked"
        return int(store.get(key)) if store.check([key]) else 0

    def _answer(self, store: Store, own: _Answer) -> None:
        """Say what this rank does, if somebody asks who does not know it."""
        last = self._last
        known = last.question == own.question and last.calls > own.question
        if own.question and own != last and not known:
            store.set(self._key(self._rank), json.dumps(asdict(own)))
            self._last = own

    def _key(self, rank: int) -> str:
        return f"{self._token}/{rank}"

    def _answers(self, store: Store, own: _Answer) -> dict[int, _Answer]:
        found = {self._rank: own}
        for rank in self._ranks:
            if rank != self._rank and store.check([self._key(rank)]):
                answer = _Answer(**json.loads(store.get(self._key(rank))))
                if answer.question >= own.calls:
                    found[rank] = answer
        return found

    def _tell(self, answers: dict[int, _Answer], own: _Answer, waited: float) -> None:
        nothing = _Answer(0, "")
        missing = [r for r in self._ranks if not answers.get(r, nothing).has_come_to(own)]
        here = [rank for rank, answer in answers.items() if answer.name == own.name]
        if not missing:
            return  # all are there: it takes long, which is no fault; asked again at the next look
        silent = [rank for rank in missing if rank not in answers]
        told = self._told[:-1]
        self._told = own.calls, missing, silent, waited
        if told == (own.calls, missing, silent) or self._rank != min(here):
            return
        doing = "; ".join(
            f"rank {rank} {answers.get(rank, 'does not answer')}" for rank in missing[:8]
        )
        logger.warning(
            "%s(): rank %d has waited %.0f s for %s, which %s not come: %s. Every rank must call "
            "%s(); calls under `if rank == 0` wait for ever",
            own.name,
            self._rank,
            waited,
            _listed(missing),
            "has" if len(missing) == 1 else "have",
            doing,
            own.name,
        )


class _Call:
    """See :meth:`Attendance.call`; a class of its own, since a generator costs more."""

    __slots__ = ("_attendance", "_name")

    def __init__(self, attendance: Attendance, name: str) -> None:
        self._attendance = attendance
        self._name = name

    def __enter__(self) -> None:
        self._attendance.enter(self._name)

    def __exit__(self, *_: object) -> None:
        self._attendance.leave()


@contextmanager
def wait_for_all(name: str) -> Iterator[None]:
    """Watch a call of all ranks of torch's world, who need not have agreed on anything before.

    Each writes at once that it has come, since one that has gone on answers nobody here.

    Args:
        name: Of the call; numbered by how often a rank has made it.
    """
    patience, store = _patience(), _store()
    if store is None or dist.get_world_size() == 1 or patience <= 0:
        yield
        return
    rank = dist.get_rank()
    number = store.add(f"{name}/{rank}", 1)
    attendance = Attendance(list(range(dist.get_world_size())), rank, f"{name}-{number}")
    attendance.enter(name)
    attendance.come(store)
    _watcher.add(attendance, patience)
    try:
        yield
    finally:
        _watcher.remove(attendance)


class OpenCall:
    """See :meth:`Attendance.open_call`."""

    def __init__(self, attendance: Attendance, name: str) -> None:
        self._attendance = attendance
        self._name = name
        self._is_open = False

    def enter(self) -> None:
        """Begin the call."""
        self._is_open = True
        self._attendance.enter(self._name)

    def leave(self) -> None:
        """End the call, if it has begun."""
        if self._is_open:
            self._is_open = False
            self._attendance.leave()


class _Watcher:
    """The one thread of a process that looks at the calls of all its engines."""

    def __init__(self) -> None:
        self._watched: dict[Attendance, float] = {}
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, attendance: Attendance, patience: float) -> None:
        with self._lock:
            self._watched[attendance] = patience
            if self._thread is None:
                self._end = threading.Event()
                self._thread = threading.Thread(
                    target=self._run, args=(self._end,), name="engine attendance", daemon=True
                )
                self._thread.start()

    def remove(self, attendance: Attendance) -> None:
        with self._lock:
            self._watched.pop(attendance, None)
            last = not self._watched
        if last:
            self.stop()

    def stop(self) -> None:
        """End the thread, before torch.distributed or the interpreter ends under it."""
        with self._lock:
            thread, self._thread = self._thread, None
            self._end.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=5.0)

    def _run(self, end: threading.Event) -> None:
        while not end.wait(min(self._watched.values(), default=_PATIENCE_S) / _STEPS):
            with self._lock:
                watched = list(self._watched.items())
            store = _store()
            for attendance, patience in watched:
                try:
                    if store is not None and not end.is_set():
                        attendance.look(store, patience)
                except (RuntimeError, ValueError):  # the store ends with the ranks
                    logger.debug("attendance: the store does not answer", exc_info=True)


_watcher = _Watcher()
atexit.register(_watcher.stop)


def _store() -> Store | None:
    """The store by which torch's ranks met, with keys of our own."""
    if not dist.is_initialized():
        return None
    default: Store | None = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - no public way
    return None if default is None else PrefixStore("zerotrial/attendance", default)


def _patience() -> float:
    text = os.environ.get(VARIABLE, "")
    try:
        return float(text) if text else _PATIENCE_S
    except ValueError:
        logger.warning("%s: must be a number of seconds, got %r; %g is used", VARIABLE, text, 20.0)
        return _PATIENCE_S


def _listed(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:16])) + (", ..." if len(ranks) > 16 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"{len(ranks)} ranks ({shown})"


def collective(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Mark a method of an engine as one that every rank must call; see :class:`Attendance`."""

    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.attendance.call(method.__name__):
            return method(self, *args, **kwargs)

    return call
