"""Which trials get which slots: pure, from the queue and the free slots alone."""

from zerolab.scheduler.backfill import lendable
from zerolab.scheduler.decision import schedule, turn
from zerolab.scheduler.placement import place
from zerolab.scheduler.types import (
    DEFAULT_POOL,
    HOST_SLOT,
    AgentSlots,
    Allocation,
    Cluster,
    Decision,
    Job,
    Policy,
    Request,
    Start,
)

__all__ = [
    "DEFAULT_POOL",
    "HOST_SLOT",
    "AgentSlots",
    "Allocation",
    "Cluster",
    "Decision",
    "Job",
    "Policy",
    "Request",
    "Start",
    "lendable",
    "place",
    "schedule",
    "turn",
]
