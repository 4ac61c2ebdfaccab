"""Kills of a process at every disk access of a save."""

import os
import resource
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.checkpointing import all_states, make_engine, train
from tests.engine.ranks import process_context
from tests.waiting import DEADLINE_S

_RIGHTLY_ENDED = 0


def in_a_child(action: Callable[[], None]) -> int:
    """Run ``action`` in a forked process; returns 0, or the signal that ended it."""
    child = os.fork()
    if child == 0:
        try:
            action()
            os._exit(_RIGHTLY_ENDED)
        except BaseException:  # noqa: BLE001 - the child must not run the parent's code
            os._exit(99)
    _, status = os.waitpid(child, 0)
    assert not os.WIFEXITED(status) or os.WEXITSTATUS(status) == _RIGHTLY_ENDED
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def die_at_touch(number: int, directory: str) -> None:
    """Kill this process just before it opens, renames or removes for the ``number``-th time."""
    remaining = [number]

    def watch(event: str, args: tuple[Any, ...]) -> None:
        if event not in {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "ctypes.dlsym"}:
            return
        if event != "ctypes.dlsym" and not any(directory in str(value) for value in args):
            return
        remaining[0] -= 1
        if remaining[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def die_at_byte(number: int) -> None:
    """Let the kernel kill this process at byte ``number`` of a file."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (number, hard))


def kill_and_load(directory: str, tag: str, in_background: bool) -> tuple[list[str], int, set[int]]:
    """Save step 2 over step 1, killed at ever later points; load after each.

    Returns:
        Problems, number of kills, and the steps that were found.
    """
    torch.set_num_threads(1)
    engine = make_engine(1)
    train(engine, 1)
    states = {1: all_states(engine)}
    engine.save_checkpoint(directory, tag="first")
    train(engine, 1)
    states[2] = all_states(engine)
    other = make_engine(1, seed=3)
    problems: list[str] = []
    steps: set[int] = set()

    def killed(arm: Callable[[], None]) -> bool:
        def save() -> None:
            arm()
            engine.save_checkpoint(directory, tag=tag, async_save=in_background)
            engine.wait_for_checkpoint()

        died = in_a_child(save) != 0
        other.load_checkpoint(directory)
        steps.add(other.global_steps)
        expected = states[other.global_steps]
        for key, state in all_states(other).items():
            if not torch.equal(state, expected[key]):
                problems.append(f"{key} is not that of step {other.global_steps}")
        return died

    largest = max(path.stat().st_size for path in Path(directory, "first").iterdir())
    for size in (0, 1, 9, 1000, largest // 2, largest - 1):
        assert killed(partial(die_at_byte, size))
    kills = 0
    while killed(partial(die_at_touch, kills, directory)):
        kills += 1
    leftovers = [path.name for path in Path(directory).iterdir() if ".tmp-" in path.name]
    if leftovers:
        problems.append(f"left behind: {leftovers}")
    return problems, kills, steps


@pytest.mark.processes
def test_kill_at_any_point_leaves_a_valid_checkpoint(tmp_path: Path) -> None:
    with ProcessPoolExecutor(1, process_context()) as pool:
        for tag, in_background in (
            ("second", False),  # beside the first
            ("first", False),  # in its place
            ("second", True),
        ):
            directory = str(tmp_path / f"{tag} {in_background}")
            rank_result = pool.submit(kill_and_load, directory, tag, in_background)
            problems, kills, steps = rank_result.result(
                timeout=4 * DEADLINE_S
            )  # of dozens of saves and loads
            assert problems == []
            assert kills > 10
            assert steps == {1, 2}
