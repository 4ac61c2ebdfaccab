"""Slurm pools: reject submissions that no node of the pool could run."""

from collections import Counter
from typing import TYPE_CHECKING

import msgspec
from sqlalchemy import Connection, select

from zerolab.contract.messages import SlotInfo
from zerolab.contract.nodes import node_capacity_problem
from zerolab.errors import ConfigError
from zeroserver.store.schema import agents

if TYPE_CHECKING:
    from zerolab.config.experiment.experiment_config import ExperimentConfig

__all__ = ["check_pool_holds"]


def check_pool_holds(connection: Connection, config: "ExperimentConfig") -> None:
    """See that a pool of Slurm could hold a trial, if all its nodes were free.

    A pool without agents, or with one that has slots of its own, says nothing: agents come and go.

    Args:
        connection: To the database.
        config: Of the experiment.

    Raises:
        ConfigError: If it could not.
    """
    from zerolab.config.experiment.resources import fewer_slots  # pydantic

    resources = config.resources
    nodes = _nodes_of(connection, resources.resource_pool)
    if not nodes:
        return
    if resources.hosts:
        problem: str | None = (
            f"resources.hostfile: must be left out in pool {resources.resource_pool}, which is "
            "Slurm's: it names its nodes itself; take slots_per_trial"
        )
    else:
        unit = resources.slots_per_rank
        least = min([resources.slots_per_trial, *fewer_slots(resources)]) // unit
        problems = [node_capacity_problem(least, unit, node) for node in nodes]
        problem = None if None in problems else problems[0]
    if problem is not None:
        raise ConfigError("experiment", [problem])


def _nodes_of(connection: Connection, pool: str) -> list[list[int]]:
    """Slots of each node, for every agent of a pool; none where one has slots of its own."""
    of_pool = (agents.c.alive == 1) & (agents.c.pool == pool)
    nodes = []
    for text in connection.execute(select(agents.c.slots).where(of_pool)).scalars():
        on = [slot.node for slot in msgspec.json.decode(text, type=list[SlotInfo])]
        if not on or None in on:
            return []
        nodes.append(list(Counter(on).values()))
    return nodes
