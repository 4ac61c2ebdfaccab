"""Which trials get which slots: pure, from the queue and the free slots alone."""

from zerolab.scheduler.decide import schedule
from zerolab.scheduler.placement import place
from zerolab.scheduler.types import AgentSlots, Allocation, Decision, Request

__all__ = ["AgentSlots", "Allocation", "Decision", "Request", "place", "schedule"]
