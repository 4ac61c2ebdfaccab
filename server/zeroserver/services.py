"""Services of a running server, and the route dependencies that provide them."""

import asyncio
import gc
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, TypeVar, cast

from fastapi import Depends, Request
from sqlalchemy import Connection
from starlette.concurrency import run_in_threadpool

from zerolab.errors import NotFoundError
from zerolab.searcher import Deferred
from zeroserver.access.open_runs import OpenRuns
from zeroserver.access.ownership import Ownership
from zeroserver.access.principal import Principal
from zeroserver.access.request_times import RequestTimes
from zeroserver.access.tokens import TokenStore
from zeroserver.analysis.trial_order import TrialOrders
from zeroserver.errors import StoreError
from zeroserver.event_journal import Hub, Journal
from zeroserver.health import HealthCheck
from zeroserver.orchestrator.checkpoints.checkpoint_service import (
    AT_ONCE,
    due_experiments,
    trials_to_thin,
)
from zeroserver.orchestrator.experiment_service import unapplied_experiments
from zeroserver.orchestrator.ingest.metric_names import unused_names
from zeroserver.orchestrator.log_policies import PolicySearch
from zeroserver.orchestrator.search.operation_service import interrupted_searches
from zeroserver.orchestrator.search.search_service import large_searches, prepare_replay
from zeroserver.orchestrator.state import Orchestrator
from zeroserver.orchestrator.unit_of_work import UnitOfWork
from zeroserver.settings import Settings
from zeroserver.store.database import Change, Database, Transaction
from zeroserver.store.schema import audit
from zeroserver.visibility import HIDDEN

