"""Commands of interactive tasks: notebooks, shells, TensorBoard, and ``zerolab task open``."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zerolab.cli.connection import ExperimentId, id_argument
from zerolab.cli.groups import command_group
from zerolab.cli.output import AsJson, print_json, print_message, result
from zerolab.contract.names import PORT_LABEL, TASK_LABEL

if TYPE_CHECKING:
    from zerolab.client.http import Client

__all__ = ["IdleTimeout", "notebooks", "open_task", "shells", "task_words", "tensorboard"]

notebooks = command_group("Start JupyterLab on slots, through the queue.", panel="Train")
shells = command_group("Log in to slots with ssh, through the queue.", panel="Train")

_POLL_S = 0.5


def _duration(text: str) -> float | None:
    from zerolab.extensions.commands.user import parse_duration

    return parse_duration(text, "task", "--idle-timeout")


_duration.__name__ = "str"  # shown in --help

IdleTimeout = Annotated[
    Any,
    typer.Option(
        "--idle-timeout",
        parser=_duration,
        metavar="TIME",
        help="End the task after this idle time, such as 30m or 8h.",
    ),
]
Slots = Annotated[int, typer.Option(min=1, help="Number of slots.")]
Name = Annotated[str, typer.Option(metavar="NAME", help="Name of the task.")]
Pool = Annotated[str, typer.Option(metavar="NAME", help="Resource pool.")]
Priority = Annotated[
    int, typer.Option(min=1, max=99, help="Priority; a smaller number starts first.")
]
TaskId = Annotated[int, id_argument("experiment", "Id of the task.")]


def task_words(
    kind: str, idle_timeout: float | None, *options: str, command: Sequence[str] = ()
) -> list[str]:
    """Return the entrypoint of an interactive task.

    Args:
        kind: ``notebook``, ``tensorboard``, ``shell`` or ``port``.
        idle_timeout: Idle time in seconds after which it ends; None for no limit.
        options: Further options of its process.
        command: Command of the user, for ``port``.
    """
    words = ["python", "-m", "zerolab.extensions.interactive.task_process", kind, *options]
    if idle_timeout is not None:
        words.append(f"--idle-timeout={idle_timeout:g}")
    return [*words, "--", *command] if command else words


def _start(
    client: "Client",
    kind: str,
    words: Sequence[str],
    files: dict[str, bytes],
    *,
    name: str,
    slots: int,
    pool: str,
    priority: int,
) -> "dict[str, Any]":
    """Queue a task with one process that has all slots; return its experiment."""
    import tempfile
    from pathlib import Path

    from zerolab.client.archive import pack

    config = {
        "name": name,
        "labels": [TASK_LABEL, PORT_LABEL, kind],
        "entrypoint": list(words),
        "searcher": {"name": "single"},
        "max_restarts": 0,
        "resources": {
            "slots_per_trial": slots,
            "slots_per_rank": slots,
            "resource_pool": pool,
            "priority": priority,
        },
    }
    with tempfile.TemporaryDirectory(prefix="zerolab-") as folder:
        for file, content in files.items():
            Path(folder, file).write_bytes(content)
        experiment: dict[str, Any] = client.create_experiment(config, pack(Path(folder)))
    if experiment["waiting_reason"]:
        print_message(f"task {experiment['id']} is waiting: {experiment['waiting_reason']}")
    return experiment


def _print_link(client: "Client", experiment: "dict[str, Any]", *, as_json: bool) -> None:
    link = f"{client.url}/proxy/{experiment['id']}/"
    if as_json:
        print_json({**experiment, "link": link})
        return
    print_message(
        f"task {experiment['id']} is queued; `zerolab task open {experiment['id']}` opens it "
        "without a sign-in"
    )
    result(link)


@notebooks.command("start")
def start_notebook(
    slots: Slots = 1,
    name: Name = "notebook",
    idle_timeout: IdleTimeout = "30m",
    directory: Annotated[
        str,
        typer.Option(
            metavar="DIR",
            help="Directory of the agent's machine that it shows. Default: the home directory "
            "there.",
        ),
    ] = "",
    pool: Pool = "default",
    priority: Priority = 42,
    as_json: AsJson = False,
) -> None:
    """Queue a JupyterLab server, and print its link.

    Example: zerolab notebook start --slots 1 --idle-timeout 2h
    """
    from zerolab.cli.connection import connect

    options = [f"--directory={directory}"] if directory else []
    words = task_words("notebook", idle_timeout, *options)
    files = {"README": b"The notebooks of this task are in the directory that it shows.\n"}
    with connect() as client:
        experiment = _start(
            client, "notebook", words, files, name=name, slots=slots, pool=pool, priority=priority
        )
        _print_link(client, experiment, as_json=as_json)


def tensorboard(
    experiments: Annotated[
        list[int], typer.Argument(min=1, metavar="EXPERIMENT...", help="Ids of the experiments.")
    ],
    name: Name = "tensorboard",
    idle_timeout: IdleTimeout = "30m",
    pool: Pool = "default",
    priority: Priority = 42,
    as_json: AsJson = False,
) -> None:
    """Queue a TensorBoard server with the metrics of experiments, and print its link.

    It shows the metrics reported before its start. Start another one for newer metrics.

    Example: zerolab tensorboard 3 4
    """
    from zerolab.cli.connection import connect

    words = task_words("tensorboard", idle_timeout)
    with connect() as client:
        files = {
            f"experiment-{number}.ndjson": b"".join(client.export_metrics(number))
            for number in dict.fromkeys(experiments)
        }
        experiment = _start(
            client, "tensorboard", words, files, name=name, slots=1, pool=pool, priority=priority
        )
        _print_link(client, experiment, as_json=as_json)


def open_task(
    task: TaskId,
    browser: Annotated[bool, typer.Option(help="Open a browser, or only print the link.")] = True,
    as_json: AsJson = False,
) -> None:
    """Open a notebook, TensorBoard or the port of a task in a browser without signing in.

    Prints the link as well. The link works once, within one minute.

    Example: zerolab task open 7
    """
    from zerolab.cli.connection import connect

    with connect() as client:
        link = str(client.post(f"/interactive-tasks/{task}/link")["url"])
    if as_json:
        print_json({"link": link})
    else:
        result(link)
    if browser:
        import webbrowser

        webbrowser.open(link)


notebooks.command("open")(open_task)


@shells.command("start")
def start_shell(
    slots: Slots = 1,
    name: Name = "shell",
    idle_timeout: IdleTimeout = "30m",
    pool: Pool = "default",
    priority: Priority = 42,
    as_json: AsJson = False,
) -> None:
    """Queue a shell for ssh, and print the id of the task.

    Log in with `zerolab shell open ID`, or with ssh and VS Code through `zerolab shell config`.

    Example: zerolab shell start --slots 2
    """
    from zerolab.cli.connection import connect
    from zerolab.extensions.interactive.ssh import public_key
    from zerolab.paths import Home

    files = {"authorized_keys": public_key(Home.default()).encode()}
    words = task_words("shell", idle_timeout)
    with connect() as client:
        experiment = _start(
            client, "shell", words, files, name=name, slots=slots, pool=pool, priority=priority
        )
    if as_json:
        print_json(experiment)
        return
    print_message(f"log in with `zerolab shell open {experiment['id']}`")
    result(str(experiment["id"]))


@shells.command("config")
def config(task: Annotated[int | None, typer.Argument(help="Id of the task.")] = None) -> None:
    """Print the lines of ssh_config for your running shells, or for one of them.

    Example: zerolab shell config > ~/.ssh/zerolab_config
    """
    from zerolab.cli.connection import connect
    from zerolab.extensions.interactive.ssh import config_block
    from zerolab.paths import Home

    with connect() as client:
        shells_there = [_wait_for_shell(client, task)] if task is not None else _shells(client)
        if not shells_there:
            print_message("no shell is running; start one with `zerolab shell start`")
        for shell in shells_there:
            result(config_block(Home.default(), shell, client.url))


@shells.command("open", context_settings={"allow_interspersed_args": False})
def open_shell(
    task: ExperimentId,
    command: Annotated[
        list[str] | None, typer.Argument(help="Command instead of a login shell.")
    ] = None,
) -> None:
    """Log in to a shell with ssh; wait for it to start first.

    Example: zerolab shell open 7 nvidia-smi
    """
    import subprocess
    import tempfile

    from zerolab.cli.connection import connect
    from zerolab.extensions.interactive.ssh import config_block, host_of
    from zerolab.paths import Home

    with connect() as client:
        block = config_block(Home.default(), _wait_for_shell(client, task), client.url)
    with tempfile.NamedTemporaryFile("w", prefix="zerolab-ssh-", suffix=".config") as file:
        file.write(block)
        file.flush()
        words = ["ssh", "-F", file.name, host_of(task), *(command or ())]
        raise typer.Exit(subprocess.run(words, check=False).returncode)


@shells.command("connect")
def connect_shell(task: TaskId) -> None:
    """Connect standard input and output to a shell: the ProxyCommand of ssh.

    Example: zerolab shell connect 7
    """
    from zerolab.cli.connection import connect as connect_server
    from zerolab.client.locate import find_server
    from zerolab.extensions.interactive import ssh
    from zerolab.paths import Home

    with connect_server() as client:
        for shell in _shells(client):
            if shell["experiment_id"] == task:  # it may have restarted with another key
                ssh.remember_host(Home.default(), shell)
    url, token = find_server()
    ssh.connect(url, token, task)


def _shells(client: "Client") -> "list[dict[str, Any]]":
    tasks: list[dict[str, Any]] = client.get("/interactive-tasks")["tasks"]
    return [task for task in tasks if task["kind"] == "shell"]


def _wait_for_shell(client: "Client", task: int) -> "dict[str, Any]":
    """Return a shell after it has started.

    Raises:
        NotFoundError: If there is no such shell, or it has ended.
        ForbiddenError: If it belongs to another user.
    """
    import time

    from zerolab.cli.log_stream import ENDED
    from zerolab.errors import ForbiddenError, NotFoundError

    reason, caller = None, client.whoami()
    while True:
        for shell in _shells(client):
            if shell["experiment_id"] == task and shell["ready"]:
                return shell
        experiment = client.experiment(task)
        if "shell" not in experiment["labels"]:
            msg = f"experiment {task} is not a shell; `zerolab task list` lists the tasks"
            raise NotFoundError(msg)
        if caller["role"] != "admin" and experiment["owner"] != caller["user"]:
            msg = f"shell {task} belongs to {experiment['owner']}"
            raise ForbiddenError(msg)
        if experiment["state"] in ENDED:
            msg = f"shell {task} has ended: {experiment['state']}"
            raise NotFoundError(msg)
        if experiment["waiting_reason"] != reason:
            reason = experiment["waiting_reason"]
            print_message(f"shell {task} is waiting: {reason or 'it starts'}")
        time.sleep(_POLL_S)
