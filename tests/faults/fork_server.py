"""Fork server for tests: children start in milliseconds with all modules imported.

``ForkServer`` is the client in the test, ``main`` the process that forks. A child runs one
function, named ``module:function``, with JSON arguments.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from zerolab.linux import die_with_parent


class ForkServer:
    """Client of the fork server; children die with it, and it with the creating thread."""

    def __init__(self, *modules: str, log: Path) -> None:
        self.log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.faults.fork_server", str(os.getpid()), *modules],
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
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def start(
        self,
        function: str,
        *arguments: Any,
        environment: Mapping[str, str] | None = None,
        directory: str | None = None,
        log: Path | None = None,
    ) -> int:
        """Run ``module:function`` in a child; return its process id.

        Args:
            function: ``module:function``.
            arguments: JSON arguments of the function.
            environment: All environment variables; those of the fork server by default.
            directory: Working directory; that of the fork server by default.
            log: File for its output; by default errors go to the log of the fork server.
        """
        place = {
            "environment": environment,
            "directory": directory,
            "log": None if log is None else str(log),
        }
        return int(self._request({"start": function, "arguments": arguments, **place}))

    def kill(self, pid: int) -> int:
        """Kill a child with SIGKILL, reap it, and return its exit code."""
        return int(self._request({"kill": pid}))

    def wait(self, pid: int) -> int:
        """Wait until a child has ended; return its exit code."""
        return int(self._request({"wait": pid}))

    def ended(self, pid: int) -> bool:
        """Return whether a child has ended that was not killed or waited for."""
        return self._request({"ended": pid}) == "True\n"

    def _request(self, request: dict[str, Any]) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            response = self._process.stdout.readline()
        assert response, "the fork_server has died; see its log"
        return response.decode()


def main(parent: int, *modules: str) -> None:
    die_with_parent(parent)
    for module in modules:
        importlib.import_module(module)
    children: set[int] = set()
    for line in sys.stdin:
        request = json.loads(line)
        response: int | bool
        if "start" in request:
            response = _fork(request)
            children.add(response)
        elif "ended" in request:
            # Without reaping, so that the process id stays valid until a wait.
            flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
            response = os.waitid(os.P_PID, request["ended"], flags) is not None
        else:
            child = request.get("kill") or request["wait"]
            if "kill" in request:
                os.kill(child, signal.SIGKILL)
            response = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            children.discard(child)
        sys.stdout.write(f"{response}\n")
        sys.stdout.flush()
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _fork(request: dict[str, Any]) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        die_with_parent(parent)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        if request["log"] is not None:
            log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
        if request["environment"] is not None:
            os.environ.clear()
            os.environ.update(request["environment"])
        if request["directory"] is not None:
            os.chdir(request["directory"])
        module, _, name = request["start"].partition(":")
        code = getattr(importlib.import_module(module), name)(*request["arguments"]) or 0
    except SystemExit as end:  # invalid options
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - the end of a process
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
