"""Searchers: pure state machines that are replayed from their events."""

from zerolab.searcher.factory import make_searcher
from zerolab.searcher.interface import ExitReason, ExternalSearcher, Searcher
from zerolab.searcher.operations import Continue, Create, Operation, Reopen, Shutdown, Stop

__all__ = [
    "Continue",
    "Create",
    "ExitReason",
    "ExternalSearcher",
    "Operation",
    "Reopen",
    "Searcher",
    "Shutdown",
    "Stop",
    "make_searcher",
]
