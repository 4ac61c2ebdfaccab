"""Delivery of one message through the transport of its channel."""

from zeroserver.extensions.notifications.addresses import AddressError, resolve, url_problem
from zeroserver.extensions.notifications.apprise_client import AppriseClient
from zeroserver.extensions.notifications.webhook import WebhookClient
from zeroserver.settings import Settings
from zeroserver.store.rows import ChannelRow

__all__ = ["Delivery"]


class Delivery:
    """Transports of channels, made when they are first used."""

    def __init__(self) -> None:
        self._webhooks: WebhookClient | None = None

    async def problem_of(self, settings: Settings, kind: str, url: str) -> str | None:
        """Return why no message can be sent to a URL, without the URL; None if it can.

        Args:
            settings: Settings of the server.
            kind: Kind of the channel.
            url: URL of a new channel.
        """
        if kind == "apprise":
            return await AppriseClient(allow_private=settings.private_webhooks).problem_of(url)
        problem = url_problem(url)
        if problem is None:
            try:
                await resolve(url, allow_private=settings.private_webhooks)
            except AddressError as error:
                problem = str(error)
        return None if problem is None else f"url: {problem}"

    async def send(
        self, settings: Settings, channel: ChannelRow, message_id: str, now: int, body: bytes
    ) -> str | None:
        """Send a message.

        Args:
            settings: Settings of the server.
            channel: Receiver.
            message_id: The same for all attempts to send a message.
            now: Current time in seconds since 1970.
            body: The message as JSON.

        Returns:
            None if it was delivered, else the reason, without the URL of the channel.
        """
        if channel.kind == "apprise":
            client = AppriseClient(allow_private=settings.private_webhooks)
            return await client.send(channel.url, body)
        if self._webhooks is None:
            self._webhooks = WebhookClient(allow_private=settings.private_webhooks)
        return await self._webhooks.send(channel.url, channel.secret, message_id, now, body)
