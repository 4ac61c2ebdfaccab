"""Which trials exist and how far they go: pure, and replayable from the events it was told."""

from zerolab.searcher.factory import make_searcher
from zerolab.searcher.interface import ExitReason, Searcher, ServedOutside
from zerolab.searcher.operations import Continue, Create, Operation, Reopen, Shutdown, Stop

__all__ = [
    "Continue",
    "Create",
    "ExitReason",
    "Operation",
    "Reopen",
    "Searcher",
    "ServedOutside",
    "Shutdown",
    "Stop",
    "make_searcher",
]
