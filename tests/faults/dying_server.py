"""A real server that kills itself with SIGKILL where it tells a searcher something.

That is before the transaction of its first event is committed, or when it is, and nobody has been
answered yet.
"""

import os
import signal
from collections.abc import Callable
from typing import Any

from zerolab.searcher import Operation
from zeroserver.orchestrator import searching
from zeroserver.orchestrator.desk import World
from zeroserver.process import main
from zeroserver.store.database import Transaction


def serve(when: str, arguments: list[str]) -> int:
    """What a child of the nursery runs: it dies ``before`` or ``after`` its first event."""
    for name in ("tell", "tell_created"):
        setattr(searching, name, _dying(getattr(searching, name), when))
    return main(arguments)


def _dying(tell: Callable[..., list[Operation]], when: str) -> Callable[..., list[Operation]]:
    def tell_and_die(
        world: World, transaction: Transaction, experiment_id: int, told: Any
    ) -> list[Operation]:
        operations = tell(world, transaction, experiment_id, told)
        if when == "before":
            _die()
        transaction.then.append(_die)
        return operations

    return tell_and_die


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
