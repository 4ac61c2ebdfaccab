"""Command ``zerolab doctor``: checks of this machine and this installation."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from zerolab.cli.groups import in_panel
from zerolab.cli.output import AsJson, ColoredText, print_json, print_message, print_table

if TYPE_CHECKING:
    from zerolab.client.http import Client
    from zerolab.paths import Home

__all__ = ["doctor"]

_GIB = 1 << 30
_LITTLE_DISK = 5 * _GIB
_NO_DISK = _GIB // 2
_LITTLE_SHARED_MEMORY = 256 << 20
_TORCH_S = 120.0
"""Timeout of importing torch, in seconds; from a network file system it takes a minute."""

_TORCH_PROGRAM = """
import json, torch
import torch.distributed as dist
cuda = torch.cuda.is_available()
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else []
backends = [name for name in ("gloo", "nccl") if getattr(dist, f"is_{name}_available")()]
print(json.dumps([torch.__version__, torch.version.cuda, names, backends]))
"""
_OPTIONAL = ("transformers", "accelerate", "peft", "deepspeed", "s3fs", "psycopg")


@dataclass(frozen=True)
class Check:
    """One result."""

    name: str
    state: Literal["ok", "warning", "problem"]
    detail: str
    remedy: str = ""


@in_panel("Server")
def doctor(as_json: AsJson = False) -> None:
    """Check Python, torch, GPUs, disk, ports and the server.

    Changes nothing. Exit code 1 if there is a problem.

    Example: zerolab doctor
    """
    from zerolab.paths import Home

    home = Home.default()
    checks: list[Check] = []
    for check in (_python, _packages, _torch_and_gpus, _data_directory, _memory, _server):
        checks += _run_check(check, home)
    failed = [check for check in checks if check.state == "problem"]
    if as_json:
        print_json({"checks": [asdict(check) for check in checks], "ok": not failed})
    else:
        tones = {"ok": "green", "warning": "yellow", "problem": "red"}
        rows = [
            (ColoredText(check.state, tones[check.state]), check.name, check.detail)
            for check in checks
        ]
        print_table(("state", "check", "result"), rows)
        for result in checks:
            if result.remedy:
                print_message(f"{result.name}: {result.remedy}")
        if all(check.state == "ok" for check in checks):
            print_message("no problem found")
    if failed:
        raise typer.Exit(1)


def _run_check(check: Callable[["Home"], Iterator[Check]], home: "Home") -> list[Check]:
    """Run a check; an error in it becomes a result."""
    name = check.__name__.strip("_").replace("_", " ")
    results: list[Check] = []
    try:
        results.extend(check(home))
    except Exception as error:  # noqa: BLE001 - the command exists to report what is broken
        results.append(Check(name, "problem", f"{type(error).__name__}: {error}"))
    return results


def _python(_home: "Home") -> Iterator[Check]:
    version = ".".join(map(str, sys.version_info[:3]))
    environment = "" if sys.prefix == sys.base_prefix else ", a virtual environment"
    yield Check("python", "ok", f"{version}, {sys.executable}{environment}")


def _packages(_home: "Home") -> Iterator[Check]:
    from importlib.metadata import PackageNotFoundError, version
    from importlib.util import find_spec

    from zerolab import __version__

    missing = [name for name in ("zerotrial", "zeroserver") if find_spec(name) is None]
    if missing:
        text = f"{__version__}, without {', '.join(missing)}"
        yield Check("zerolab", "problem", text, f"{sys.executable} -m pip install zerolab again")
    else:
        yield Check("zerolab", "ok", f"{__version__}, {Path(__file__).parents[2]}")
    versions, not_installed = [], []
    for name in _OPTIONAL:
        try:
            versions.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            not_installed.append(name)
    if not_installed:
        versions.append(f"not installed: {', '.join(not_installed)}")
    yield Check("optional packages", "ok", ", ".join(versions))


def _torch_and_gpus(_home: "Home") -> Iterator[Check]:
    import json

    from zerolab.launcher.devices import find_gpus
    from zerolab.linux import usable_cores

    command = [sys.executable, "-P", "-c", _TORCH_PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TORCH_S, check=False)
    gpus = [slot.device for slot in find_gpus()]
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if done.returncode:
        error = (done.stderr.strip().splitlines() or ["no message"])[-1]
        yield Check("torch", "problem", error, f"{sys.executable} -m pip install torch")
    else:
        release, cuda, names, backends = json.loads(done.stdout.splitlines()[-1])
        built = f"CUDA {cuda}" if cuda else "CPU only"
        yield Check("torch", "ok", f"{release}, {built}, backends: {', '.join(backends)}")
        if len(names) < len(gpus):
            remedy = "install a torch that is built for CUDA and fits the driver"
            text = f"the driver has {len(gpus)} GPU(s), torch finds {len(names)}"
            yield Check("GPUs and torch", "problem", text, remedy)
    gpu_text = ", ".join(gpus) or "none; CPU slots are used"
    limited = f" (CUDA_VISIBLE_DEVICES={hidden})" if hidden is not None else ""
    yield Check("GPUs", "ok", f"{gpu_text}{limited}")
    yield Check("CPU cores", "ok", f"{usable_cores()} usable of {os.cpu_count()}")


def _data_directory(home: "Home") -> Iterator[Check]:
    import shutil
    import tempfile

    from zerolab.contract.spec import ENV_HOME
    from zerolab.formatting import size_text

    existing = next(path for path in (home.path, *home.path.parents) if path.is_dir())
    if not os.access(existing, os.W_OK):
        remedy = f"set {ENV_HOME} to a directory of yours"
        yield Check("data directory", "problem", f"{home.path} cannot be written", remedy)
    else:
        note = "" if home.path.is_dir() else ", not created yet"
        yield Check("data directory", "ok", f"{home.path}{note}")
    for name, folder in (("disk", existing), ("temporary directory", Path(tempfile.gettempdir()))):
        free = shutil.disk_usage(folder).free
        state: Literal["ok", "warning", "problem"] = "ok"
        if free < _LITTLE_DISK:
            state = "problem" if free < _NO_DISK else "warning"
        remedy = "" if state == "ok" else "free space: checkpoints and logs need it"
        yield Check(name, state, f"{size_text(free)} free in {folder}", remedy)


def _memory(_home: "Home") -> Iterator[Check]:
    import shutil

    import psutil

    from zerolab.formatting import size_text

    memory = psutil.virtual_memory()
    text = f"{size_text(memory.available)} available of {size_text(memory.total)}"
    yield Check("memory", "ok", text)
    shared = Path("/dev/shm")  # noqa: S108 - only read
    if shared.is_dir():
        size = shutil.disk_usage(shared).total
        little = size < _LITTLE_SHARED_MEMORY
        remedy = "start the container with --shm-size=1g or more" if little else ""
        text = f"{size_text(size)} in {shared}"
        yield Check("shared memory", "warning" if little else "ok", text, remedy)


def _server(home: "Home") -> Iterator[Check]:
    from zerolab.cli.connection import connect
    from zerolab.cli.local.background import agent_of, running_process, server_of
    from zerolab.errors import ForbiddenError, UnreachableError, ZerolabError
    from zerolab.paths import server_url

    url, process = server_url(home), running_process(server_of(home))
    if url is None:
        yield Check("server", "ok", "not started; `zerolab up` or `zerolab run` starts one")
        yield from _ports(None)
        return
    yield from _ports(url)
    try:
        with connect(home, timeout_s=10.0) as client:
            yield from _check_response(client, url)
    except UnreachableError as error:
        lives = f"process {process.pid} lives" if process else "its process has ended"
        remedy = f"see {home.logs / 'server.log'}, then `zerolab up`"
        yield Check("server", "problem", f"{url} does not answer ({lives}): {error}", remedy)
    except ForbiddenError as error:
        remedy = "set ZEROLAB_TOKEN to the token of that server (`zerolab token` there prints it)"
        yield Check("server", "problem", f"{url} refuses the token: {error}", remedy)
    except ZerolabError as error:
        yield Check("server", "problem", f"{url}: {error}")
    agent = running_process(agent_of(home))
    status = f"process {agent.pid}" if agent else "none on this machine; `zerolab up` starts one"
    yield Check("agent of this machine", "ok", status)


def _check_response(client: "Client", url: str) -> Iterator[Check]:
    from zerolab import __version__

    info, agents = client.info(), client.agents()
    same = info["version"] == __version__
    remedy = "" if same else f"this command is {__version__}: install the same version"
    text = f"{url}, version {info['version']}, {info['database']}"
    yield Check("server", "ok" if same else "warning", text, remedy)
    alive = [agent["name"] for agent in agents if agent["alive"]]
    lost = [agent["name"] for agent in agents if not agent["alive"]]
    cluster = info["cluster"]
    slots = f"{cluster['slots']} slot(s), {cluster['free_slots']} free"
    lost_text = f"; without contact: {', '.join(lost)}" if lost else ""
    state: Literal["ok", "warning"] = "warning" if lost or not alive else "ok"
    remedy = "start an agent there (`zerolab agent start`), or `zerolab agent delete NAME`"
    text = f"{', '.join(alive) or 'none'}, {slots}{lost_text}"
    yield Check("agents", state, text, remedy if state == "warning" else "")


def _ports(url: str | None) -> Iterator[Check]:
    """Check whether the server's default port is free, or used by the running server."""
    import socket

    if url is not None and url.rstrip("/").endswith(":8080"):
        yield Check("port 8080", "ok", "used by the server")
        return
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", 8080))
            text = "free"
        except OSError:
            text = "used by another program; `zerolab up` takes any free port"
    yield Check("port 8080", "ok", text)
