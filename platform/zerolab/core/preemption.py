"""Preemption by the server or SIGTERM, and extension of a run at its bound."""

import contextlib
import logging
import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from zerolab.client.http import Client
from zerolab.client.transport import Backoff
from zerolab.contract.messages import Directive, Extension
from zerolab.contract.run_folder import RunFolder
from zerolab.contract.spec import ENV_RUN_SPEC, RunSpec
from zerolab.errors import NotFoundError, StaleRunError, UnreachableError, ZerolabError

if TYPE_CHECKING:
    from zerolab.reports.reporter import Reporter

__all__ = ["DirectivePoller", "SigtermFlag", "request_extension"]

logger = logging.getLogger(__name__)
_WAIT_S = 30.0
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 10.0


class SigtermFlag:
    """Flag that is set by SIGTERM, instead of terminating the process.

    Has no effect outside the main thread, where Python allows no signal handlers.
    """

    def __init__(self) -> None:
        self._received = False
        self._previous: signal._HANDLER = None
        self._installed = threading.current_thread() is threading.main_thread()
        if self._installed:
            self._previous = signal.signal(signal.SIGTERM, self._handle_signal)
            _mark_ready()

    def __bool__(self) -> bool:
        return self._received

    def restore(self) -> None:
        """Restore the previous handler of SIGTERM."""
        if self._installed:
            signal.signal(signal.SIGTERM, self._previous or signal.SIG_DFL)
            self._installed = False

    def _handle_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._received = True


def _mark_ready() -> None:
    """Signal the launcher, if any, that SIGTERM is handled now."""
    spec, rank = os.environ.get(ENV_RUN_SPEC), os.environ.get("RANK")
    if spec and rank:
        with contextlib.suppress(OSError):
            RunFolder(Path(spec).parent).ready(int(rank)).touch(0o600)


class DirectivePoller:
    """Polls the server's directive for this run in a thread; reading it is cheap.

    For the chief only: the ranks must stop at the same batch, so they follow the chief.

    Args:
        spec: The run; without a server only SIGTERM preempts.
        stale: Set when another run has taken over; share the reporter's.
        sigterm: Handle SIGTERM, too; only possible in the main thread.
    """

    def __init__(
        self, spec: RunSpec, stale: threading.Event | None = None, *, sigterm: bool = True
    ) -> None:
        self.stale = stale or threading.Event()
        """Set when another run has taken over; this one must stop and save nothing."""
        self.directive = Directive("train", version=0)
        """Last directive of the server."""
        self._run_id = spec.run_id
        self._deadline: float | None = None
        self._sigterm = SigtermFlag() if sigterm else None
        self._closed = threading.Event()
        self._has_warned = False
        self._client: Client | None = None
        if spec.master:
            self._client = Client(spec.master, spec.token)
            thread = threading.Thread(target=self._poll, name="zerolab-directive", daemon=True)
            thread.start()

    @property
    def should_preempt(self) -> bool:
        """Whether to checkpoint and exit: server request, SIGTERM, or a stale run."""
        return self.directive.action != "train" or bool(self._sigterm) or self.stale.is_set()

    @property
    def stop_requested(self) -> bool:
        """Whether the trial must end, instead of resuming later."""
        return self.directive.action == "stop"

    @property
    def seconds_left(self) -> float | None:
        """Time until the run is killed, in seconds; None without a limit."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def close(self) -> None:
        """Stop polling, and restore the previous handler of SIGTERM."""
        self._closed.set()
        if self._client is not None:
            self._client.close()
        if self._sigterm is not None:
            self._sigterm.restore()

    def _poll(self) -> None:
        assert self._client is not None
        version: int | None = None
        backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        while not self._closed.is_set():
            try:
                directive = self._client.directive(self._run_id, version, _WAIT_S)
            except (StaleRunError, NotFoundError) as error:
                if not self._closed.is_set():
                    logger.warning("this run must stop: %s", error)
                    self.stale.set()
                return
            except Exception as error:  # noqa: BLE001 - training must continue, whatever fails here
                if self._closed.is_set():
                    return
                self._log_failure(error)
                self._closed.wait(backoff.pause_s())
                continue
            backoff.reset()
            version = directive.version
            if directive.deadline_s is not None:
                self._deadline = time.monotonic() + directive.deadline_s
            self.directive = directive

    def _log_failure(self, error: Exception) -> None:
        if isinstance(error, UnreachableError):
            logger.debug("no directive: %s", error)  # the reporter logs the outage
        elif not self._has_warned:
            self._has_warned = True
            logger.warning(
                "cannot poll the server for pause or stop, training continues: %s",
                error,
                exc_info=error,
            )


logger = logging.getLogger(__name__)
_TIMEOUT_S = 10.0


def request_extension(spec: RunSpec, reporter: "Reporter", until: int) -> Extension | None:
    """Ask the server whether a run at its bound may continue immediately.

    The decision depends on its reports, so all of them are uploaded first.

    Args:
        spec: The run.
        reporter: Reporter of the run.
        until: Its bound, in the unit of the search.

    Returns:
        The response; None without a server, or if it is unreachable. The run then ends at its
        bound, and the trial is restarted later if the searcher continues it.
    """
    if not spec.master or not reporter.flush():
        return None
    try:
        with Client(spec.master, spec.token, timeout_s=_TIMEOUT_S) as client:
            return client.extend(spec.run_id, until)
    except ZerolabError as error:
        logger.debug("could not request an extension: %s", error)
        return None
