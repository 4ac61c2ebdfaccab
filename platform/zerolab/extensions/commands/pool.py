"""Command groups ``zerolab pool`` and ``zerolab quota``."""

from typing import Annotated

import typer

from zerolab.cli.connection import complete_from
from zerolab.cli.groups import NUMBERS, command_group
from zerolab.cli.output import AsJson, print_json, print_table, result

__all__ = ["pools", "quotas"]

_PANEL = "Queue and machines"
pools = command_group("List resource pools, and set their scheduling policy.", panel=_PANEL)
quotas = command_group("Limit the slots of a pool, a label or a user.", panel=_PANEL)

Group = Annotated[
    str,
    typer.Argument(
        help="The experiments to limit: pool:NAME, label:NAME, user:NAME or project:NAME."
    ),
]


@pools.command("list")
def list_pools(as_json: AsJson = False) -> None:
    """List the pools with their agents, slots and scheduling policies.

    Example: zerolab pool list
    """
    from zerolab.cli.connection import connect

    with connect() as client:
        pool_list = client.pools()
    if as_json:
        print_json(pool_list)
        return
    names = ["name", "policy", "agents", "slots", "free_slots", "jobs", "max_slots"]
    print_table(
        [name.replace("_", " ") for name in names], [[p[n] for n in names] for p in pool_list]
    )


@pools.command("set")
def set_pool(
    name: Annotated[str, typer.Argument(help="Name of the pool.")],
    policy: Annotated[
        str,
        typer.Option(
            metavar="POLICY",
            help="fair_share, priority or fifo.",
            autocompletion=complete_from("fair_share", "priority", "fifo"),
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Set the scheduling policy of a pool.

    Example: zerolab pool set big --policy fifo
    """
    from zerolab.cli.connection import connect
    from zerolab.errors import ConfigError
    from zerolab.scheduler import Policy

    if policy not in {item.value for item in Policy}:
        choices = ", ".join(Policy)
        raise ConfigError("pool", [f"--policy: must be one of {choices}, got {policy!r}"])
    with connect() as client:
        pool = client.put_pool(name, policy)
    if as_json:
        print_json(pool)
        return
    note = "" if pool["agents"] else "; no agent has joined it yet"
    result(f"pool {pool['name']} has the policy {pool['policy']}{note}")


@quotas.command("list")
def list_quotas(as_json: AsJson = False) -> None:
    """List the quotas with the slots in use.

    Example: zerolab quota list
    """
    from zerolab.cli.connection import connect

    with connect() as client:
        quota_list = client.quotas()
    if as_json:
        print_json(quota_list)
        return
    rows = [(quota["group"], quota["max_slots"], quota["held_slots"]) for quota in quota_list]
    print_table(["group", "max slots", "held"], rows)


@quotas.command("set", context_settings=NUMBERS)
def set_quota(
    group: Group,
    max_slots: Annotated[int, typer.Argument(help="Maximum number of slots.", min=0)],
    as_json: AsJson = False,
) -> None:
    """Limit the slots of all experiments of a pool, label, user or project.

    Running trials continue.

    Example: zerolab quota set label:vision 4
    """
    from zerolab.cli.connection import connect

    kind, name = _parts(group)
    with connect() as client:
        quota = client.put_quota(kind, name, max_slots)
    limit, used = quota["max_slots"], quota["held_slots"]
    if as_json:
        print_json(quota)
    else:
        result(f"{quota['group']} has a limit of {limit} slot(s); {used} in use")


@quotas.command("delete")
def delete_quota(group: Group, as_json: AsJson = False) -> None:
    """Delete a quota.

    Example: zerolab quota delete label:vision
    """
    from zerolab.cli.connection import connect

    kind, name = _parts(group)
    with connect() as client:
        client.delete_quota(kind, name)
    if as_json:
        print_json({"group": group, "deleted": True})
    else:
        result(f"{group} has no limit now")


def _parts(group: str) -> tuple[str, str]:
    """Split the name of a quota.

    Raises:
        ConfigError: If it is invalid.
    """
    from zerolab.errors import ConfigError

    kind, colon, name = group.partition(":")
    if kind not in {"pool", "label", "user", "project"} or not colon or not name:
        problem = f"must be pool:NAME, label:NAME, user:NAME or project:NAME, got {group!r}"
        raise ConfigError("quota", [problem])
    return kind, name
