"""Server that kills itself with SIGKILL at its first searcher event.

It dies before the event's transaction is committed, or after the commit but before the response.
"""

import os
import signal
from collections.abc import Callable
from typing import Any

from zerolab.searcher import Operation
from zeroserver.orchestrator.search.search_service import SearchService
from zeroserver.process import main


def serve(moment: str, arguments: list[str]) -> int:
    """Run the server in a forked child; it dies ``before`` or ``after`` its first commit."""
    SearchService.add_events = _kill_in(SearchService.add_events, moment)  # type: ignore[method-assign]
    return main(arguments)


def _kill_in(
    original: Callable[..., list[Operation]], moment: str
) -> Callable[..., list[Operation]]:
    def add_and_kill(self: SearchService, experiment_id: int, events: Any) -> list[Operation]:
        operations = original(self, experiment_id, events)
        if moment == "before":
            _kill_self()
        self.work.then.append(_kill_self)
        return operations

    return add_and_kill


def _kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
