"""Command group ``zerolab task``: commands that run through the queue, in the background."""

import os
from collections.abc import Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zerolab.cli.connection import OfState, complete_from_server
from zerolab.cli.groups import command_group
from zerolab.cli.log_stream import AsJsonLines, Follow, OfLevel, OfRank, Tail
from zerolab.cli.output import (
    AsJson,
    end_state,
    print_done,
    print_fields,
    print_json,
    print_message,
    print_table,
    print_warnings,
    result,
)
from zerolab.contract.names import PORT_LABEL, TASK_LABEL
from zerolab.extensions.interactive.command import IdleTimeout, task_words
from zerolab.formatting import duration_text

if TYPE_CHECKING:
    from zerolab.client.http import Client

__all__ = ["all_slots", "count_slots", "group", "worker_specification"]

group = command_group("Run any command on slots, through the queue.", panel="Train")

ALL_SLOTS = "ALL_WORKERS"
"""Alternative to the JSON of ``--worker``: all slots of the pool."""
VARIABLES = ("DC_DL_CONFIG", "ALL_WORKERS")
"""Variables that are read by default if they contain a JSON object.

Platforms set the second one to a list of hosts, which is ignored."""
_IGNORED = frozenset({"framework", "name"})
"""Keys of such JSON that do not affect slots."""


class Per(StrEnum):
    """Unit for which a task has one process."""

    SLOT = "slot"
    WORKER = "worker"


def _names(client: "Client", _context: typer.Context) -> "Iterable[tuple[object, str]]":
    yield from ((task["name"], task["state"]) for task in _tasks(client, limit=100))


_complete_name = complete_from_server(_names)

TaskName = Annotated[
    str,
    typer.Argument(
        help="Id of the task, or its name. Several tasks may have one name: the newest is used.",
        autocompletion=_complete_name,
    ),
]


