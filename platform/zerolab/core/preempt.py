"""Learns when a run shall checkpoint and give its slots back.

Either the server says so, or the process is sent SIGTERM.
"""

import logging
import random
import signal
import threading
import time
from types import FrameType

from zerolab.client.http import Client
from zerolab.contract.spec import RunSpec
from zerolab.contract.wire import Directive
from zerolab.errors import NotFoundError, StaleRunError

__all__ = ["DirectivePoller", "SigtermFlag"]

logger = logging.getLogger(__name__)

_WAIT_S = 30.0
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 10.0


class SigtermFlag:
    """Remembers that the process was sent SIGTERM, in place of dying of it.

    Has no effect outside the main thread, where Python allows no signal handlers.
    """

    def __init__(self) -> None:
        self._received = False
        self._previous: signal._HANDLER = None
        self._installed = threading.current_thread() is threading.main_thread()
        if self._installed:
            self._previous = signal.signal(signal.SIGTERM, self._note)

    def __bool__(self) -> bool:
        return self._received

    def restore(self) -> None:
        """Let SIGTERM mean again what it meant before."""
        if self._installed:
            signal.signal(signal.SIGTERM, self._previous or signal.SIG_DFL)
            self._installed = False

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self._received = True


class DirectivePoller:
    """Asks the server, in a thread, what it wants of this run; cheap to ask at every batch.

    For the chief only: the ranks must stop at the same batch, so they follow what it read.

    Args:
        spec: The run; without a server only SIGTERM preempts.
        stale: Set when another run has taken over; share the reporter's.
        sigterm: Heed SIGTERM too; only possible in the main thread.
    """

    def __init__(
        self, spec: RunSpec, stale: threading.Event | None = None, *, sigterm: bool = True
    ) -> None:
        self.stale = stale or threading.Event()
        """Set when another run has taken over; this one must stop and save nothing."""
        self.directive = Directive("train", version=0)
        """What the server said last."""
        self._run_id = spec.run_id
        self._deadline: float | None = None
        self._sigterm = SigtermFlag() if sigterm else None
        self._closed = threading.Event()
        self._client: Client | None = None
        if spec.master:
            self._client = Client(spec.master, spec.token)
            thread = threading.Thread(target=self._poll, name="zerolab-directive", daemon=True)
            thread.start()

    @property
    def should_preempt(self) -> bool:
        """Whether to checkpoint and exit: asked by the server, by SIGTERM, or stale."""
        return self.directive.action != "train" or bool(self._sigterm) or self.stale.is_set()

    @property
    def stop_requested(self) -> bool:
        """Whether the trial is done with, rather than to go on later."""
        return self.directive.action == "stop"

    @property
    def seconds_left(self) -> float | None:
        """Time until the run is killed, in seconds; None when there is no limit."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def close(self) -> None:
        """Stop asking, and let SIGTERM mean again what it meant before."""
        self._closed.set()
        if self._client is not None:
            self._client.close()
        if self._sigterm is not None:
            self._sigterm.restore()

    def _poll(self) -> None:
        assert self._client is not None
        version: int | None = None
        pause_s = 0.0
        while not self._closed.is_set():
            try:
                directive = self._client.directive(self._run_id, version, _WAIT_S)
            except (StaleRunError, NotFoundError) as error:
                if not self._closed.is_set():
                    logger.warning("this run must stop: %s", error)
                    self.stale.set()
                return
            except Exception as error:  # noqa: BLE001 - training must go on, whatever happens here
                if self._closed.is_set():
                    return
                pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s or _FIRST_PAUSE_S)
                logger.debug("no directive: %s", error)
                self._closed.wait(pause_s * random.uniform(0.8, 1.2))  # noqa: S311 - no secret
                continue
            pause_s = 0.0
            version = directive.version
            if directive.deadline_s is not None:
                self._deadline = time.monotonic() + directive.deadline_s
            self.directive = directive
