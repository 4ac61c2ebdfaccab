"""Searchers: pure state machines that are replayed from their events."""

from zerolab.searcher.factory import make_searcher
from zerolab.searcher.interface import ExitReason, ExternalSearcher, Searcher
from zerolab.searcher.operations import (
    Continue,
    Create,
    Deferred,
    Operation,
    Reopen,
    Shutdown,
    Stop,
    compute_deferred,
)

__all__ = [
    "Continue",
    "Create",
    "Deferred",
    "ExitReason",
    "ExternalSearcher",
    "Operation",
    "Reopen",
    "Searcher",
    "Shutdown",
    "Stop",
    "compute_deferred",
    "make_searcher",
]