@group.command(context_settings={"allow_interspersed_args": False})
def run(
    command: Annotated[list[str], typer.Argument(help="Command that each rank runs, after `--`.")],
    name: Annotated[str, typer.Option(metavar="NAME", help="Name of the task.")],
    slots: Annotated[int | None, typer.Option(min=1, help="Number of slots. Default: 1.")] = None,
    workers: Annotated[
        str,
        typer.Option(
            "--worker",
            metavar="JSON",
            help='Instead of --slots: {"count": 2, "gpus": 1}, or ALL_WORKERS for all slots of the '
            "pool.",
        ),
    ] = "",
    worker_from: Annotated[
        str | None,
        typer.Option(
            "--worker-from",
            help="Environment variable that contains the JSON of --worker. Default: DC_DL_CONFIG "
            "or ALL_WORKERS, if it contains JSON.",
            metavar="VARIABLE",
        ),
    ] = None,
    per: Annotated[
        Per, typer.Option(help="Start one process per slot, or one per worker with all its GPUs.")
    ] = Per.SLOT,
    nodes: Annotated[int, typer.Option(min=1, help="Maximum number of machines.")] = 1,
    pool: Annotated[str, typer.Option(metavar="NAME", help="Resource pool.")] = "default",
    priority: Annotated[
        int, typer.Option(min=1, max=99, help="Priority; a smaller number starts first.")
    ] = 42,
    queue_time: Annotated[
        int | None,
        typer.Option(
            "--queue-time",
            min=1,
            help="Maximum time to wait for slots.",
            metavar="SECONDS",
        ),
    ] = None,
    max_restarts: Annotated[
        int, typer.Option("--max-restarts", min=0, help="Number of restarts after a failure.")
    ] = 0,
    context: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Directory to copy; the command runs in the copy. Default: this directory.",
        ),
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(metavar="LABEL", help="Label of the task. May be repeated."),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65535,
            help="Port of 127.0.0.1 on which the command listens. The server forwards requests "
            "of the task's owner to it; the command gets all slots in one process.",
        ),
    ] = None,
    idle_timeout: IdleTimeout = None,
    as_deepspeed: Annotated[
        bool,
        typer.Option(
            "--as-deepspeed", help="Let `import deepspeed` import Zerolab's engine in the command."
        ),
    ] = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print the logs until the task has ended.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Queue a command, and print the id of the task.

    The task continues after this terminal is closed. Exit code with --follow: 0 if it completed,
    else 1.

    Example: zerolab task run --name train --slots 2 -- python train.py
    """
    from zerolab.cli.connection import connect
    from zerolab.cli.log_stream import LogFilter, print_logs
    from zerolab.client.archive import pack
    from zerolab.errors import ConfigError

    if port is None and idle_timeout is not None:
        raise ConfigError("task", ["--idle-timeout: needs --port"])
    if port is not None and nodes > 1:
        raise ConfigError("task", ["--port: cannot be combined with --nodes"])
    archive = pack(context or Path.cwd())
    workers = worker_specification(slots, workers, worker_from)
    with connect() as client:
        if workers == ALL_SLOTS and slots is None:
            slots, nodes = all_slots(client.agents(), pool)
            workers = ""
        total, slots_per_worker = count_slots(slots, workers)
        resources = {
            "slots_per_trial": total,
            "slots_per_rank": slots_per_worker if per is Per.WORKER else 1,
            "max_nodes": nodes,
            "resource_pool": pool,
            "priority": priority,
            "queue_time": queue_time,
        }
        config: dict[str, Any] = {
            "name": name,
            "labels": list(dict.fromkeys([TASK_LABEL, *(label or ())])),
            "entrypoint": list(command),
            "searcher": {"name": "single"},
            "max_restarts": max_restarts,
            "resources": resources,
        }
        if port is not None:
            words = task_words("port", idle_timeout, f"--port={port}", command=command)
            config |= {"entrypoint": words, "labels": [*config["labels"], PORT_LABEL]}
            resources["slots_per_rank"] = total
        if as_deepspeed:
            config["environment"] = {"deepspeed": "zerolab"}
        experiment = client.create_experiment(config, archive)
        print_warnings(experiment)
        if experiment["waiting_reason"]:
            print_message(f"task {name} is waiting: {experiment['waiting_reason']}")
        if as_json:
            print_json(experiment)
        else:
            result(str(experiment["id"]))
        if port is not None:
            print_message(f"the port is at {client.url}/proxy/{experiment['id']}/")
        if not follow:
            return
        print_logs(
            client, "experiment", experiment["id"], LogFilter(), follow=True, as_json=as_json
        )
        ended = client.experiment(experiment["id"])
    if ended["state"] != "COMPLETED":
        print_message(f"task {name}: {ended['state']}: {ended['error'] or ''}".rstrip(": "))
        raise typer.Exit(1)


def all_slots(agents: Sequence[dict[str, Any]], pool: str) -> tuple[int, int]:
    """Count the usable slots of a pool, and the agents with such slots.

    Args:
        agents: All agents.
        pool: Name of the pool.

    Raises:
        ConfigError: If the pool has no usable slot.
    """
    from zerolab.errors import ConfigError

    ready = [agent for agent in agents if agent["pool"] == pool and agent["state"] == "ready"]
    usable = [
        sum(slot["enabled"] and not slot["down"] for slot in agent["slots"]) for agent in ready
    ]
    counts = [count for count in usable if count]
    if not counts:
        raise ConfigError("task", [f"--worker: no agent of pool {pool} has a slot now"])
    return sum(counts), len(counts)


def worker_specification(slots: int | None, workers: str, variable: str | None) -> str:
    """Return the specification of workers: the option, or an environment variable.

    Args:
        slots: Value of ``--slots``; it overrides a variable that the command does not name.
        workers: Value of ``--worker``.
        variable: Value of ``--worker-from``.

    Raises:
        ConfigError: If two of them are set, or the variable is empty.
    """
    from zerolab.errors import ConfigError

    if variable is None:
        if workers or slots is not None:
            return workers
        texts = (os.environ.get(name, "").strip() for name in VARIABLES)
        return next((text for text in texts if text.startswith("{")), "")
    problems = []
    if workers or slots is not None:
        problems.append("--worker-from: cannot be combined with --worker or --slots")
    if not os.environ.get(variable):
        problems.append(f"--worker-from: the variable {variable} must be set, and not empty")
    if problems:
        raise ConfigError("task", problems)
    return os.environ[variable]


def count_slots(slots: int | None, workers: str) -> tuple[int, int]:
    """Return the slots of a task, and the slots of each worker.

    Args:
        slots: Value of ``--slots``.
        workers: JSON: ``{"count": 2, "gpus": 1}``, or this under the role ``worker``; ``framework``
            and ``name`` are ignored.

    Raises:
        ConfigError: If both are set, or the JSON is invalid.
    """
    import json

    from zerolab.errors import ConfigError

    if not workers:
        return slots or 1, 1
    form = 'must look like {"count": 2, "gpus": 1}'
    try:
        specification: Any = json.loads(workers)
    except ValueError:
        raise ConfigError("task", [f"--worker: {form}, got {workers!r}"]) from None
    problems = []
    if isinstance(specification, dict) and isinstance(specification.get("worker"), dict):
        other_roles = ", ".join(sorted(specification.keys() - {"worker"} - _IGNORED))
        if other_roles:
            reason = "the ranks of a task are all alike, so that worker must be its only role"
            problems.append(f"--worker: {reason}, got {other_roles} too")
        specification = specification["worker"]
    if not isinstance(specification, dict) or specification.keys() - {"count", "gpus"} - _IGNORED:
        problems.append(f"--worker: {form}, got {workers!r}")
        specification = {}
    numbers = [specification.get("count", 1), specification.get("gpus", 1)]
    is_invalid = any(type(number) is not int for number in numbers)
    if is_invalid or numbers[0] < 1 or numbers[1] < 0:
        reason = "count must be at least 1, and gpus at least 0"
        problems.append(f"--worker: {reason}, got {workers!r}")
    if slots is not None:
        problems.append("--worker, --slots: only one of them may be given")
    if problems:
        raise ConfigError("task", problems)
    slots_per_worker = max(1, numbers[1])  # a worker without a GPU has a CPU slot
    return numbers[0] * slots_per_worker, slots_per_worker


@group.command("list")
def list_tasks(
    state: OfState = None,
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="List only tasks whose name contains this text."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum number to list.")] = None,
    as_json: AsJson = False,
) -> None:
    """List tasks, newest first.

    Example: zerolab task list --state ACTIVE --limit 10
    """
    from zerolab.cli.connection import connect

    with connect() as client:
        tasks = _tasks(client, state=state and state.upper(), name=name, limit=limit)
    if as_json:
        print_json(tasks)
        return
    header = ("id", "name", "state", "waits for")
    rows = [
        (task["id"], task["name"], task["state"], task["waiting_reason"] or task["error"] or "")
        for task in tasks
    ]
    print_table(header, rows)


@group.command()
def describe(name: TaskName, as_json: AsJson = False) -> None:
    """Show one task: state, command, slots, times, error.

    Example: zerolab task describe train
    """
    import shlex

    from zerolab.cli.connection import connect

    with connect() as client:
        task = client.experiment(int(_find(client, name)["id"]))
        trials = client.trials(task["id"])
        runs = client.runs(trials[0]["id"]) if trials else []
        has_port = PORT_LABEL in task["labels"]
        ports = client.get("/interactive-tasks")["tasks"] if has_port else []
        link = f"{client.url}/proxy/{task['id']}/" if has_port else None
    port = next((item for item in ports if item["experiment_id"] == task["id"]), None)
    if as_json:
        print_json({**task, "trials": trials, "runs": runs})
        return
    config = task["config"]
    entrypoint, resources = config["entrypoint"], config["resources"]
    command = entrypoint if isinstance(entrypoint, str) else shlex.join(entrypoint)
    last = runs[-1] if runs else {}
    print_fields(
        {
            "task": f"{task['id']}: {task['name']}",
            "state": end_state(task),
            "waits": task["waiting_reason"],
            "command": command,
            "link": link,
            "ends in": _idle_text(port) if port else None,
            "labels": ", ".join(item for item in task["labels"] if item != TASK_LABEL),
            "slots": resources["slots_per_trial"],
            "pool": resources["resource_pool"],
            "agents": ", ".join(last.get("agents", ())),
            "restarts": trials[0]["restarts"] if trials else None,
            "slot time": duration_text(sum(item["slot_seconds"] for item in trials)),
            "exit code": last.get("exit_code"),
            "created": task["created_at"],
            "started": task["started_at"],
            "ended": task["ended_at"],
            "error": task["error"] or (trials[0]["error"] if trials else None),
        }
    )


def _idle_text(port: dict[str, Any]) -> str | None:
    """Return the time until a task ends if it stays idle."""
    limit = port["idle_timeout_s"]
    return None if limit is None else f"{duration_text(limit - port['idle_s'])}, if it stays idle"


@group.command()
def logs(
    name: TaskName,
    follow: Follow = False,
    tail: Tail = None,
    rank: OfRank = None,
    level: OfLevel = None,
    as_json: AsJsonLines = False,
) -> None:
    """Print the logs of a task.

    Example: zerolab task logs train --follow
    """
    from zerolab.cli.connection import connect
    from zerolab.cli.log_stream import LogFilter, print_logs

    with connect() as client:
        task = _find(client, name)
        log_filter = LogFilter(rank=rank, level=level, tail=tail)
        print_logs(client, "experiment", task["id"], log_filter, follow=follow, as_json=as_json)


@group.command()
def stop(
    name: Annotated[
        str,
        typer.Argument(
            help="Id of the task, or the name of a task that has not ended.",
            autocompletion=_complete_name,
        ),
    ],
    kill: Annotated[
        bool, typer.Option("--kill", help="Stop it at once, without time to save.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Stop a task. Its ranks may save a checkpoint first.

    Example: zerolab task stop train
    """
    from zerolab.cli.connection import connect
    from zerolab.cli.log_stream import ENDED

    with connect() as client:
        task = _find(client, name, to_stop=True)
        ended = task["state"] in ENDED
        if not ended:
            task = client.experiment_action(task["id"], "kill" if kill else "cancel")
    end = f"has already ended: {task['state']}" if ended else "is stopping"
    print_done(task, f"task {task['name']} ({task['id']}) {end}", as_json=as_json)


