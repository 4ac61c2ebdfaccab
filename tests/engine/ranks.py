"""Runs a function on several ranks and collects the results.

Ranks are forked from a process that has imported torch and the engine already (``preloaded.py``):
importing them takes a rank longer than most tests.
"""

import contextlib
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

from tests.waiting import DEADLINE_S
from zerolab.linux import die_with_parent

__all__ = ["RankError", "process_context", "run_on_ranks"]

_ROOT = Path(__file__).parents[2]

_FAREWELL_S = 20.0
"""For ranks whose world is broken, before they are killed: a tenth of it is enough."""


class RankError(AssertionError):
    """A rank raised, died, or did not finish in time."""


def process_context(*, fresh: bool = False) -> BaseContext:
    """Return a context that forks preloaded processes or spawns new ones.

    Args:
        fresh: Spawn interpreters with different hash seeds, as on several machines.
    """
    if fresh:
        return multiprocessing.get_context("spawn")
    forkserver.set_forkserver_preload(["tests.engine.preloaded"])
    with contextlib.chdir(_ROOT):  # so that the server, started at the first call, finds the tests
        forkserver.ensure_running()
    return multiprocessing.get_context("forkserver")


def run_on_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    group_timeout: float = DEADLINE_S,
    expect_deaths: bool = False,
    fresh: bool = False,
    gpus: bool = False,
) -> list[Any]:
    """Call ``function(*args)`` on every rank of a fresh gloo world.

    Args:
        function: At the top level of a module, so that a new process can import it.
        world_size: Number of ranks.
        args: Passed to every rank; must be picklable.
        group_timeout: Seconds for one collective.
        expect_deaths: A rank that ends without an answer gives None rather than an error.
        fresh: As for :func:`process_context`.
        gpus: Whether the ranks see the machine's GPUs; gloo is for CPU tensors.

    Returns:
        Results of the ranks, in rank order.

    Raises:
        RankError: With the traceback of each rank that failed.
    """
    context = process_context(fresh=fresh)
    parent = os.getpid() if fresh else forkserver._forkserver._forkserver_pid
    environment = dict(os.environ)  # the current value, not that at the first rank's start
    if not gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory() as directory:
        world = (world_size, f"{directory}/rendezvous", group_timeout, args)
        processes, pipes = [], []
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main,
                args=(parent, environment, sender, function, rank, *world),
                daemon=True,
            )
            process.start()
            sender.close()
            processes.append(process)
            pipes.append(receiver)
        try:
            answers = _collect(pipes, time.monotonic() + 4 * DEADLINE_S)
        finally:
            _end(processes)
    problems = []
    results = []
    for rank, answer in enumerate(answers):
        if answer is None and expect_deaths:
            results.append(None)
        elif answer is None:
            problems.append(f"rank {rank}: no answer (exit code {processes[rank].exitcode})")
        elif isinstance(answer, str):
            problems.append(f"rank {rank}:\n{answer}")
        else:
            results.append(pickle.loads(answer)[0])
    if problems:
        raise RankError("\n".join(problems))
    return results


def _collect(pipes: list[Connection], deadline: float) -> list[Any]:
    answers: list[Any] = [None] * len(pipes)
    open_pipes = {pipe: rank for rank, pipe in enumerate(pipes)}
    while open_pipes and time.monotonic() < deadline:
        for pipe in wait(list(open_pipes), timeout=1.0):
            assert isinstance(pipe, Connection)
            rank = open_pipes.pop(pipe)
            with contextlib.suppress(EOFError):
                answers[rank] = pipe.recv()
            if isinstance(answers[rank], str):  # the others may wait for this rank for ever
                deadline = min(deadline, time.monotonic() + _FAREWELL_S)
    return answers


def _end(processes: list[Any]) -> None:
    for process in processes:
        process.join(timeout=_FAREWELL_S)
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join()


def _rank_main(
    parent: int,
    environment: dict[str, str],
    pipe: Connection,
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    store: str,
    group_timeout: float,
    args: tuple[Any, ...],
) -> None:
    die_with_parent(parent)  # a rank whose peers have exited may spin forever
    os.environ.clear()
    os.environ.update(environment)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=group_timeout),
        )
        result = function(*args)
        dist.barrier()
        dist.destroy_process_group()
        pipe.send(pickle.dumps((result,)))  # by value: tensors outlive this process
    except BaseException:  # noqa: BLE001 - sent to the parent, which raises
        pipe.send(traceback.format_exc())
        os._exit(1)
