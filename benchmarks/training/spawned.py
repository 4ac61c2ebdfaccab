"""Ranks of a benchmark that measure by themselves, and what the first of them found."""

import multiprocessing
import tempfile
from argparse import Namespace
from collections.abc import Callable
from typing import Any

__all__ = ["results_of"]


def results_of(rank: Callable[..., None], ranks: int, options: Namespace) -> Any:
    """Run a function on every rank, each a process of its own.

    Args:
        rank: Is given its number, a directory that all share, ``options``, and the queue into
            which rank 0 puts what it has found.
        ranks: How many.
        options: Of the command.

    Raises:
        SystemExit: If a rank fails.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        queue = context.SimpleQueue()
        processes = [
            context.Process(target=rank, args=(number, directory, options, queue))
            for number in range(ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise SystemExit("a rank failed; its traceback is above")
        return queue.get()
