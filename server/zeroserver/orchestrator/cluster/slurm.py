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
    """Check that the nodes of a Slurm pool could run a trial if all were free.

    Pools without agents, or with an agent that is not Slurm's, are not checked, since agents may
    join later.

    Args:
        connection: Connection to the database.
        config: Configuration of the experiment.

    Raises:
        ConfigError: If no node of the pool could run a trial.
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
        fewest = min([resources.slots_per_trial, *fewer_slots(resources)]) // unit
        problems = [node_capacity_problem(fewest, unit, node) for node in nodes]
        problem = None if None in problems else problems[0]
    if problem is not None:
        raise ConfigError("experiment", [problem])


def _nodes_of(connection: Connection, pool: str) -> list[list[int]]:
    """Return the slots per node of every agent in a Slurm pool; empty for other pools."""
    of_pool = (agents.c.alive == 1) & (agents.c.pool == pool)
    nodes = []
    for text in connection.execute(select(agents.c.slots).where(of_pool)).scalars():
        node_ids = [slot.node for slot in msgspec.json.decode(text, type=list[SlotInfo])]
        if not node_ids or None in node_ids:
            return []
        nodes.append(list(Counter(node_ids).values()))
    return nodes
