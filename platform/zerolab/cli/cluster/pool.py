"""``zerolab pool`` and ``zerolab quota``: how agents are shared, and within which bounds."""

from typing import Annotated

import typer

from zerolab.cli.cluster import NUMBERS
from zerolab.cli.output import AsJson, print_json, print_table, result

__all__ = ["pools", "quotas"]

pools = typer.Typer(
    help="Resource pools: agents that are scheduled together.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
quotas = typer.Typer(
    help="Quotas: most slots that some experiments hold together.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Group = Annotated[str, typer.Argument(help="pool:NAME or label:NAME.")]


@pools.command("list")
def list_pools(as_json: AsJson = False) -> None:
    """List the pools, their agents and slots, and in which order their jobs start."""
    from zerolab.cli.connection import connect

    with connect() as client:
        found = client.pools()
    if as_json:
        print_json(found)
        return
    names = ["name", "policy", "agents", "slots", "free_slots", "jobs", "max_slots"]
    print_table([name.replace("_", " ") for name in names], [[p[n] for n in names] for p in found])


@pools.command("set")
def set_pool(
    name: Annotated[str, typer.Argument(help="Name of the pool.")],
    policy: Annotated[str, typer.Option(help="fair_share, priority or fifo.")],
) -> None:
    """Say in which order the jobs of a pool start.

    Example: zerolab pool set big --policy fifo
    """
    from zerolab.cli.connection import connect
    from zerolab.errors import ConfigError
    from zerolab.scheduler import Policy

    if policy not in {each.value for each in Policy}:
        known = ", ".join(Policy)
        raise ConfigError("pool", [f"--policy: must be one of {known}, got {policy!r}"])
    with connect() as client:
        pool = client.put_pool(name, policy)
    told = "" if pool["agents"] else "; no agent has joined it yet"
    result(f"pool {pool['name']} has the policy {pool['policy']}{told}")


@quotas.command("list")
def list_quotas(as_json: AsJson = False) -> None:
    """List the quotas, and what is held of each."""
    from zerolab.cli.connection import connect

    with connect() as client:
        found = client.quotas()
    if as_json:
        print_json(found)
        return
    rows = [(one["group"], one["max_slots"], one["held_slots"]) for one in found]
    print_table(["group", "max slots", "held"], rows)


@quotas.command("set", context_settings=NUMBERS)
def set_quota(
    group: Group,
    max_slots: Annotated[int, typer.Argument(help="Most slots at a time.", min=0)],
) -> None:
    """Limit the slots that the experiments of a pool, or with a label, hold together.

    What runs goes on. Example: zerolab quota set label:vision 4
    """
    from zerolab.cli.connection import connect

    kind, name = _parts(group)
    with connect() as client:
        quota = client.put_quota(kind, name, max_slots)
    most, held = quota["max_slots"], quota["held_slots"]
    result(f"{quota['group']} may hold {most} slot(s), and holds {held}")


@quotas.command("remove")
def remove_quota(group: Group) -> None:
    """Take a limit away."""
    from zerolab.cli.connection import connect

    kind, name = _parts(group)
    with connect() as client:
        client.delete_quota(kind, name)
    result(f"{group} has no limit")


def _parts(group: str) -> tuple[str, str]:
    """Take the name of a quota apart.

    Raises:
        ConfigError: If it is none.
    """
    from zerolab.errors import ConfigError

    kind, colon, name = group.partition(":")
    if kind not in {"pool", "label"} or not colon or not name:
        problem = f"must be pool:NAME or label:NAME, got {group!r}"
        if kind == "user" and name:
            problem += (
                f"; there are no users: give their experiments a label and limit label:{name}"
            )
        raise ConfigError("quota", [problem])
    return kind, name
