"""An installation of its own for tests: real server, real agent, real command line."""

import contextlib
import io
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil
import yaml

from zerolab.cli.main import main
from zerolab.client.http import Client
from zerolab.contract.run_folder import RunFolder
from zerolab.contract.spec import ENV_HOME
from zerolab.files import read_json
from zerolab.linux import kill_all
from zerolab.paths import Home

DEADLINE_S = 240.0
"""For anything that must happen: a busy machine may be ten times slower than an idle one."""

ENDED = ("COMPLETED", "CANCELED", "ERROR")

T = TypeVar("T")


def eventually(question: Callable[[], T | None], deadline_s: float = DEADLINE_S) -> T:
    """Ask until the answer is true, and return it; fail when that takes too long."""
    deadline = time.monotonic() + deadline_s
    while True:
        answer = question()
        if answer:
            return answer
        assert time.monotonic() < deadline, f"still {answer!r} after {deadline_s:.0f} s"
        time.sleep(0.05)


class Installation:
    """A data directory, and the processes that work on it.

    Args:
        path: Data directory, made here.
        slots: CPU slots of the agent.
    """

    def __init__(self, path: Path, slots: int = 2) -> None:
        self.home = Home(path).create()
        self.slots = slots
        self.port = _free_port()
        self._client: Client | None = None

    @classmethod
    @contextlib.contextmanager
    def running(cls, path: Path, slots: int = 2) -> Iterator["Installation"]:
        """Bring an installation up, and whatever happens, down again."""
        made = cls(path, slots)
        try:
            made.up()
            yield made
        finally:
            made.destroy()

    # -- processes ---------------------------------------------------------------------------

    def cli(
        self, *words: str | Path, expect: int | None = 0, timeout_s: float = DEADLINE_S
    ) -> subprocess.CompletedProcess[str]:
        """Run ``zerolab`` with these words; fail unless it exits with ``expect``."""
        done = subprocess.run(
            [sys.executable, "-m", "zerolab", *map(str, words)],
            capture_output=True,
            text=True,
            env=self.environment(),
            timeout=timeout_s,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        told = f"zerolab {words}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert expect is None or done.returncode == expect, told
        return done

    def quick(self, *words: str | Path, expect: int | None = 0) -> subprocess.CompletedProcess[str]:
        """Do what :meth:`cli` does, but inside this process: half a second faster."""
        out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", newline="") for _ in range(2))
        code: Any = 0
        environment, arguments = dict(os.environ), sys.argv
        os.environ.clear()
        os.environ.update(self.environment())
        sys.argv = ["zerolab", *map(str, words)]
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                main()
        except SystemExit as end:
            code = end.code or 0
        finally:
            sys.argv = arguments
            os.environ.clear()
            os.environ.update(environment)
        texts = []
        for stream in (out, err):
            stream.flush()
            texts.append(stream.buffer.getvalue().decode())
        told = f"zerolab {words}: exit code {code}\n{texts[0]}\n{texts[1]}"
        assert expect is None or code == expect, told
        return subprocess.CompletedProcess(sys.argv, code, *texts)

    def json(self, *words: str | Path) -> Any:
        """Run ``zerolab`` with these words and ``--json``; return what it prints."""
        return json.loads(self.quick(*words, "--json").stdout)

    def environment(self) -> dict[str, str]:
        """Return the variables that processes of this installation run with."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith("ZEROLAB_")}
        return {**kept, ENV_HOME: str(self.home.path), "CUDA_VISIBLE_DEVICES": ""}

    def up(self, port: int | None = None) -> str:
        """Bring server and agent up, where they were or on ``port``; return the address."""
        self._forget_client()
        where = str(self.port if port is None else port)
        words = ("up", "--port", where, "--slots", str(self.slots), "--cpu")
        url = self.cli(*words).stdout.strip()
        self.port = int(url.rpartition(":")[2])
        return url

    def down(self) -> None:
        """Stop agent and server."""
        self._forget_client()
        self.cli("down")

    def destroy(self) -> None:
        """Stop everything, by force if need be; nothing of it is left."""
        self._forget_client()
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            self.cli("down", timeout_s=120)
        kill_all(list(self.processes()))

    def processes(self) -> Iterator[psutil.Process]:
        """Find every process of this installation: all of them inherit its data directory."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(ENV_HOME) == str(self.home.path):
                    yield process

    @property
    def server_pid(self) -> int:
        """Process id of the server."""
        return int((read_json(self.home.server_file) or {})["pid"])

    @property
    def agent_pid(self) -> int:
        """Process id of the agent."""
        return int((read_json(self.home.agent_file) or {})["pid"])

    def kill_server(self) -> None:
        """Kill the server with SIGKILL."""
        self._forget_client()
        _kill_and_wait(self.server_pid)

    def kill_agent(self) -> None:
        """Kill the agent with SIGKILL."""
        _kill_and_wait(self.agent_pid)

    def folder(self, run_id: int) -> RunFolder:
        """Return the directory of a run."""
        return RunFolder(self.home.run(run_id))

    def rank_pid(self, run_id: int, rank: int = 0) -> int:
        """Return the process id of a rank, as soon as it has one."""
        return eventually(lambda: self.folder(run_id).rank_pids().get(rank))

    # -- experiments -------------------------------------------------------------------------

    @property
    def client(self) -> Client:
        """A client of the server that is up."""
        if self._client is None:
            url = str((read_json(self.home.server_file) or {})["url"])
            self._client = Client(url, self.home.ensure_token())
        return self._client

    def submit(
        self,
        directory: Path,
        config: Mapping[str, Any] | None = None,
        files: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
    ) -> int:
        """Write an experiment's files, submit it with the command line, return its id.

        Args:
            directory: Holds the model; ``experiment.yaml`` in it is used or written.
            config: Content of ``experiment.yaml``; what is there already when None.
            files: Further files of the model, by name.
            options: For ``zerolab submit``.
        """
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in (files or {}).items():
            (directory / name).write_text(text)
        file = directory / "experiment.yaml"
        if config is not None:
            file.write_text(yaml.safe_dump(dict(config)))
        return int(self.quick("submit", file, *options).stdout)

    def wait_for(
        self, experiment_id: int, *states: str, deadline_s: float = DEADLINE_S
    ) -> dict[str, Any]:
        """Wait until an experiment is in one of ``states`` (by default: has ended); return it."""
        wanted = states or ENDED

        def look() -> dict[str, Any] | None:
            found = self.client.experiment(experiment_id)
            return found if found["state"] in wanted else None

        return eventually(look, deadline_s)

    def wait_for_run(self, trial_id: int, other_than: int | None = None) -> int:
        """Wait until a trial has a run, a newer one than ``other_than``; return its id."""

        def look() -> int | None:
            run_id = self.client.trial(trial_id)["run_id"]
            return run_id if run_id is not None and run_id != other_than else None

        return eventually(look)

    def lines(self, experiment_id: int, stream: str | None = None) -> list[str]:
        """Return the texts of an experiment's log lines, in the order of their ids."""
        found: list[str] = []
        after: int | None = None
        while True:
            page = self.client.experiment_logs(experiment_id, after=after, limit=1000)
            found += [entry["text"] for entry in page["logs"] if stream in (None, entry["stream"])]
            after = page["next_after"]
            if after is None:
                return found

    def _forget_client(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None


def _kill_and_wait(pid: int) -> None:
    process = psutil.Process(pid)
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)


def _free_port() -> int:
    """Return a free port that no outgoing connection takes while the server is away."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)  # below the system's own range
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue
