"""Delivery through apprise (the extra ``notify``), in a process for each message."""

import asyncio
import contextlib
import importlib.util
import json
import os
import sys
from typing import Any

import msgspec

from zeroserver.extensions.notifications.messages import Message

__all__ = ["AppriseClient"]

_TIMEOUT_S = 60.0
"""Timeout of a delivery, with the start of the process and several requests of a service."""
_MODULE = "zeroserver.extensions.notifications.apprise_process"
_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "SSL_CERT_FILE", "SSL_CERT_DIR")
"""Variables that the process gets: no passwords, and no proxy that would hide addresses."""
_TYPES = {"finished": "success", "improved": "success", "failed": "failure", "nan": "failure"}
_TYPES |= {"trial_failed": "failure", "restarts": "warning", "stalled": "warning"}


class AppriseClient:
    """Sender of messages to the services that apprise supports.

    Args:
        allow_private: Whether private networks and this machine are permitted.
    """

    def __init__(self, *, allow_private: bool) -> None:
        self.allow_private = allow_private

    async def problem_of(self, url: str) -> str | None:
        """Return why a URL cannot be used, without the URL; None if it can.

        Args:
            url: URL of apprise.
        """
        return await self._run(url, None)

    async def send(self, url: str, body: bytes) -> str | None:
        """Send a message.

        Args:
            url: URL of apprise.
            body: The message as JSON.

        Returns:
            None if the service has accepted it, else the reason, without the URL.
        """
        return await self._run(url, msgspec.json.decode(body, type=Message))

    async def _run(self, url: str, message: Message | None) -> str | None:
        if importlib.util.find_spec("apprise") is None:
            return "url: must have an installed service; run pip install 'zerolab[notify]' first"
        request: dict[str, Any] = {"url": url, "allow_private": self.allow_private, "title": None}
        if message is not None:
            request["title"] = message.title
            request["body"] = f"{message.text}\n{message.url}".strip()
            request["type"] = _TYPES.get(message.event, "info")
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", _MODULE,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL, env=environment,
        )  # fmt: skip
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                output, _ = await process.communicate(json.dumps(request).encode())
            problem: str | None = json.loads(output)["problem"]
        except TimeoutError:
            return f"no response within {_TIMEOUT_S:g} s"
        except ValueError:
            return f"the process of apprise has ended with code {process.returncode}"
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        return problem
