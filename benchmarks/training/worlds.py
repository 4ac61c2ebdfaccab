"""A world of processes that trains one peer, a turn at a time, and says how long steps took."""

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from benchmarks.training.peers import shared_memory_of_deepspeed

__all__ = ["World", "WorldError"]


class WorldError(RuntimeError):
    """A rank has failed, or a turn took too long; the text ends with what rank 0 wrote last."""


class World:
    """The ranks of one case. They wait on their standard input between two turns, and cost nothing.

    Args:
        command: What each rank runs, without its own number.
        ranks: How many.
        environment: Variables of all ranks.
        directory: Where they run.
        patience_s: The longest that a turn may take.
    """

    def __init__(
        self,
        command: Sequence[str],
        ranks: int,
        environment: Mapping[str, str],
        directory: Path,
        patience_s: float,
    ) -> None:
        self._patience_s = patience_s
        self._before = set(shared_memory_of_deepspeed())
        self._folder = tempfile.TemporaryDirectory()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._answers, told = os.pipe()
        self._pending = b""
        common = [*command, "--store", self._folder.name, "--answers", str(told)]
        for rank in range(ranks):
            mine = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            with self._log(rank).open("wb") as log:
                process = subprocess.Popen(
                    [*common, "--rank", str(rank)],
                    env=mine,
                    cwd=directory,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    pass_fds=(told,),
                )
            self._processes.append(process)
        os.close(told)

    def turn(self) -> dict[str, Any]:
        """Let the ranks make their steps, and return rank 0's answer.

        Raises:
            WorldError: If a rank fails, or the turn takes too long.
        """
        deadline = time.monotonic() + self._patience_s
        with contextlib.suppress(BrokenPipeError):
            for process in self._processes:
                _input(process).write(b"\n")
                _input(process).flush()
        while b"\n" not in self._pending:
            ready, _, _ = select.select([self._answers], [], [], 1.0)
            more = os.read(self._answers, 1 << 20) if ready else b""
            self._pending += more
            ended = any(process.poll() is not None for process in self._processes)
            if not more and (ended or time.monotonic() > deadline):
                raise WorldError(self._log(0).read_text(errors="replace")[-1500:])
        line, self._pending = self._pending.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the ranks, by force when they do not go, and remove what they leave."""
        for process in self._processes:
            with contextlib.suppress(BrokenPipeError):
                _input(process).close()
        for process in self._processes:
            try:
                process.wait(30.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for path in set(shared_memory_of_deepspeed()) - self._before:
            path.unlink(missing_ok=True)
        os.close(self._answers)
        self._folder.cleanup()

    def _log(self, rank: int) -> Path:
        return Path(self._folder.name) / f"log{rank}"


def _input(process: subprocess.Popen[bytes]) -> IO[bytes]:
    if process.stdin is None:
        raise WorldError("the rank has no standard input")
    return process.stdin


def turns() -> Any:
    """Yield once for each turn that this rank is given."""
    return iter(sys.stdin.readline, "")
