"""One process that has imported torch, and forks a launcher for every run that asks.

Importing torch takes seconds; a fork takes milliseconds. Only for runs on a CPU: CUDA does not
survive a fork. The agent holds the other end of the channel, a socket of whole messages:

```
agent  -> {"spec_file": path, "environment": {name: value}, "log": path}
server -> {"ready": true}                        once, when torch is imported
server -> {"started": pid, "spec_file": path}
server -> {"ended": pid, "exit_code": n}         -n for signal n
```

When the agent ends, the channel closes and the server ends; its children die with it.
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

from zerolab.contract.spec import TrialClass, read_run_spec
from zerolab.linux import head_a_family
from zerotrial.process.early_sigterm import EarlySignal
from zerotrial.process.preloading import FOR_CLASSES, import_next

__all__ = ["serve"]

logger = logging.getLogger(__name__)

_MESSAGE_BYTES = 1 << 20
_FIRST = "zerotrial.process.elastic"
"""What every launcher needs."""
_IDLE_S = 20.0
"""Without a request, before what the first trial class will need is imported ahead of it."""


def serve(channel_fd: int) -> int:
    """Fork launchers until the channel is closed.

    Args:
        channel_fd: Open file descriptor of a ``SOCK_SEQPACKET`` socket.

    Returns:
        Exit code of the server.
    """
    importlib.import_module(_FIRST)
    waiting = list(FOR_CLASSES)
    ahead = True  # until a program is asked for: such an agent may never see a class
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    with socket.socket(fileno=channel_fd) as channel, selectors.DefaultSelector() as selector:
        selector.register(channel, selectors.EVENT_READ)
        selector.register(wake_read, selectors.EVENT_READ)
        _send(channel, {"ready": True})
        while True:
            begun = len(waiting) < len(FOR_CLASSES)
            pause = None if not waiting or not (ahead or begun) else 0 if begun else _IDLE_S
            ready = {key.fileobj for key, _ in selector.select(pause)}
            if not ready and waiting:
                import_next(waiting)
            if wake_read in ready:
                os.read(wake_read, 4096)
                _reap(channel)
            if channel in ready:
                message = channel.recv(_MESSAGE_BYTES)
                if not message:
                    return 0
                request = json.loads(message)
                is_class = _is_trial_class(Path(request["spec_file"]))
                while waiting and is_class:
                    import_next(waiting)
                ahead = ahead and is_class
                _start(channel, request, (wake_read, wake_write))


def _is_trial_class(spec_file: Path) -> bool:
    try:
        return isinstance(read_run_spec(spec_file).entrypoint, TrialClass)
    except (OSError, ValueError):  # its launcher will say so
        return False


def _start(channel: socket.socket, request: dict[str, Any], wake: tuple[int, int]) -> None:
    server = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # it may come to a child at once
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            early = EarlySignal()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for descriptor in (channel.detach(), *wake):
                os.close(descriptor)
            code = _become_launcher(request, server, early)
        except BaseException:
            logger.exception("the launcher failed")
        finally:
            os._exit(code)  # the server's loop is not ours to go on with
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    _send(channel, {"started": pid, "spec_file": request["spec_file"]})


def _become_launcher(request: dict[str, Any], server: int, early: EarlySignal) -> int:
    from zerotrial.process.elastic import run_launcher

    os.setsid()
    head_a_family(server)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.environ.update(request["environment"])
    return run_launcher(Path(request["spec_file"]), early)


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
