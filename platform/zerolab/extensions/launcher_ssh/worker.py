"""Worker of one machine, started by a coordinator.

It exchanges messages with the coordinator over standard input and output
(:mod:`zerolab.extensions.launcher_ssh.messages`). If the coordinator ends, or sends no heartbeat
for too long, the worker kills everything that it started, and ends. It is started by
``python -m zerolab.extensions.launcher_ssh.worker``.
"""

import contextlib
import os
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import FrameType

import msgspec

from zerolab import __version__
from zerolab.client.archive import unpack
from zerolab.contract.outcome import Outcome, read_outcome, signal_text, tail
from zerolab.contract.run_folder import RunFolder
from zerolab.contract.spec import EXIT_INFRASTRUCTURE, EXIT_USER_ERROR, RunSpec, write_run_spec
from zerolab.errors import ConfigError
from zerolab.extensions.launcher_ssh.messages import (
    BEAT_S,
    SUSPENDED_S,
    Beat,
    Ended,
    FromWorker,
    Hello,
    Job,
    SpoolPiece,
    Stop,
    decode_from_coordinator,
    encode,
)
from zerolab.extensions.launcher_ssh.tailing import OutputTails
from zerolab.launcher.devices import find_gpus
from zerolab.launcher.interface import LauncherProcess
from zerolab.launcher.process import start_launcher
from zerolab.linux import free_port, kill_descendants, kill_tree, own_process_tree, usable_cores

__all__ = ["main"]

_POLL_S = 0.05
_PIECE_BYTES = 1 << 18
_HELLO_S = 60.0
"""Maximum wait for the job after the hello, in seconds."""


class _Channel:
    """Connection of a worker to its coordinator."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._input = os.dup(0)
        self._output = os.dup(1)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(2, 1)  # other output must not go to the coordinator
        self._rest = b""
        self._unheeded: list[Job | Stop | Beat] = []
        self.heard = time.monotonic()
        """Time of the coordinator's last heartbeat."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._input, selectors.EVENT_READ)

    def send(self, message: FromWorker) -> None:
        """Send a message to the coordinator.

        Raises:
            ConnectionError: If the coordinator is lost.
        """
        content = memoryview(encode(message))
        with self._lock:
            try:
                while content:
                    content = content[os.write(self._output, content) :]
            except OSError as error:
                raise ConnectionError from error

    def receive(self, wait_s: float) -> list[Job | Stop | Beat]:
        """Return new messages of the coordinator.

        Raises:
            ConnectionError: If the coordinator is lost.
        """
        if self._unheeded:
            messages, self._unheeded = self._unheeded, []
            return messages
        if not self._selector.select(wait_s):
            return []
        content = os.read(self._input, 1 << 20)
        if not content:
            raise ConnectionError
        self.heard = time.monotonic()
        *lines, self._rest = (self._rest + content).split(b"\n")
        return [decode_from_coordinator(line) for line in lines]

    def put_back(self, messages: list[Job | Stop | Beat]) -> None:
        """Put messages back into the queue."""
        self._unheeded = [*messages, *self._unheeded]


def main() -> int:
    """Run the ranks of this machine."""
    own_process_tree(os.getppid())
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        # Only the coordinator decides about the end. Handlers, not SIG_IGN: child processes
        # inherit ignored signals, and would miss a SIGTERM before they install a handler.
        signal.signal(number, _ignore_signal)
    channel = _Channel()
    hello = Hello(
        socket.gethostname(), __version__, free_port(), os.environ.get("SSH_CONNECTION", "")
    )
    try:
        channel.send(hello)
        job = _job(channel)
        outcome = _Worker(channel, job).run()
        channel.send(Ended(outcome))
    except ConnectionError:
        kill_descendants()
        return EXIT_INFRASTRUCTURE
    return 0


def _ignore_signal(_number: int, _frame: FrameType | None) -> None:
    """Ignore a signal."""


def _job(channel: _Channel) -> Job:
    deadline = time.monotonic() + _HELLO_S
    while time.monotonic() < deadline:
        messages = channel.receive(_POLL_S)
        for i, message in enumerate(messages):
            if isinstance(message, Job):
                channel.put_back(messages[i + 1 :])  # perhaps a stop follows
                return message
    raise ConnectionError


