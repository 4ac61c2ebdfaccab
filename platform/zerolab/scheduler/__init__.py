"""Scheduler: pure functions from the queue and the free slots to allocations."""

from zerolab.scheduler.decision import queue_key, schedule
from zerolab.scheduler.placement import backfill_limit, place
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
    "backfill_limit",
    "place",
    "queue_key",
    "schedule",
]
