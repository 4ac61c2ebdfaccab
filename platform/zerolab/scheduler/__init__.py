"""Scheduler: pure functions from the queue and the free slots to allocations."""

from zerolab.scheduler.decision import queue_key, queue_order, schedule
from zerolab.scheduler.placement import backfill_limit, place
from zerolab.scheduler.types import (
    DEFAULT_POOL,
    HOST_SLOT,
    Account,
    AgentSlots,
    Allocation,
    Cluster,
    Decision,
    Job,
    Policy,
    Request,
    Start,
)
from zerolab.scheduler.usage import RecentUsage, held_by_account

__all__ = [
    "DEFAULT_POOL",
    "HOST_SLOT",
    "Account",
    "AgentSlots",
    "Allocation",
    "Cluster",
    "Decision",
    "Job",
    "Policy",
    "RecentUsage",
    "Request",
    "Start",
    "backfill_limit",
    "held_by_account",
    "place",
    "queue_key",
    "queue_order",
    "schedule",
]
