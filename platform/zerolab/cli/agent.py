"""``zerolab agent`` and ``zerolab job``: slots, and who has them."""

from typing import Annotated

import typer

from zerolab.cli.output import AsJson, print_json, print_table

__all__ = ["group", "jobs"]

group = typer.Typer(help="Machines that offer slots.", no_args_is_help=True, rich_markup_mode=None)


@group.command()
def start(
    slots: Annotated[
        int | None, typer.Option(help="How many slots to offer. Default: all GPUs, else cores.")
    ] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Offer CPU slots although there are GPUs.")] = (
        False
    ),
    name: Annotated[
        str, typer.Option(help="Name of this agent. Default: the name of the machine.")
    ] = "",
    launcher: Annotated[
        str, typer.Option(help="How ranks are started: local, on this machine.")
    ] = "local",
) -> None:
    """Offer this machine's slots to a server, in the foreground, until it is stopped.

    `zerolab up` does it for this machine. On another one, set ZEROLAB_MASTER and ZEROLAB_TOKEN.
    """
    import logging

    from zerolab.agent.agent import Agent
    from zerolab.agent.slots import find_slots
    from zerolab.cli.connection import connect, token_of
    from zerolab.errors import ConfigError
    from zerolab.launcher.registered import LAUNCHERS
    from zerolab.paths import Home

    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.INFO, format=form)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    if launcher not in LAUNCHERS:
        raise ConfigError("launcher", [f"must be one of {', '.join(LAUNCHERS)}, got {launcher!r}"])
    home = Home.default().create()
    offered = find_slots(slots, cpu=cpu)
    with connect(home) as client:
        starts = LAUNCHERS[launcher](home, offered)
        Agent(home, client, token_of(home), offered, starts, name).run()


@group.command("list")
def list_agents(
    as_json: AsJson = False,
) -> None:
    """List the agents and their slots."""
    from zerolab.cli.connection import connect

    with connect() as client:
        agents = client.agents()
    if as_json:
        print_json(agents)
        return
    rows = [
        (
            one["id"],
            one["name"],
            one["host"],
            "yes" if one["alive"] else "no",
            len(one["slots"]),
            sum(1 for slot in one["slots"] if slot["run_id"] is not None),
            one["slots"][0]["device"] if one["slots"] else None,
        )
        for one in agents
    ]
    print_table(["id", "name", "host", "alive", "slots", "in use", "device"], rows)


jobs = typer.Typer(
    help="The queue: experiments that hold slots or wait for them.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@jobs.callback()
def about_jobs() -> None:
    """Keep the group a group, with one command or many."""


@jobs.command("list")
def list_jobs(
    as_json: AsJson = False,
) -> None:
    """List what waits for slots, and why, and what holds them; the first to run first."""
    from zerolab.cli.connection import connect

    with connect() as client:
        found = client.jobs()
    if as_json:
        print_json(found)
        return
    rows = [
        (
            one["experiment_id"],
            one["name"],
            one["state"],
            one["slots_per_trial"],
            one["running_trials"],
            one["queued_trials"],
            one["held_slots"],
            one["waiting_reason"],
        )
        for one in found
    ]
    columns = ["id", "name", "state", "slots", "running", "queued", "held", "why it waits"]
    print_table(columns, rows, shortened={"name"})