def _tasks(client: "Client", **filters: str | int | None) -> list[dict[str, Any]]:
    experiments = client.experiments(label=TASK_LABEL, **filters)
    return sorted(experiments, key=lambda task: -int(task["id"]))


def _find(client: "Client", name: str, *, to_stop: bool = False) -> dict[str, Any]:
    """Return the task with an id, or else the newest with a name.

    Args:
        client: Client of the server.
        name: Id or name of the task.
        to_stop: Prefer tasks that have not ended.

    Raises:
        ConfigError: If several tasks match.
        NotFoundError: If no task matches.
    """
    from zerolab.cli.log_stream import ENDED
    from zerolab.errors import ConfigError, NotFoundError

    tasks = _tasks(client)
    by_id = [task for task in tasks if str(task["id"]) == name]
    if by_id:  # an id is unique, a name is not
        return by_id[0]
    named = [task for task in tasks if task["name"] == name]
    if to_stop:
        named = [task for task in named if task["state"] not in ENDED] or named[:1]
        if len(named) > 1:
            ids = ", ".join(str(task["id"]) for task in named)
            problem = f"{len(named)} tasks of this name have not ended: give the id of one ({ids})"
            raise ConfigError("task", [f"{name}: {problem}"])
    if named:
        return named[0]
    names = ", ".join(dict.fromkeys(str(task["name"]) for task in tasks)) or "none"
    msg = f"there is no task {name!r}; there are: {names}"
    raise NotFoundError(msg)
