"""Which trials exist and how far they go: pure, and replayable from the events it was told."""

from zerolab.searcher.interface import ExitReason, Searcher
from zerolab.searcher.make import make_searcher
from zerolab.searcher.operations import Continue, Create, Operation, Shutdown, Stop

__all__ = [
    "Continue",
    "Create",
    "ExitReason",
    "Operation",
    "Searcher",
    "Shutdown",
    "Stop",
    "make_searcher",
]
