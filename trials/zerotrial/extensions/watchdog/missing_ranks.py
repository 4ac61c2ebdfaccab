"""Watchdog that reports the ranks missing from a collective call.

A collective call that one rank skips (``if rank == 0: engine.save_checkpoint(...)``) blocks
silently until the process group's timeout, half an hour with torch's defaults. So each rank records
its current call, at the cost of a few assignments, and a thread checks the record several times per
timeout. When a call has been open for long, the thread asks the other ranks' threads for their
status through torch's rendezvous store. That works with every backend, and for a rank that hangs.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from zerotrial.engine.comm.call_record import CallRecord

if TYPE_CHECKING:
    from zerotrial.engine.mesh import Mesh

__all__ = ["CollectiveWatchdog"]

logger = logging.getLogger(__name__)

VARIABLE = "ZEROLAB_RANK_WAIT_SECONDS"
"""Seconds that ranks may wait for others before a warning; 0 disables the watchdog."""

_DEFAULT_TIMEOUT_S = 20.0
"""Default timeout: a warning appears within 30 seconds."""

_POLLS_PER_TIMEOUT = 8
"""Number of polls per timeout."""


@dataclass(frozen=True)
class _RankStatus:
    """Status of one rank: its current call."""

    calls: int
    """Number of calls begun."""
    name: str
    """Name of the current call; empty outside of calls."""
    request: int = 0
    """Request that this answers: the number of calls begun by the waiting rank."""

    def has_reached(self, other: _RankStatus) -> bool:
        """Return whether this rank is in the other's call, or beyond it."""
        return self.calls > other.calls or self.name == other.name

    def __str__(self) -> str:
        if not self.calls:
            return "has made no such call yet"
        return f"is in {self.name}()" if self.name else "is in no call of the engine"


class CollectiveWatchdog(CallRecord):
    """Record of one engine's calls, compared with the other ranks' when a call blocks.

    Args:
        ranks: Global ranks that make the same calls.
        rank: Global rank of this process.
        token: Key prefix shared by these ranks and unique to the engine; None disables it.
    """

    def __init__(self, ranks: list[int], rank: int, token: str | None) -> None:
        super().__init__()
        self._ranks = ranks
        self._rank = rank
        self._token = token
        self._last = _RankStatus(0, "")
        """Last published status."""
        self._waits = 0
        self._last_warning: tuple[int, list[int], list[int], float] = (-1, [], [], 0.0)
        """Last warning: call, missing ranks, those without an answer, seconds waited."""
        self._polls = (0, 0)
        """The call that other ranks are asked about, and the number of polls since. Polls, not
        seconds: while the machine is suspended time passes, but no rank can answer."""

    @classmethod
    def of(cls, mesh: Mesh) -> CollectiveWatchdog:
        """Create the watchdog of an engine's ranks. **Collective**."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        members = mesh.gather((rank, secrets.token_hex(8)))
        timeout_s = _timeout_s()
        if len(members) == 1 or timeout_s <= 0:
            return cls([], 0, None)
        watchdog = cls(sorted(member for member, _ in members), rank, min(members)[1])
        _polling_thread.add(watchdog, timeout_s)
        return watchdog

    def wait_for_ranks(self, name: str, timeout_s: float) -> list[int]:
        """Wait until all ranks make a call, before its first collective. **Collective**.

        Args:
            name: Name of the call.
            timeout_s: Seconds to wait.

        Returns:
            Ranks that did not arrive in time; empty if all did, or if the watchdog is disabled.
        """
        store = _store()
        if store is None or self._token is None:
            return []
        self._waits += 1
        key = f"{self._token}/{name}/{self._waits}"
        missing = self._ranks
        end = time.monotonic() + timeout_s
        with self.call(name):
            store.set(f"{key}/{self._rank}", "here")
            while missing := [rank for rank in missing if not store.check([f"{key}/{rank}"])]:
                if time.monotonic() > end:
                    break
                time.sleep(0.05)  # store.wait() would block the polling thread
        return missing

    def announce(self, store: Store) -> None:
        """Publish the call that this rank has just begun, without a request."""
        store.set(self._key(self._rank), json.dumps(asdict(_RankStatus(1, self._name, request=1))))

    def close(self) -> None:
        """Stop watching this engine."""
        _polling_thread.remove(self)

    @staticmethod
    @contextmanager
    def watched_call(name: str) -> Iterator[None]:
        """Watch a call of all ranks in torch's world before they have agreed on a token.

        Each rank publishes its arrival at once, since it no longer answers after leaving the call.

        Args:
            name: Name of the call; repetitions are numbered.
        """
        timeout_s, store = _timeout_s(), _store()
        if store is None or dist.get_world_size() == 1 or timeout_s <= 0:
            yield
            return
        rank = dist.get_rank()
        number = store.add(f"{name}/{rank}", 1)
        watchdog = CollectiveWatchdog(list(range(dist.get_world_size())), rank, f"{name}-{number}")
        watchdog.enter(name)
        watchdog.announce(store)
        _polling_thread.add(watchdog, timeout_s)
        try:
            yield
        finally:
            _polling_thread.remove(watchdog)

    # -- in the thread ----------------------------------------------------------------------------

    def poll(self, store: Store, timeout_s: float) -> None:
        """Answer a request, send one if this rank waits, and warn about missing ranks.

        The warning is repeated after twice the time if the missing ranks have changed, or if one
        of them has answered in the meantime.

        Args:
            store: Store shared by all ranks.
            timeout_s: Seconds that a call may be open before a warning.
        """
        status = _RankStatus(self._calls, self._name)
        request = self._requested_call(store)
        waited = time.monotonic() - self._since if status.name else 0.0
        if waited > timeout_s / 2:
            call, polls = self._polls
            self._polls = status.calls, polls + 1 if call == status.calls else 1
            if request < status.calls:
                request = status.calls
                store.set(f"{self._token}/asked", str(request))
        self._publish_status(store, replace(status, request=request))
        call, *_, warned_after = self._last_warning
        if waited > (timeout_s if call != status.calls else max(timeout_s, 2 * warned_after)):
            answers = self._read_statuses(store, status)
            # A rank that does not answer hangs or is slow: wait longer before reporting it.
            if len(answers) == len(self._ranks) or self._polls[1] > 0.9 * _POLLS_PER_TIMEOUT:
                self._warn(answers, status, waited)

    def _requested_call(self, store: Store) -> int:
        key = f"{self._token}/asked"
        return int(store.get(key)) if store.check([key]) else 0

    def _publish_status(self, store: Store, status: _RankStatus) -> None:
        """Publish this rank's status if a request needs it."""
        last = self._last
        answered = last.request == status.request and last.calls > status.request
        if status.request and status != last and not answered:
            store.set(self._key(self._rank), json.dumps(asdict(status)))
            self._last = status

    def _key(self, rank: int) -> str:
        return f"{self._token}/{rank}"

    def _read_statuses(self, store: Store, status: _RankStatus) -> dict[int, _RankStatus]:
        statuses = {self._rank: status}
        for rank in self._ranks:
            if rank != self._rank and store.check([self._key(rank)]):
                answer = _RankStatus(**json.loads(store.get(self._key(rank))))
                if answer.request >= status.calls:
                    statuses[rank] = answer
        return statuses

    def _warn(self, answers: dict[int, _RankStatus], status: _RankStatus, waited: float) -> None:
        unknown = _RankStatus(0, "")
        missing = [r for r in self._ranks if not answers.get(r, unknown).has_reached(status)]
        arrived = [rank for rank, answer in answers.items() if answer.name == status.name]
        if not missing:
            return  # all ranks have arrived: slow, but no fault; asked again at the next poll
        silent = [rank for rank in missing if rank not in answers]
        previous = self._last_warning[:-1]
        self._last_warning = status.calls, missing, silent, waited
        if previous == (status.calls, missing, silent) or self._rank != min(arrived):
            return
        details = "; ".join(
            f"rank {rank} {answers.get(rank, 'does not answer')}" for rank in missing[:8]
        )
        logger.warning(
            "%s(): rank %d has waited %.0f s for %s, which %s not called it: %s. Every rank must "
            "call %s(); calls under `if rank == 0` block forever",
            status.name,
            self._rank,
            waited,
            _rank_list(missing),
            "has" if len(missing) == 1 else "have",
            details,
            status.name,
        )