class _Worker:
    def __init__(self, channel: _Channel, job: Job) -> None:
        self._channel = channel
        self._job = job
        self._kill_at: float | None = None

    def run(self) -> Outcome:
        """Run the ranks to their end.

        Raises:
            ConnectionError: If the coordinator is lost.
        """
        threading.Thread(target=self._watch_coordinator, daemon=True).start()
        directory = self._job.run.model_dir
        if not self._job.archive and not Path(directory).is_dir():
            missing = f"the directory {directory} is not on this machine"
            return Outcome(EXIT_USER_ERROR, f"{missing}; every node must see the same one")
        folder = RunFolder(Path(tempfile.mkdtemp(prefix="zerolab-launch-")) / "run")
        try:
            return self._prepare(folder) or self._run(folder)
        finally:
            kill_descendants()
            shutil.rmtree(folder.path.parent, ignore_errors=True)

    def _prepare(self, folder: RunFolder) -> Outcome | None:
        """Create the run's directory; return the outcome if that fails."""
        try:
            folder.create()
            if self._job.archive:
                unpack(self._job.archive, folder.model)
            write_run_spec(_spec(self._job, folder), folder.spec)
        except ConfigError as error:
            return Outcome(EXIT_USER_ERROR, f"the model directory cannot be unpacked: {error}")
        except OSError as error:
            return Outcome(EXIT_INFRASTRUCTURE, f"the run's directory cannot be written: {error}")
        return None

    def _run(self, folder: RunFolder) -> Outcome:
        process = start_launcher(folder, _environment(self._job))
        tails = OutputTails(folder.logs)
        beat_at = 0.0
        code = process.poll()
        while code is None:
            for message in self._channel.receive(_POLL_S):
                if isinstance(message, Stop):
                    self._stop(process, message.grace_s)
            for piece in tails.read():
                self._channel.send(piece)
            if time.monotonic() >= beat_at:
                self._channel.send(Beat())
                beat_at = time.monotonic() + BEAT_S
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                kill_tree(process.pid)
            code = process.poll()
        for piece in tails.read_rest():
            self._channel.send(piece)
            self._channel.receive(0.0)  # much output must not delay the coordinator's messages
        self._send_spool(folder.path / "spool")
        outcome = read_outcome(folder.path)
        return outcome or self._without_outcome(code, folder)

    def _send_spool(self, spool: Path) -> None:
        """Send undelivered reports to the coordinator; the run's directory will be deleted."""
        for path in sorted(spool.iterdir() if spool.is_dir() else ()):
            with path.open("rb") as file:
                while content := file.read(_PIECE_BYTES):
                    self._channel.send(SpoolPiece(path.name, content))

    def _stop(self, process: LauncherProcess, grace_s: float) -> None:
        """Stop the ranks; on a second call kill them."""
        if self._kill_at is not None:
            self._kill_at = min(self._kill_at, time.monotonic() + grace_s)
            return
        self._kill_at = time.monotonic() + grace_s
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGTERM)

    def _without_outcome(self, code: int, folder: RunFolder) -> Outcome:
        if self._kill_at is not None:
            return Outcome(code or 1, "the ranks were stopped", was_stopped=True)
        if code < 0:
            return Outcome(code, f"the launcher was killed by {signal_text(-code)}")
        last = tail(folder.launcher_log, 1).strip()
        return Outcome(code or 1, f"the launcher ended with code {code}: {last}")

    def _watch_coordinator(self) -> None:
        """End everything if the coordinator sends no heartbeat; a write to it may block."""
        looked = time.monotonic()
        while time.monotonic() - self._channel.heard <= self._job.silence_s:
            time.sleep(BEAT_S / 2)
            now = time.monotonic()
            if now - looked > SUSPENDED_S:
                self._channel.heard = now
            looked = now
        kill_descendants()
        os._exit(EXIT_INFRASTRUCTURE)


def _environment(job: Job) -> dict[str, str]:
    """Return the variables of the ranks: from the coordinator, and for their slots."""
    # A command without an experiment may know devices of another kind by these numbers.
    has_devices = not job.archive or bool(find_gpus())
    slots = ",".join(map(str, job.slots)) if has_devices else ""
    threads = str(max(1, usable_cores() // len(job.slots)))
    variables = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    variables["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", threads)
    return variables | job.environment | {"CUDA_VISIBLE_DEVICES": slots}


def _spec(job: Job, folder: RunFolder) -> RunSpec:
    slots = sum(job.nodes.slots) if job.nodes is not None else len(job.slots)
    return msgspec.structs.replace(
        job.run,
        slots=slots,
        nodes=job.nodes,
        hosts=(),
        run_dir=str(folder.path),
        model_dir=str(folder.model) if job.archive else job.run.model_dir,
        checkpoint_cache=str(folder.path / "cache") if job.archive else "",
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except msgspec.DecodeError as error:
        sys.exit(f"zerolab: the head speaks another language: {error}")
