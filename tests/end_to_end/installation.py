"""Separate installations for tests: real server, real agent, real command line."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.waiting import DEADLINE_S, free_port, until
from zerolab.cli.main import main
from zerolab.client.http import Client
from zerolab.contract.run_folder import RunFolder
from zerolab.contract.spec import ENV_HOME, ENV_PRELOAD
from zerolab.files import read_json
from zerolab.linux import kill_all, wait_for_end
from zerolab.paths import Home

ENDED = ("COMPLETED", "CANCELED", "ERROR")


def in_process(
    environment: Mapping[str, str], *arguments: str | Path, expect: int | None = 0
) -> subprocess.CompletedProcess[str]:
    """Run ``zerolab`` in this process, without an interactive input.

    Args:
        environment: All environment variables of the command.
        arguments: Arguments of ``zerolab``.
        expect: Required exit code; None for any.
    """
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", newline="") for _ in range(2))
    code: Any = 0
    saved_environment, saved_argv, saved_stdin = dict(os.environ), sys.argv, sys.stdin
    os.environ.clear()
    os.environ.update(environment)
    sys.argv, sys.stdin = ["zerolab", *map(str, arguments)], io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as exit_request:
        code = exit_request.code or 0
    finally:
        sys.argv, sys.stdin = saved_argv, saved_stdin
        os.environ.clear()
        os.environ.update(saved_environment)
    texts = []
    for stream in (out, err):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode())
    message = f"zerolab {arguments}: exit code {code}\n{texts[0]}\n{texts[1]}"
    assert expect is None or code == expect, message
    return subprocess.CompletedProcess(["zerolab", *map(str, arguments)], code, *texts)


class Installation:
    """Data directory with its server and agent.

    Args:
        path: Data directory, created here.
        slots: CPU slots of the agent.
    """

    def __init__(self, path: Path, slots: int = 2) -> None:
        self.home = Home(path).create()
        self.slots = slots
        self.port = free_port()
        self._client: Client | None = None

    @classmethod
    @contextlib.contextmanager
    def running(cls, path: Path, slots: int = 2) -> Iterator["Installation"]:
        """Start an installation, and stop it at the end of the block."""
        installation = cls(path, slots)
        try:
            installation.up()
            yield installation
        finally:
            installation.destroy()

    # -- processes ---------------------------------------------------------------------------

    def cli(
        self, *arguments: str | Path, expect: int | None = 0
    ) -> subprocess.CompletedProcess[str]:
        """Run ``zerolab``; fail unless it exits with ``expect``."""
        done = subprocess.run(
            [sys.executable, "-m", "zerolab", *map(str, arguments)],
            capture_output=True,
            text=True,
            env=self.environment(),
            timeout=DEADLINE_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        message = f"zerolab {arguments}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert expect is None or done.returncode == expect, message
        return done

    def quick(
        self, *arguments: str | Path, expect: int | None = 0
    ) -> subprocess.CompletedProcess[str]:
        """Run ``zerolab`` as :meth:`cli`, but in this process, half a second faster."""
        return in_process(self.environment(), *arguments, expect=expect)

    def json(self, *arguments: str | Path) -> Any:
        """Run ``zerolab ... --json``; return the parsed output."""
        return json.loads(self.quick(*arguments, "--json").stdout)

    def environment(self) -> dict[str, str]:
        """Return the environment variables of this installation's processes."""
        variables = {
            key: value
            for key, value in os.environ.items()
            if key == ENV_PRELOAD or not key.startswith("ZEROLAB_")
        }
        return {**variables, ENV_HOME: str(self.home.path), "CUDA_VISIBLE_DEVICES": ""}

    def up(self, port: int | None = None) -> str:
        """Start server and agent on the last port or on ``port``; return the address."""
        self._forget_client()
        port_text = str(self.port if port is None else port)
        arguments = ("up", "--port", port_text, "--slots", str(self.slots), "--cpu")
        url = self.cli(*arguments).stdout.strip()
        self.port = int(url.rpartition(":")[2])
        return url

    def down(self) -> None:
        """Stop agent and server."""
        self._forget_client()
        self.quick("down")

    def destroy(self) -> None:
        """Stop all processes, by SIGKILL if necessary."""
        self._forget_client()
        with contextlib.suppress(AssertionError):
            self.quick("down")
        kill_all(list(self.processes()))

    def processes(self) -> Iterator[psutil.Process]:
        """Yield all processes whose environment has this data directory."""
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
        """Wait for a rank's process and return its id."""
        pids = until(
            f"rank {rank} of run {run_id} has a process id",
            lambda: self.folder(run_id).rank_pids(),
            lambda pids: rank in pids,
        )
        return pids[rank]

    # -- experiments -------------------------------------------------------------------------

    @property
    def client(self) -> Client:
        """Client of the running server."""
        if self._client is None:
            url = str((read_json(self.home.server_file) or {})["url"])
            self._client = Client(url, self.home.ensure_token(), timeout_s=DEADLINE_S)
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
            directory: Model directory, with ``experiment.yaml``.
            config: Content of ``experiment.yaml``; None to use the existing file.
            files: More files of the model, by name.
            options: Options of ``zerolab submit``.
        """
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in (files or {}).items():
            (directory / name).write_text(text)
        file = directory / "experiment.yaml"
        if config is not None:
            file.write_text(yaml.safe_dump(dict(config)))
        return int(self.quick("submit", file, *options).stdout)

    def wait_for(self, experiment_id: int, *states: str) -> dict[str, Any]:
        """Wait until an experiment is in one of ``states``, by default an end; return it."""
        expected_states = states or ENDED
        return until(
            f"experiment {experiment_id} is {' or '.join(expected_states)}",
            lambda: self.client.experiment(experiment_id),
            lambda experiment: experiment["state"] in expected_states,
            details=lambda: "\n".join(self.lines(experiment_id)[-30:]),
        )

    def wait_for_run(self, trial_id: int, other_than: int | None = None) -> int:
        """Wait until a trial has a run other than ``other_than``; return its id."""
        trial = until(
            f"trial {trial_id} has a run other than {other_than}",
            lambda: self.client.trial(trial_id),
            lambda trial: trial["run_id"] not in (None, other_than),
        )
        return int(trial["run_id"])

    def lines(self, experiment_id: int, stream: str | None = None) -> list[str]:
        """Return the texts of an experiment's log lines, in the order of their ids."""
        texts: list[str] = []
        after: int | None = None
        while True:
            page = self.client.experiment_logs(experiment_id, after=after, limit=1000)
            texts += [entry["text"] for entry in page["logs"] if stream in (None, entry["stream"])]
            after = page["next_after"]
            if after is None:
                return texts

    def _forget_client(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None


def _kill_and_wait(pid: int) -> None:
    process = psutil.Process(pid)
    os.kill(pid, signal.SIGKILL)
    assert wait_for_end([process], DEADLINE_S)
