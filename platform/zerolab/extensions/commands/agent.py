"""Commands of ``zerolab agent`` that list, close and remove agents."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from zerolab.cli.connection import connect
from zerolab.cli.output import AsJson, print_json, print_table, result
from zerolab.errors import NotFoundError

if TYPE_CHECKING:
    from zerolab.client.http import Client

__all__ = ["disable", "drain", "enable", "list_agents", "remove", "row_of"]

WhichAgent = Annotated[str, typer.Argument(help="Name or id of the agent.")]
OfSlots = Annotated[
    list[int] | None, typer.Option("--slot", help="Only this slot; may be repeated.")
]


def list_agents(as_json: AsJson = False) -> None:
    """List the agents with their slots and states."""
    with connect() as client:
        agents = client.agents()
    if as_json:
        print_json(agents)
        return
    columns = ["id", "name", "host", "pool", "state", "slots", "in use", "disabled", "device"]
    print_table(columns, [row_of(agent) for agent in agents])


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
    drain: Annotated[bool, typer.Option("--drain", help="Let what runs there finish.")] = False,
    as_json: AsJson = False,
) -> None:
    """Start no new runs on an agent or some of its slots, and move its runs.

    Its runs save a checkpoint and resume from it on other slots.
    """
    _close(agent, slot, drain=drain, as_json=as_json)


def drain(
    agent: WhichAgent,
    preempt: Annotated[
        bool, typer.Option("--preempt", help="What runs there checkpoints now and goes elsewhere.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Start no new runs on an agent, and let its runs finish."""
    _close(agent, None, drain=not preempt, as_json=as_json)


def enable(agent: WhichAgent, slot: OfSlots = None, as_json: AsJson = False) -> None:
    """Start runs again on an agent, or on some of its slots."""
    with connect() as client:
        resource = client.agent_action(_id_of(client, agent), "enable", slots=slot or None)
    _print_state(resource, as_json=as_json)


def remove(agent: WhichAgent) -> None:
    """Remove an agent that has left; run history is kept."""
    with connect() as client:
        client.delete_agent(_id_of(client, agent))
    result(f"agent {agent} is forgotten")


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
    message = f"agent {agent['name']} is {agent['state']}; {used} of its slots are held"
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
