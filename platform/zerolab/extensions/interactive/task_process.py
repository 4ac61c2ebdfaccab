"""Process of an interactive task: ``python -m zerolab.extensions.interactive.task_process KIND``.

It starts the program, keeps tunnels to the server open, and ends the task when it is idle.
"""

import argparse
import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from zerolab.client.httpx_import import httpx
from zerolab.contract.environment import ENV_RUN_SPEC
from zerolab.contract.outcome import write_reason
from zerolab.contract.spec import EXIT_PREEMPTED, EXIT_USER_ERROR, RunSpec, read_run_spec
from zerolab.errors import ZerolabError
from zerolab.extensions.interactive.programs import (
    Notebook,
    PortCommand,
    Program,
    Shell,
    TensorBoard,
    private_folder,
)
from zerolab.extensions.interactive.tunnels import open_http, open_tunnel, relay
from zerolab.formatting import duration_text
from zerolab.linux import kill_descendants, own_process_tree

__all__ = ["main"]

_WAITING = 4
"""Number of tunnels that wait at the server."""
_REPORT_S = 10.0
_PAUSE_S = 1.0
_STARTUP_POLL_S = 0.1
_END_S = 5.0
_SIGNALS_ABOVE = 128
"""Added to the number of the signal that ended the program, as a shell does."""


class _Task:
    """A running task.

    Args:
        spec: Its run.
        program: Its program.
        idle_timeout_s: Idle time in seconds after which it ends; None for no limit.
    """

    def __init__(self, spec: RunSpec, program: Program, idle_timeout_s: float | None) -> None:
        self._spec = spec
        self._program = program
        self._idle_timeout_s = idle_timeout_s
        self._path = f"/api/v1/runs/{spec.run_id}"
        self._used_at = time.monotonic()
        self._tunnels: set[asyncio.Task[None]] = set()
        self._logged: set[str] = set()

    async def run(self) -> int:
        """Run until the program ends, the task is idle, or it is stopped; return the exit code."""
        stopping = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopping.set)
        ends = {
            asyncio.create_task(stopping.wait()): EXIT_PREEMPTED,
            asyncio.create_task(self._end_of_program()): None,
            asyncio.create_task(self._serve()): 0,
        }
        done, pending = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for task in (*pending, *self._tunnels):
            task.cancel()
        await asyncio.gather(*pending, *self._tunnels, return_exceptions=True)
        first = done.pop()
        first.result()  # raises its error
        code = ends[first]
        return self._program_code() if code is None else code

    async def _end_of_program(self) -> None:
        process = self._program.process
        while process is None or process.poll() is None:
            await asyncio.sleep(_PAUSE_S / 4)

    def _program_code(self) -> int:
        process = self._program.process
        code = 0 if process is None else process.returncode
        return code if code >= 0 else _SIGNALS_ABOVE - code

    async def _serve(self) -> None:
        """Serve the port until the task is idle."""
        while not await self._listens():
            await asyncio.sleep(_STARTUP_POLL_S)
        async with open_http(self._spec.master, self._spec.token) as http:
            while not await self._report(http):
                await asyncio.sleep(_PAUSE_S)
            _log(f"ready: {self._spec.master}/proxy/{self._spec.experiment_id}/")
            for _ in range(_WAITING):
                self._add_tunnel(http)
            while not self._is_idle():
                pause = _REPORT_S if self._idle_timeout_s is None else self._idle_timeout_s / 4
                await asyncio.sleep(min(pause, _REPORT_S))
                await self._report(http)
        reason = f"idle: not used for {duration_text(self._idle_timeout_s or 0.0)}"
        write_reason(self._spec.run_dir, 0, reason)
        _log(f"{reason}; the task ends (--idle-timeout)")

    async def _listens(self) -> bool:
        if self._program.kind == "shell":
            return True
        try:
            stream = await self._program.connect()
        except OSError:
            return False
        await stream.aclose()
        return True

    def _is_idle(self) -> bool:
        limit = self._idle_timeout_s
        return limit is not None and time.monotonic() - self._used_at >= limit

    async def _report(self, http: httpx.AsyncClient) -> bool:
        """Report to the server, which knows when the task was used last.

        Returns:
            Whether the server has accepted it; if not, the reason is in the log.
        """
        busy = await asyncio.to_thread(self._program.is_busy)
        if busy:
            self._used_at = time.monotonic()
        body = {
            "kind": self._program.kind,
            "idle_timeout_s": self._idle_timeout_s,
            "busy": busy,
            "user": self._program.user,
            "host_key": self._program.host_key,
        }
        try:
            response = await http.post(f"{self._path}/port", json=body, timeout=_REPORT_S)
        except httpx.HTTPError as error:
            self._log_once(f"the server does not respond: {error or type(error).__name__}")
            return False
        if not response.is_success:
            self._log_once(f"the server refuses the port of this task: {response.text[:500]}")
            return False
        idle_s = float(response.json()["idle_s"])
        self._used_at = max(self._used_at, time.monotonic() - idle_s)
        return True

    def _log_once(self, text: str) -> None:
        if text not in self._logged:
            self._logged.add(text)
            _log(text)

    def _add_tunnel(self, http: httpx.AsyncClient) -> None:
        task = asyncio.create_task(self._tunnel(http))
        self._tunnels.add(task)
        task.add_done_callback(self._tunnels.discard)

    async def _tunnel(self, http: httpx.AsyncClient) -> None:
        """Keep a tunnel open until the server uses it; then open another one and connect it."""
        while True:
            try:
                async with open_tunnel(http, f"{self._path}/tunnel") as remote:
                    first = await remote.read(64 * 1024)
                    if first:
                        self._add_tunnel(http)
                        with contextlib.suppress(OSError):
                            local = await self._program.connect()
                            await local.write(first)
                            await relay(remote, local)
                        return
            except ZerolabError as error:  # the server has restarted, or the network broke
                self._log_once(f"no tunnel to the server: {error}; trying again")
            await asyncio.sleep(_PAUSE_S)


