"""Delivery to webhooks: signed requests, as the Standard Webhooks specification describes them.

https://www.standardwebhooks.com; receivers can use its libraries to verify the signatures.
"""

import asyncio
import base64
import hashlib
import hmac
import ssl
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from zeroserver.extensions.notifications.addresses import AddressError, resolve

if TYPE_CHECKING:  # imported for the first message
    import httpx

__all__ = ["WebhookClient", "signature"]

_TIMEOUT_S = 15.0
"""Timeout of a delivery: resolving, connecting, sending and the headers of the response."""


def signature(secret: str, message_id: str, timestamp: int, body: bytes) -> str:
    """Return the value of the header ``webhook-signature``.

    Args:
        secret: Secret of the channel, with its prefix ``whsec_``.
        message_id: Value of ``webhook-id``.
        timestamp: Value of ``webhook-timestamp``, in seconds since 1970.
        body: Body of the request.
    """
    key = base64.b64decode(secret.removeprefix("whsec_"))
    signed = f"{message_id}.{timestamp}.".encode() + body
    return "v1," + base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()


class WebhookClient:
    """HTTP client that connects only to permitted addresses and follows no redirects.

    Args:
        allow_private: Whether private networks and this machine are permitted.
    """

    def __init__(self, *, allow_private: bool) -> None:
        self.allow_private = allow_private
        self._client: httpx.AsyncClient | None = None

    async def send(
        self, url: str, secret: str, message_id: str, timestamp: int, body: bytes
    ) -> str | None:
        """Send a message.

        Args:
            url: URL of the webhook.
            secret: Secret that signs the message.
            message_id: The same for all attempts to send a message.
            timestamp: Current time in seconds since 1970.
            body: JSON.

        Returns:
            None if the receiver has accepted it, else the reason, without the URL.
        """
        headers = {
            "Content-Type": "application/json",
            "User-Agent": "Zerolab",
            "webhook-id": message_id,
            "webhook-timestamp": str(timestamp),
            "webhook-signature": signature(secret, message_id, timestamp, body),
        }
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                return await self._post(url, headers, body)
        except TimeoutError:
            return f"no response within {_TIMEOUT_S:g} s"
        except AddressError as error:
            return f"url: {error}"

    async def _post(self, url: str, headers: dict[str, str], body: bytes) -> str | None:
        if self._client is None:
            self._client = await asyncio.to_thread(_make_client)
        import httpx

        address = await resolve(url, allow_private=self.allow_private)
        parts = urlsplit(url)
        host = f"[{address}]" if ":" in address else address
        target = parts._replace(netloc=f"{host}:{parts.port}" if parts.port else host, fragment="")
        request = self._client.build_request(
            "POST",
            target.geturl(),
            headers={**headers, "Host": parts.netloc},
            content=body,
            extensions={"sni_hostname": parts.hostname},
        )
        try:
            response = await self._client.send(request, stream=True)
            await response.aclose()  # the body is of no interest, and may be endless
        except httpx.HTTPError as error:
            return _reason(error)
        if response.is_success:
            return None
        if response.is_redirect:
            return f"HTTP {response.status_code}: redirects are not followed; use the final URL"
        return f"HTTP {response.status_code}"

    async def close(self) -> None:
        """Close the client."""
        if self._client is not None:
            await self._client.aclose()


def _make_client() -> "httpx.AsyncClient":
    """Return a client; importing it and loading certificates takes 0.1 s."""
    import certifi
    import httpx

    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    # No proxies of the environment, and no connection that is used for another host with the
    # same address.
    return httpx.AsyncClient(
        verify=context,
        trust_env=False,
        follow_redirects=False,
        timeout=_TIMEOUT_S,
        limits=httpx.Limits(max_keepalive_connections=0),
    )


def _reason(error: Exception) -> str:
    """Describe a failed connection without the URL, which may be in the text of the error."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"its certificate is invalid: {cause.verify_message}"
        if isinstance(cause, ConnectionRefusedError):
            return "connection refused"
        cause = cause.__cause__ or cause.__context__
    return f"connection failed ({type(error).__name__})"
