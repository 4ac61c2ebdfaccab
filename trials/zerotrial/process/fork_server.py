"""Process that has imported torch and forks a launcher for each run.

Importing torch takes seconds, a fork milliseconds. It serves only runs on a CPU, since CUDA does
not survive a fork. The agent has the other end of the channel, a message socket:

```
agent  -> {"spec_file": path, "environment": {name: value}, "log": path}
server -> {"ready": true}                        once, with torch imported if it is preloaded
server -> {"started": pid, "spec_file": path}
server -> {"ended": pid, "exit_code": n}         -n for signal n
```

When the agent exits, the channel closes and the server exits. Its children die with it.
"""

import importlib
import json
import logging
import os
import selectors
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from zerolab.contract.spec import ENV_PRELOAD, TrialClass, read_run_spec
from zerolab.linux import own_process_tree
from zerotrial.process.launcher import (
    TRIAL_CLASS_MODULES,
    DeferredSigterm,
    import_next,
    run_launcher,
)

__all__ = ["serve"]

logger = logging.getLogger(__name__)

_MESSAGE_BYTES = 1 << 20
_PRELOAD_AFTER_S = 20.0
"""Seconds without a request after which the modules of trial classes are preloaded."""


def serve(channel_fd: int) -> int:
    """Fork launchers until the channel is closed.

    Args:
        channel_fd: Open file descriptor of a ``SOCK_SEQPACKET`` socket.

    Returns:
        Exit code of the server.
    """
    preload_when_idle = os.environ.get(ENV_PRELOAD, "1") != "0"
    if preload_when_idle:
        importlib.import_module("torch")
    # A forked launcher shares the imported modules, which saves seconds and memory for each rank.
    # They are imported here and not by a thread: a fork copies only the calling thread, so a lock
    # that another one holds (the import lock, malloc's) would stay locked in the child forever.
    pending = list(TRIAL_CLASS_MODULES)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    with socket.socket(fileno=channel_fd) as channel, selectors.DefaultSelector() as selector:
        selector.register(channel, selectors.EVENT_READ)
        selector.register(wake_read, selectors.EVENT_READ)
        _send(channel, {"ready": True})
        while True:
            preloading = len(pending) < len(TRIAL_CLASS_MODULES)
            if pending and preloading:
                timeout_s: float | None = 0.0  # one module at a time, between two requests
            elif pending and preload_when_idle:
                timeout_s = _PRELOAD_AFTER_S
            else:
                timeout_s = None
            ready = {key.fileobj for key, _ in selector.select(timeout_s)}
            if not ready and pending:
                import_next(pending)
            if wake_read in ready:
                os.read(wake_read, 4096)
                _reap(channel)
            if channel in ready:
                message = channel.recv(_MESSAGE_BYTES)
                if not message:
                    return 0
                request = json.loads(message)
                is_class = _is_trial_class(Path(request["spec_file"]))
                while pending and is_class:
                    import_next(pending)
                # An agent whose runs are commands may never run a trial class.
                preload_when_idle = preload_when_idle and is_class
                _start(channel, request, (wake_read, wake_write))


def _is_trial_class(spec_file: Path) -> bool:
    try:
        return isinstance(read_run_spec(spec_file).entrypoint, TrialClass)
    except (OSError, ValueError):  # its launcher reports the error
        return False


def _start(channel: socket.socket, request: dict[str, Any], wake: tuple[int, int]) -> None:
    server = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # the child installs a handler first
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            sigterm = DeferredSigterm()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for descriptor in (channel.detach(), *wake):
                os.close(descriptor)
            code = _become_launcher(request, server, sigterm)
        except BaseException:
            logger.exception("the launcher failed")
        finally:
            os._exit(code)  # never return into the server's loop
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    _send(channel, {"started": pid, "spec_file": request["spec_file"]})


def _become_launcher(request: dict[str, Any], server: int, sigterm: DeferredSigterm) -> int:
    os.setsid()
    own_process_tree(server)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.environ.update(request["environment"])
    return run_launcher(Path(request["spec_file"]), sigterm)


def _reap(channel: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        _send(channel, {"ended": pid, "exit_code": os.waitstatus_to_exitcode(status)})


def _send(channel: socket.socket, message: dict[str, Any]) -> None:
    channel.send(json.dumps(message).encode())