class _PollingThread:
    """Thread of a process that polls the watchdogs of all its engines."""

    def __init__(self) -> None:
        self._watched: dict[CollectiveWatchdog, float] = {}
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, watchdog: CollectiveWatchdog, timeout_s: float) -> None:
        with self._lock:
            self._watched[watchdog] = timeout_s
            if self._thread is None:
                self._end = threading.Event()
                self._thread = threading.Thread(
                    target=self._run, args=(self._end,), name="engine watchdog", daemon=True
                )
                self._thread.start()

    def remove(self, watchdog: CollectiveWatchdog) -> None:
        with self._lock:
            self._watched.pop(watchdog, None)
            last = not self._watched
        if last:
            self.stop()

    def stop(self) -> None:
        """End the thread before torch.distributed or the interpreter shuts down."""
        with self._lock:
            thread, self._thread = self._thread, None
            self._end.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=5.0)

    def _run(self, end: threading.Event) -> None:
        default_s = _DEFAULT_TIMEOUT_S
        while not end.wait(min(self._watched.values(), default=default_s) / _POLLS_PER_TIMEOUT):
            with self._lock:
                watched = list(self._watched.items())
            store = _store()
            for watchdog, timeout_s in watched:
                try:
                    if store is not None and not end.is_set():
                        watchdog.poll(store, timeout_s)
                except (RuntimeError, ValueError):  # the store ends with the ranks
                    logger.debug("watchdog: the store does not answer", exc_info=True)


_polling_thread = _PollingThread()
atexit.register(_polling_thread.stop)


def _store() -> Store | None:
    """Return torch's rendezvous store with a key prefix; None before initialization."""
    if not dist.is_initialized():
        return None
    default: Store | None = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - no public way
    return None if default is None else PrefixStore("zerotrial/watchdog", default)


def _timeout_s() -> float:
    text = os.environ.get(VARIABLE, "")
    try:
        return float(text) if text else _DEFAULT_TIMEOUT_S
    except ValueError:
        logger.warning("%s: must be a number of seconds, got %r; %g is used", VARIABLE, text, 20.0)
        return _DEFAULT_TIMEOUT_S


def _rank_list(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:16])) + (", ..." if len(ranks) > 16 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"{len(ranks)} ranks ({shown})"
