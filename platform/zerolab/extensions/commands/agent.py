"""Commands of ``zerolab agent`` that list, disable and delete agents."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from zerolab.cli.connection import complete_from_server, connect
from zerolab.cli.output import AsJson, print_json, print_table, result
from zerolab.errors import NotFoundError
from zerolab.formatting import size_text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zerolab.client.http import Client

__all__ = ["delete", "disable", "drain", "enable", "list_agents", "row_of"]


def _names(client: "Client", _context: typer.Context) -> "Iterable[tuple[object, str]]":
    yield from ((agent["name"], agent["state"]) for agent in client.agents())


WhichAgent = Annotated[
    str,
    typer.Argument(help="Name or id of the agent.", autocompletion=complete_from_server(_names)),
]
OfSlots = Annotated[
    list[int] | None,
    typer.Option("--slot", metavar="N", help="Change only this slot. May be repeated."),
]


def list_agents(
    slots: Annotated[
        bool, typer.Option("--slots", help="List each slot with its run and its load.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the agents with their slots, states and loads.

    Example: zerolab agent list --slots
    """
    with connect() as client:
        agents = client.agents()
    if as_json:
        print_json(agents)
        return
    if slots:
        rows = [_slot_row(agent, slot) for agent in agents for slot in agent["slots"]]
        head = ["agent", "slot", "device", "experiment", "trial", "cpu", "memory", "gpu"]
        owned = any(slot["owner"] for agent in agents for slot in agent["slots"])
        columns = [*head, "gpu memory", *(["owner"] if owned else [])]
        print_table(columns, [row[: len(columns)] for row in rows])
        return
    columns = ["id", "name", "host", "pool", "state", "slots", "in use", "disabled", "device"]
    print_table([*columns, "cpu", "memory"], [(*row_of(agent), *_load(agent)) for agent in agents])


def _load(agent: dict[str, Any]) -> tuple[str | None, str | None]:
    """Return the CPU and memory in use on the machine of an agent."""
    load = agent["load"]
    if load is None:
        return None, None
    return f"{load['cpu_percent']:.0f} %", _size(load["memory_bytes"], load["memory_total_bytes"])


def _slot_row(agent: dict[str, Any], slot: dict[str, Any]) -> tuple[Any, ...]:
    """Return a slot's row of the list; the last value is the owner of its experiment."""
    load = slot["load"] or {}
    use = slot["experiment"] and f"{slot['experiment_id']}: {slot['experiment']}"
    if slot["run_id"] is None:
        use = "disabled" if not slot["enabled"] else "no node" if slot["down"] else "free"
    percents = {key: load.get(f"{key}_percent") for key in ("cpu", "gpu")}
    cpu, gpu = (None if value is None else f"{value:.0f} %" for value in percents.values())
    memory = load.get("gpu_memory_bytes")
    return (
        agent["name"],
        slot["id"],
        slot["device"],
        use or f"run {slot['run_id']}",
        slot["trial_id"],
        cpu,
        _size(load.get("memory_bytes")),
        gpu,
        _size(memory, load.get("gpu_memory_total_bytes")),
        slot["owner"],
    )


def _size(used: int | None, total: int | None = None) -> str | None:
    if used is None:
        return None
    return size_text(used) + ("" if total is None else f" of {size_text(total)}")


def row_of(agent: dict[str, Any]) -> tuple[Any, ...]:
    """Return an agent's row of the list."""
    slots = agent["slots"]
    down = sum(slot["down"] for slot in slots)
    return (
        agent["id"],
        agent["name"],
        agent["host"],
        agent["pool"],
        agent["state"],
        f"{len(slots)} ({down} without a node)" if down else len(slots),
        sum(1 for slot in slots if slot["run_id"] is not None),
        ", ".join(str(slot["id"]) for slot in slots if not slot["enabled"]),
        slots[0]["device"] if slots else None,
    )


def disable(
    agent: WhichAgent,
    slot: OfSlots = None,
    drain: Annotated[bool, typer.Option("--drain", help="Let its runs finish.")] = False,
    as_json: AsJson = False,
) -> None:
    """Stop using an agent or some of its slots, and move its runs.

    The runs save a checkpoint and resume on other slots.

    Example: zerolab agent disable gpu-box --slot 0
    """
    _close(agent, slot, drain=drain, as_json=as_json)


def drain(
    agent: WhichAgent,
    preempt: Annotated[
        bool, typer.Option("--preempt", help="Move its runs now, as `zerolab agent disable` does.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Start no new runs on an agent; its runs finish.

    Example: zerolab agent drain gpu-box
    """
    _close(agent, None, drain=not preempt, as_json=as_json)


def enable(agent: WhichAgent, slot: OfSlots = None, as_json: AsJson = False) -> None:
    """Use an agent, or some of its slots, again.

    Example: zerolab agent enable gpu-box
    """
    with connect() as client:
        resource = client.agent_action(_id_of(client, agent), "enable", slots=slot or None)
    _print_state(resource, as_json=as_json)


def delete(agent: WhichAgent, as_json: AsJson = False) -> None:
    """Delete an agent that has disconnected.

    The history of its runs is kept.

    Example: zerolab agent delete gpu-box
    """
    with connect() as client:
        agent_id = _id_of(client, agent)
        client.delete_agent(agent_id)
    if as_json:
        print_json({"id": agent_id, "deleted": True})
    else:
        result(f"agent {agent} is deleted")


def _close(agent: str, slots: list[int] | None, *, drain: bool, as_json: bool) -> None:
    with connect() as client:
        agent_id = _id_of(client, agent)
        resource = client.agent_action(agent_id, "disable", slots=slots or None, drain=drain)
    _print_state(resource, as_json=as_json)


def _print_state(agent: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(agent)
        return
    off = [str(slot["id"]) for slot in agent["slots"] if not slot["enabled"]]
    used = sum(slot["run_id"] is not None for slot in agent["slots"])
    message = f"agent {agent['name']} is {agent['state']}; {used} of its slots are in use"
    result(message + (f"; disabled: {', '.join(off)}" if off and agent["enabled"] else ""))


def _id_of(client: "Client", agent: str) -> int:
    """Find an agent by its name, or by its id.

    Raises:
        NotFoundError: If there is no such agent.
    """
    agents = client.agents()
    for key in ("name", "id"):
        for candidate in agents:
            if str(candidate[key]) == agent:
                return int(candidate["id"])
    names = ", ".join(candidate["name"] for candidate in agents) or "none"
    msg = f"there is no agent {agent!r}; there are: {names}"
    raise NotFoundError(msg)