__all__ = ["Services", "ServicesDep", "freeze_startup_objects", "services_of"]

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass
class Services:
    """Services that routes use."""

    settings: Settings
    database: Database
    hub: Hub
    journal: Journal
    orchestrator: Orchestrator
    keys: TokenStore
    url: str = ""
    """URL for agents on this machine; empty until the server listens."""
    started_at: float = 0.0
    ticks: int = 0
    """Completed ticks of the periodic work."""
    loop: asyncio.AbstractEventLoop | None = field(default=None, repr=False)
    policies: PolicySearch = field(init=False, repr=False)
    open_runs: OpenRuns = field(default_factory=OpenRuns, repr=False)
    request_times: RequestTimes = field(default_factory=RequestTimes, repr=False)
    orders: TrialOrders = field(default_factory=TrialOrders, repr=False)
    _parts: dict[type, object] = field(default_factory=dict, repr=False)
    _applying: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)
    """Lock for applying retention policies."""
    _computing: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)
    """Lock for computing deferred operations."""
    _computation: "asyncio.Task[None] | None" = field(default=None, repr=False)
    health: HealthCheck = field(init=False, repr=False)
    ownership: Ownership = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.policies = PolicySearch(self.database)
        self.ownership = Ownership(self.orchestrator.users, self.orchestrator.projects, self.read)
        self.health = HealthCheck(self.database, self.orchestrator.home.path)

    def part(self, kind: type[T]) -> T:
        """Return an extension's object, which lives as long as the server.

        Args:
            kind: Its class; instantiated without arguments on first use.
        """
        if kind not in self._parts:
            self._parts[kind] = kind()
        return cast("T", self._parts[kind])

    def publish(self, changes: list[Change]) -> None:
        """Publish committed changes; called on the event loop's thread."""
        self.open_runs.note(changes)
        self.journal.publish(changes)

    def wake_agents(self) -> None:
        """End the long polls of agents after a token was renewed; thread-safe."""
        if self.loop is not None:
            self.loop.call_soon_threadsafe(self.hub.ring, "agents")

    async def read(self, query: Callable[[Connection], T]) -> T:
        """Run a database query without blocking the event loop."""
        return await run_in_threadpool(self._read_now, query)

    async def _read_at_start(self, query: Callable[[Connection], T]) -> T:
        """Run a database query without anyio, whose import takes 7 ms."""
        return await asyncio.to_thread(self._read_now, query)

    def _read_now(self, query: Callable[[Connection], T]) -> T:
        with self.database.read() as connection:
            return query(connection)

    async def write(self, job: Callable[[UnitOfWork], T]) -> T:
        """Run a job of the orchestrator and wait for its commit."""
        hidden = HIDDEN.get()

        def run(transaction: Transaction) -> T:
            work = UnitOfWork(self.orchestrator, transaction)
            work.hidden = hidden
            return job(work)

        result = await self.database.write(run)
        if not self._computing.locked() and self.orchestrator.searches.has_deferred:
            self._computation = asyncio.create_task(
                self._compute_deferred(), context=Context()
            )  # not in the context of this request, which may hide projects
        return result

    async def _compute_deferred(self) -> None:
        """Compute the deferred operations of searchers in another thread, one at a time."""
        if self._computing.locked():
            return
        async with self._computing:
            try:
                while item := await self.write(lambda work: work.operations.next_deferred()):
                    await self._execute_deferred(*item)
            except StoreError as error:  # the next change starts another computation
                logger.warning("cannot execute the operations of a searcher: %s", error)

    async def _execute_deferred(self, experiment_id: int, deferred: Deferred) -> None:
        try:
            await asyncio.to_thread(lambda: deferred.operations)
        except Exception as error:  # of a searcher of any package
            logger.exception("the searcher of experiment %d failed", experiment_id)
            problem = f"its searcher failed: {type(error).__name__}: {error}"
            await self.write(lambda work: work.experiments.fail(experiment_id, problem))
            await self.write(lambda work: work.operations.drop_backlog(experiment_id))
            return
        await self.write(lambda work: work.periodic.execute_deferred(experiment_id, deferred))

    async def record_change(self, principal: Principal, action: str) -> None:
        """Add a change to the audit log; a failure is logged, since the change is made."""
        row = {
            "time": self.orchestrator.clock(),
            "user_id": principal.user_id,
            "token_id": principal.token_id,
            "action": action,
        }
        try:
            await self.write(lambda work: work.connection.execute(audit.insert().values(row)))
        except StoreError as error:
            logger.warning(
                "cannot write to the audit log: %s by user %d: %s", action, row["user_id"], error
            )

    async def stop_computing(self) -> None:
        """Cancel the computation of deferred operations; the next server computes them."""
        if self._computation is not None:
            self._computation.cancel()
            with suppress(asyncio.CancelledError):
                await self._computation

    async def load_searcher(self, experiment_id: int) -> None:
        """Load a search into memory; the replay runs outside of the writer thread.

        Raises:
            NotFoundError: If there is no such experiment.
        """
        if experiment_id not in self.orchestrator.searches.searchers:
            await self.prepare_replay(experiment_id)
            await self.write(lambda work: work.searches.load(experiment_id))

    async def prepare_replay(self, experiment_id: int) -> None:
        """Replay a search outside of the writer thread, for a later transaction."""
        await self.read(
            lambda connection: prepare_replay(self.orchestrator, connection, experiment_id)
        )

    async def load_large_searches(self) -> None:
        """Load the searchers of large running searches."""
        for experiment_id in await self._read_at_start(large_searches):
            try:
                await self.load_searcher(experiment_id)
            except Exception:  # other experiments are not affected
                logger.exception("the searcher of experiment %d cannot be loaded", experiment_id)

    async def resume(self) -> None:
        """Resume policies, states and search operations that a killed server did not finish."""
        due = await self._read_at_start(due_experiments)
        self.orchestrator.deletions.retention_due.update(due)
        unapplied = await self._read_at_start(unapplied_experiments)
        self.orchestrator.queue.unapplied.update(unapplied)
        for experiment_id in await self._read_at_start(interrupted_searches):
            await self._resume_search(experiment_id)

    async def _resume_search(self, experiment_id: int) -> None:
        await self.prepare_replay(experiment_id)
        await self.write(lambda work: work.operations.resume_backlog(experiment_id))

    async def execute_operations(self) -> None:
        """Execute all backlogged searcher operations, in several transactions."""
        remaining = True
        while remaining and self.orchestrator.searches.backlog:
            remaining = await self.write(lambda work: work.periodic.execute_operations())

    async def apply_states(self) -> None:
        """Apply the states of experiments to their trials, in several transactions."""
        while self.orchestrator.queue.unapplied:
            await self.write(lambda work: work.periodic.apply_states())

    async def apply_policies(self) -> None:
        """Apply the due retention policies, in several transactions."""
        for experiment_id in sorted(self.orchestrator.deletions.retention_due):
            try:
                await self.apply_policy(experiment_id)
            except NotFoundError:  # deleted concurrently
                self.orchestrator.deletions.retention_due.discard(experiment_id)

    async def apply_policy(self, experiment_id: int) -> list[str]:
        """Apply the retention policy of an experiment, in several transactions.

        Returns:
            The uuids of the deleted checkpoints.

        Raises:
            NotFoundError: If there is no such experiment.
        """
        deleted: list[str] = []
        async with self._applying:
            await self.write(
                lambda work: work.orchestrator.deletions.retention_due.discard(experiment_id)
            )
            try:
                parts = await self.read(partial(trials_to_thin, experiment_id=experiment_id))
                for trial_ids in parts:

                    def job(work: UnitOfWork, trial_ids: Sequence[int] = trial_ids) -> list[str]:
                        return work.checkpoints.thin_out(experiment_id, trial_ids)

                    while some := await self.write(job):
                        deleted += some
                        if len(some) < AT_ONCE:
                            break
                await self.write(lambda work: work.checkpoints.settle_due(experiment_id))
            except BaseException:
                self.orchestrator.deletions.retention_due.add(
                    experiment_id
                )  # the next tick continues
                raise
        return deleted

    async def remove_orphans(self) -> None:
        """Remove the points and logs of deleted trials, in several transactions."""
        while self.orchestrator.deletions.orphans:
            await self.write(lambda work: work.orphans.remove_some())
            self.database.deleted = True
        await run_in_threadpool(self.database.empty_wal)

    async def purge_names(self) -> None:
        """Delete metric names without points."""
        self.orchestrator.metrics.purge_due = False
        await self.write(lambda work: work.orchestrator.metrics.admitted.clear())
        unused = await self.read(unused_names)
        await self.write(lambda work: work.metric_names.forget_unused(unused))


def freeze_startup_objects() -> None:
    """Exclude the objects of a started server from garbage collection.

    Each collection of all of them would delay requests by 50 ms. Later objects are collected as
    usual:
    collection is enabled if it was disabled during startup.
    """
    gc.freeze()
    gc.enable()


def services_of(request: Request) -> Services:
    """Return the services of the application that serves ``request``."""
    services: Services = request.app.state.services
    return services


async def _services(request: Request) -> Services:  # a plain function would run in a thread
    return services_of(request)


ServicesDep = Annotated[Services, Depends(_services)]
"""Dependency: the services of the application."""
