"""The parts of a running server, and how routes get at them."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, TypeVar

from fastapi import Depends, Request
from sqlalchemy import Connection
from starlette.concurrency import run_in_threadpool

from zeroserver.access.keys import Keys
from zeroserver.live import Hub, Journal
from zeroserver.orchestrator.desk import World
from zeroserver.settings import Settings
from zeroserver.store.database import Database, Transaction

__all__ = ["ReadDep", "Services", "ServicesDep", "services_of"]

T = TypeVar("T")


@dataclass
class Services:
    """Everything that routes use."""

    settings: Settings
    database: Database
    hub: Hub
    journal: Journal
    world: World
    keys: Keys
    url: str = ""
    """Address at which agents on this machine reach the server; known once it listens."""
    started_at: float = 0.0
    loop: asyncio.AbstractEventLoop | None = field(default=None, repr=False)

    async def read(self, question: Callable[[Connection], T]) -> T:
        """Answer a question to the database without blocking the event loop."""
        return await run_in_threadpool(self._read_now, question)

    def _read_now(self, question: Callable[[Connection], T]) -> T:
        with self.database.read() as connection:
            return question(connection)

    async def write(self, job: Callable[[World, Transaction], T]) -> T:
        """Run a job of the orchestrator and wait for its commit."""
        return await self.database.write(lambda transaction: job(self.world, transaction))

    def write_now(self, job: Callable[[World, Transaction], T]) -> T:
        """As :meth:`write`, on a thread that may block."""
        return self.database.write_now(lambda transaction: job(self.world, transaction))


def services_of(request: Request) -> Services:
    """Return the services of the application that serves ``request``."""
    services: Services = request.app.state.services
    return services


ServicesDep = Annotated[Services, Depends(services_of)]


def _connection(services: ServicesDep) -> Iterator[Connection]:
    with services.database.read() as connection:
        yield connection


ReadDep = Annotated[Connection, Depends(_connection)]
