"""Processes that start in milliseconds: forked from one that has imported everything already.

``Nursery`` is the test's end, ``main`` the process that forks. A child runs one function, named as
``module:function``, with arguments that JSON can hold.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from zerolab.linux import die_with_parent


class Nursery:
    """Starts children; they die with it, and it dies with the thread that made it."""

    def __init__(self, *modules: str, log: Path) -> None:
        self.log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.faults.nursery", str(os.getpid()), *modules],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                cwd=Path(__file__).parents[2],
            )
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def start(self, function: str, *arguments: Any) -> int:
        """Run ``module:function`` in a child; return its process id."""
        return int(self._ask({"start": function, "arguments": arguments}))

    def kill(self, pid: int) -> int:
        """Kill a child with SIGKILL, reap it, and return its exit code: -9, or what it was."""
        return int(self._ask({"kill": pid}))

    def wait(self, pid: int) -> int:
        """Wait until a child has ended; return its exit code."""
        return int(self._ask({"wait": pid}))

    def ended(self, pid: int) -> bool:
        """Whether a child that nobody killed or waited for has ended."""
        return self._ask({"ended": pid}) == "True\n"

    def _ask(self, question: dict[str, Any]) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        assert answer, "the nursery has died; see its log"
        return answer.decode()


def main(parent: int, *modules: str) -> None:
    die_with_parent(parent)
    for module in modules:
        importlib.import_module(module)
    children: set[int] = set()
    for line in sys.stdin:
        question = json.loads(line)
        answer: int | bool
        if "start" in question:
            answer = _fork(question["start"], question["arguments"])
            children.add(answer)
        elif "ended" in question:
            # Looked at, not reaped: its number stays its own until someone waits for it.
            flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
            answer = os.waitid(os.P_PID, question["ended"], flags) is not None
        else:
            child = question.get("kill") or question["wait"]
            if "kill" in question:
                os.kill(child, signal.SIGKILL)
            answer = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            children.discard(child)
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _fork(function: str, arguments: list[Any]) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        die_with_parent(parent)
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)
        module, _, name = function.partition(":")
        code = getattr(importlib.import_module(module), name)(*arguments) or 0
    except BaseException:  # noqa: BLE001 - the end of a process
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