def _log(text: str) -> None:
    """Write a line to the log of the task."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _program(options: argparse.Namespace, folder: Path) -> Program:
    if options.kind == "notebook":
        directory = Path(options.directory) if options.directory else Path.home()
        return Notebook(folder, directory)
    if options.kind == "tensorboard":
        from zerolab.extensions.interactive.event_files import write_event_files

        for file in sorted(Path.cwd().glob("experiment-*.ndjson")):
            with file.open("rb") as lines:
                write_event_files(lines, folder / "events" / file.stem)
        return TensorBoard(folder, folder / "events")
    if options.kind == "shell":
        return Shell(folder, Path("authorized_keys").read_text())
    return PortCommand(folder, options.command, options.port)


def main() -> int:
    """Run the task that the arguments describe."""
    parser = argparse.ArgumentParser(prog="python -m zerolab.extensions.interactive.task_process")
    parser.add_argument("kind", choices=("notebook", "tensorboard", "shell", "port"))
    parser.add_argument("--idle-timeout", type=float)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--directory", default="")
    arguments = sys.argv[1:]
    dashes = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(arguments[:dashes])
    options.command = arguments[dashes + 1 :]
    spec = read_run_spec(Path(os.environ[ENV_RUN_SPEC]))
    own_process_tree(os.getppid())  # sshd puts its commands into other sessions
    folder = private_folder()
    program: Program | None = None
    try:
        program = _program(options, folder)
        program.start()
        return asyncio.run(_Task(spec, program, options.idle_timeout).run())
    except ZerolabError as error:
        write_reason(spec.run_dir, EXIT_USER_ERROR, str(error))
        sys.stderr.write(f"{error}\n")
        return EXIT_USER_ERROR
    finally:
        _end(None if program is None else program.process)
        shutil.rmtree(folder, ignore_errors=True)


def _end(process: "subprocess.Popen[bytes] | None") -> None:
    """End the program, and kill whatever it or its users have started."""
    if process is not None and process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
    kill_descendants()


if __name__ == "__main__":
    sys.exit(main())
