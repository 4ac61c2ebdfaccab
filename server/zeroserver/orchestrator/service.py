"""Base class of the domain services."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it creates the services
    from zeroserver.orchestrator.unit_of_work import UnitOfWork

__all__ = ["Service"]


class Service:
    """Part of the domain within one unit of work, such as ``work.trials``."""

    def __init__(self, work: "UnitOfWork") -> None:
        self.work = work
