"""Command group ``zerolab job``: the queue and its order."""

from typing import TYPE_CHECKING, Annotated

import typer

from zerolab.cli.connection import ExperimentId, id_option
from zerolab.cli.groups import NUMBERS, command_group
from zerolab.cli.output import AsJson, print_json, print_table, result

if TYPE_CHECKING:
    from zerolab.client.http import Json

__all__ = ["group"]

group = command_group("Show and reorder the queue of experiments.", panel="Queue and machines")
changes = command_group("Change the queue settings of an experiment.")
group.add_typer(changes, name="set")


@group.command("list")
def list_jobs(
    pool: Annotated[
        str | None, typer.Option(metavar="NAME", help="List only the experiments of this pool.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List running and waiting experiments, in the order in which they start.

    Shows why an experiment waits.

    Example: zerolab job list
    """
    from zerolab.cli.connection import connect

    with connect() as client:
        jobs = client.jobs(pool)
    if as_json:
        print_json(jobs)
        return
    extra = [key for key in ("owner", "project") if any(job.get(key) for job in jobs)]
    rows = [
        (
            job["experiment_id"],
            job["name"],
            *(job[key] for key in extra),
            job["pool"],
            "-" if job["place"] is None else job["place"],
            job["priority"],
            job["state"],
            _slots(job),
            job["running_trials"],
            job["queued_trials"],
            job["held_slots"],
        )
        for job in jobs
    ]
    columns = ["pool", "place", "priority", "state", "slots", "running", "queued", "in use"]
    print_table(["id", "name", *extra, *columns], rows, shortened={"name", "pool"})
    for job in jobs:
        if job["waiting_reason"]:
            result(f"experiment {job['experiment_id']} waits: {job['waiting_reason']}")
        if job["order_reason"]:
            result(f"experiment {job['experiment_id']} starts later: {job['order_reason']}")
        if job["fewer_reason"]:
            result(f"experiment {job['experiment_id']}: {job['fewer_reason']}")


def _slots(job: "Json") -> str:
    """Return the slots of a trial in the pool, and on the machines of its hostfile."""
    on_hosts = f" + {job['host_slots']} on hosts" if job["host_slots"] else ""
    return f"{job['slots_per_trial']}{on_hosts}"


@group.command()
def move(
    experiment_id: ExperimentId,
    ahead_of: Annotated[
        int | None,
        id_option("experiment", "--ahead-of", text="Move it directly before this experiment."),
    ] = None,
    behind: Annotated[
        int | None,
        id_option("experiment", "--behind", text="Move it directly after this experiment."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Move an experiment before or after another one in the queue.

    It gets the priority of the other one.

    Example: zerolab job move 7 --ahead-of 3
    """
    from zerolab.cli.connection import connect
    from zerolab.errors import ConfigError

    if (ahead_of is None) == (behind is None):
        raise ConfigError("job move", ["give either --ahead-of ID or --behind ID"])
    with connect() as client:
        job = client.move_job(experiment_id, ahead_of=ahead_of, behind=behind)
    if as_json:
        print_json(job)
        return
    place, state = job["place"], job["state"]
    where = f"{state} without a place" if place is None else f"at position {place}"
    result(
        f"experiment {experiment_id} is {where} of pool {job['pool']}, "
        f"with priority {job['priority']}"
    )


@changes.command("priority", context_settings=NUMBERS)
def set_priority(
    experiment_id: ExperimentId,
    priority: Annotated[int, typer.Argument(help="1 to 99; a smaller number starts first.")],
    as_json: AsJson = False,
) -> None:
    """Set the priority of an experiment.

    Runs of a lower priority may be preempted: they save a checkpoint and wait.

    Example: zerolab job set priority 7 10
    """
    policies = {"fair_share", "priority"}
    _set(experiment_id, "priority", priority, heeded_by=policies, as_json=as_json)


@changes.command("weight", context_settings=NUMBERS)
def set_weight(
    experiment_id: ExperimentId,
    weight: Annotated[
        float, typer.Argument(help="Number above 0; twice the weight gets twice the slots.")
    ],
    as_json: AsJson = False,
) -> None:
    """Set the share of an experiment among those of its priority.

    Example: zerolab job set weight 7 2
    """
    _set(experiment_id, "weight", weight, heeded_by={"fair_share"}, as_json=as_json)


def _set(
    experiment_id: int, name: str, value: float, *, heeded_by: set[str], as_json: bool
) -> None:
    """Update a queue setting of an experiment, with a note if the pool's policy ignores it."""
    from zerolab.cli.connection import connect

    with connect() as client:
        job = client.patch_job(experiment_id, **{name: value})
        policies = {pool["name"]: pool["policy"] for pool in client.pools()}
    if as_json:
        print_json(job)
        return
    message = f"experiment {experiment_id} has {name} {job[name]:g}"
    policy = policies.get(job["pool"])
    if policy is not None and policy not in heeded_by:
        message += f", which has no effect: the policy of pool {job['pool']} is {policy}"
    result(message)


@changes.command("max-slots", context_settings=NUMBERS)
def set_max_slots(
    experiment_id: ExperimentId,
    max_slots: Annotated[str, typer.Argument(help="Maximum number of slots, or none.")],
    as_json: AsJson = False,
) -> None:
    """Limit the slots of all trials of an experiment.

    Running trials continue.

    Example: zerolab job set max-slots 7 4
    """
    from zerolab.cli.connection import connect
    from zerolab.errors import ConfigError

    if max_slots != "none" and not (max_slots.isascii() and max_slots.isdecimal()):
        problem = f"max-slots: must be a whole number, or none, got {max_slots!r}"
        raise ConfigError("job set", [problem])
    with connect() as client:
        limit = None if max_slots == "none" else int(max_slots)
        job = client.patch_job(experiment_id, max_slots=limit)
    most = job["max_slots"]
    limit_text = "no limit of slots" if most is None else f"a limit of {most} slot(s)"
    if as_json:
        print_json(job)
    else:
        result(f"experiment {experiment_id} has {limit_text}")
