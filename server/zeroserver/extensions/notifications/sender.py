"""Sender of messages: one worker for each channel with due messages, outside of the writer."""

import asyncio
import logging
from functools import partial

from zeroserver.errors import StoreError
from zeroserver.extensions.notifications.delivery import Delivery
from zeroserver.extensions.notifications.overdue import OverdueScan
from zeroserver.extensions.notifications.service import (
    MOST_DELAY_S,
    NotificationService,
    NotificationState,
    due_channels,
    next_due,
    next_notification,
)
from zeroserver.orchestrator.service import DomainEvent, DomainTransaction
from zeroserver.services import Services
from zeroserver.store.rows import ChannelRow

__all__ = ["NotificationSender"]

logger = logging.getLogger(__name__)

_AT_ONCE = 8
"""Maximum number of channels to which messages are sent at the same time."""
_PAUSE_S, _MOST_PAUSE_S = 5.0, 300.0
"""Pause of a channel after a failure, which doubles with each further one, and its maximum."""
_EXPIRY_S = 3600.0
_SCAN_S = 30.0


class NotificationSender:
    """Supervisor that stores messages about events and sends those that are due.

    Args:
        services: Services of the server.
    """

    def __init__(self, services: Services) -> None:
        self.services = services
        self.state = services.part(NotificationState)
        self.state.server_url = lambda: services.url
        self.delivery = services.part(Delivery)
        self._allowed = asyncio.Semaphore(_AT_ONCE)
        self._workers: dict[int, asyncio.Task[None]] = {}
        self._paused_until: dict[int, float] = {}
        self._failures: dict[int, int] = {}
        self._due = 0.0
        self._expire_at = self._scan_at = 0.0
        self._overdue = OverdueScan(services, self.state)
        services.orchestrator.observers.append(self._observe)

    def _observe(self, work: DomainTransaction, event: DomainEvent) -> None:
        NotificationService(work, self.state).observe(event)

    async def tick(self) -> None:
        """Start workers for channels with due messages."""
        if self.services.orchestrator.steady() >= self._expire_at:
            self._expire_at = self.services.orchestrator.steady() + _EXPIRY_S
            await self.services.write(lambda work: NotificationService(work, self.state).expire())
        if self.services.orchestrator.steady() >= self._scan_at:
            self._scan_at = self.services.orchestrator.steady() + _SCAN_S
            await self._overdue.scan()
        now = self.services.orchestrator.clock()
        if not (self.state.changed or now >= self._due):
            return
        self.state.changed = False  # before the outbox is read
        for channel in await self.services.read(partial(due_channels, now=now)):
            running = self._workers.get(channel.id)
            paused = self.services.orchestrator.steady() < self._paused_until.get(channel.id, 0.0)
            if not paused and (running is None or running.done()):
                self._workers[channel.id] = asyncio.create_task(self._send_all(channel))
        due = await self.services.read(next_due)
        # Messages of workers and of paused channels are due already: read again in a second.
        self._due = now + MOST_DELAY_S if due is None else max(due, now + 1.0)

    async def _send_all(self, channel: ChannelRow) -> None:
        """Send the due messages of a channel until one fails."""
        try:
            async with self._allowed:
                while await self._send_next(channel):
                    pass
        except StoreError as error:
            logger.warning("messages of channel %s wait: %s", channel.name, error)
        except Exception:  # other channels are not affected
            logger.exception("messages of channel %s wait", channel.name)
            self._pause(channel.id)

    async def _send_next(self, channel: ChannelRow) -> bool:
        """Send one message; return whether to continue."""
        now = self.services.orchestrator.clock()
        row = await self.services.read(partial(next_notification, channel_id=channel.id, now=now))
        if row is None:
            return False
        message_id = f"{self.services.orchestrator.installation}-{row.id}"
        error = await self.delivery.send(
            self.services.settings, channel, message_id, int(now), row.message.encode()
        )
        await self.services.write(
            lambda work: NotificationService(work, self.state).settle(row.id, error)
        )
        if error is None:
            self._failures.pop(channel.id, None)
            return True
        logger.warning("message %d of channel %s was not sent: %s", row.id, channel.name, error)
        self._pause(channel.id)
        return False

    def _pause(self, channel_id: int) -> None:
        failures = self._failures[channel_id] = self._failures.get(channel_id, 0) + 1
        seconds = min(_PAUSE_S * 2.0 ** min(failures - 1, 32), _MOST_PAUSE_S)
        self._paused_until[channel_id] = self.services.orchestrator.steady() + seconds

    def close(self) -> None:
        """Stop the workers; the next server sends the rest."""
        for worker in self._workers.values():
            worker.cancel()
