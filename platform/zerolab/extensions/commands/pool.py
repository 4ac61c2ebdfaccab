"""Command groups ``zerolab pool`` and ``zerolab quota``."""

from typing import Annotated, Any

import typer

from zerolab.cli.connection import complete_from
from zerolab.cli.groups import NUMBERS, command_group
from zerolab.cli.output import AsJson, print_json, print_table, result

__all__ = ["pools", "quotas"]

_PANEL = "Queue and machines"
pools = command_group("List resource pools, and set their scheduling policy.", panel=_PANEL)
quotas = command_group(
    "Limit the slots of a pool, a label or a user, and request more.", panel=_PANEL
)

Group = Annotated[
    str,
    typer.Argument(
        help="Group to limit: pool:NAME, label:NAME, user:NAME or project:NAME; "
        "'user:*': default for each user without a quota."
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
    rows = [
        (quota["group"], quota["max_slots"], quota["held_slots"], _note(quota))
        for quota in quota_list
    ]
    print_table(["group", "max slots", "held", ""], rows)


def _note(quota: dict[str, Any]) -> str:
    if quota["is_default"]:
        return "from user:*"
    limit = quota["request_limit"]
    return "" if limit is None else f"users may request up to {limit}"


@quotas.command("set", context_settings=NUMBERS)
def set_quota(
    group: Group,
    max_slots: Annotated[int, typer.Argument(help="Maximum number of slots.", min=0)],
    request_limit: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="With 'user:*': maximum that a user may request."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Limit the slots of all experiments of a pool, label, user or project.

    Running trials continue.

    Example: zerolab quota set label:vision 4
    """
    from zerolab.cli.connection import connect

    kind, name = _parts(group)
    with connect() as client:
        quota = client.put_quota(kind, name, max_slots, request_limit=request_limit)
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


@quotas.command("request")
def request_quota(
    max_slots: Annotated[int, typer.Argument(help="Requested maximum number of slots.", min=1)],
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Reason for the administrator.")],
    as_json: AsJson = False,
) -> None:
    """Request a larger quota for yourself; it replaces your open request.

    Example: zerolab quota request 20 --reason "camera-ready runs until Friday"
    """
    from zerolab.cli.connection import connect

    with connect() as client:
        request = client.request_quota(max_slots, reason)
    if as_json:
        print_json(request)
    else:
        text = f"request {request['id']} for {max_slots} slot(s) waits for an administrator"
        result(f"{text}; `zerolab quota requests` shows the decision")


@quotas.command("requests")
def list_requests(
    state: Annotated[
        str | None,
        typer.Option(
            metavar="STATE",
            help="Only open, approved or declined requests.",
            autocompletion=complete_from("open", "approved", "declined"),
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the newest requests for larger quotas.

    Example: zerolab quota requests --state open
    """
    from zerolab.cli.connection import connect

    with connect() as client:
        requests = client.quota_requests(None if state is None else state.upper())
    if as_json:
        print_json(requests)
        return
    names = ["id", "user", "max_slots", "state", "reason", "decided_by", "answer"]
    heads = ["id", "user", "max slots", "state", "reason", "decided by", "answer"]
    print_table(heads, [[request[name] or "" for name in names] for request in requests])


RequestId = Annotated[int, typer.Argument(metavar="ID", help="Id of the request.")]
Reason = Annotated[str, typer.Option(metavar="TEXT", help="Reason for the user.")]


@quotas.command("approve")
def approve_request(request_id: RequestId, reason: Reason = "", as_json: AsJson = False) -> None:
    """Approve a request: its user has the requested quota from now on. Administrators only.

    Example: zerolab quota approve 3
    """
    _decide(request_id, reason, approve=True, as_json=as_json)


@quotas.command("decline")
def decline_request(request_id: RequestId, reason: Reason = "", as_json: AsJson = False) -> None:
    """Decline a request; the quota stays as it is. Administrators only.

    Example: zerolab quota decline 3 --reason "after the deadline of the other group"
    """
    _decide(request_id, reason, approve=False, as_json=as_json)


def _decide(request_id: int, reason: str, *, approve: bool, as_json: bool) -> None:
    from zerolab.cli.connection import connect

    with connect() as client:
        request = client.decide_quota_request(request_id, approve=approve, reason=reason)
    if as_json:
        print_json(request)
    elif approve:
        result(f"user:{request['user']} has a limit of {request['max_slots']} slot(s)")
    else:
        result(f"request {request_id} of user {request['user']} is declined")


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
