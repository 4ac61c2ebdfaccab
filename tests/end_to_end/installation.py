"""An installation of its own for tests: real server, real agent, real command line."""

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
from zerolab.contract.spec import ENV_HOME
from zerolab.files import read_json
from zerolab.linux import kill_all, wait_for_end
from zerolab.paths import Home

ENDED = ("COMPLETED", "CANCELED", "ERROR")


def in_process(
    environment: Mapping[str, str], *words: str | Path, expect: int | None = 0
) -> subprocess.CompletedProcess[str]:
    """Run ``zerolab`` with these words in this process, with nobody who answers questions.

    Args:
        environment: All variables that it sees.
        words: Behind ``zerolab``.
        expect: Exit code with which it must end; None for any.
    """
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", newline="") for _ in range(2))
    code: Any = 0
    before, arguments, asked = dict(os.environ), sys.argv, sys.stdin
    os.environ.clear()
    os.environ.update(environment)
    sys.argv, sys.stdin = ["zerolab", *map(str, words)], io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as end:
        code = end.code or 0
    finally:
        sys.argv, sys.stdin = arguments, asked
        os.environ.clear()
        os.environ.update(before)
    texts = []
    for stream in (out, err):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode())
    told = f"zerolab {words}: exit code {code}\n{texts[0]}\n{texts[1]}"
    assert expect is None or code == expect, told
    return subprocess.CompletedProcess(["zerolab", *map(str, words)], code, *texts)


class Installation:
    """A data directory, and the processes that work on it.

    Args:
        path: Data directory, made here.
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
        """Bring an installation up, and whatever happens, down again."""
        made = cls(path, slots)
        try:
            made.up()
            yield made
        finally:
            made.destroy()

    # -- processes ---------------------------------------------------------------------------

    def cli(self, *words: str | Path, expect: int | None = 0) -> subprocess.CompletedProcess[str]:
        """Run ``zerolab`` with these words; fail unless it exits with ``expect``."""
        done = subprocess.run(
            [sys.executable, "-m", "zerolab", *map(str, words)],
            capture_output=True,
            text=True,
            env=self.environment(),
            timeout=DEADLINE_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        told = f"zerolab {words}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert expect is None or done.returncode == expect, told
        return done

    def quick(self, *words: str | Path, expect: int | None = 0) -> subprocess.CompletedProcess[str]:
        """Do what :meth:`cli` does, but inside this process: half a second faster."""
        return in_process(self.environment(), *words, expect=expect)

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
            self.cli("down")
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
        pids = until(
            f"rank {rank} of run {run_id} has a process id",
            lambda: self.folder(run_id).rank_pids(),
            lambda pids: rank in pids,
        )
        return pids[rank]

    # -- experiments -------------------------------------------------------------------------

    @property
    def client(self) -> Client:
        """A client of the server that is up."""
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

    def wait_for(self, experiment_id: int, *states: str) -> dict[str, Any]:
        """Wait until an experiment is in one of ``states`` (by default: has ended); return it."""
        wanted = states or ENDED
        return until(
            f"experiment {experiment_id} is {' or '.join(wanted)}",
            lambda: self.client.experiment(experiment_id),
            lambda experiment: experiment["state"] in wanted,
            details=lambda: "\n".join(self.lines(experiment_id)[-30:]),
        )

    def wait_for_run(self, trial_id: int, other_than: int | None = None) -> int:
        """Wait until a trial has a run, a newer one than ``other_than``; return its id."""
        trial = until(
            f"trial {trial_id} has a run other than {other_than}",
            lambda: self.client.trial(trial_id),
            lambda trial: trial["run_id"] not in (None, other_than),
        )
        return int(trial["run_id"])

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
    assert wait_for_end([process], DEADLINE_S)
