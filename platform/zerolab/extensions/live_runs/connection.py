"""Connection of a live run to the server: opens the run when the server is there, and reports."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from zerolab.client.http import Client
from zerolab.contract.messages import Directive, LogEntry
from zerolab.errors import ConflictError, StaleRunError
from zerolab.extensions.live_runs.run_directory import LiveDirectory

__all__ = ["LiveConnection"]

T = TypeVar("T")


class _RunClient(Client):
    """Client with the token of an external run."""

    def put_media(self, run_id: int, digest: str, content: bytes) -> None:
        """Store the content of a medium."""
        path = f"/external-runs/{run_id}/media/{digest}"
        self._send("PUT", path, content=content, repeatable=True)


class LiveConnection:
    """Target of the reports, logs and media of one live run.

    The first request opens the run on the server. A run that the server has considered lost is
    opened again, once no other process reports under its id.

    Args:
        directory: Directory of the run.
        client: Client with the token of the user.
        replace: Whether the first request takes over from another process with the same id.
    """

    def __init__(self, directory: LiveDirectory, client: Client, *, replace: bool) -> None:
        self._directory = directory
        self._client = client
        self._replace = replace
        self._run_client: _RunClient | None = None
        self._run_id = 0
        self._lock = threading.Lock()
        self.experiment_id = 0
        """Id of the experiment; 0 until the run is open."""
        self.trial_id = 0
        """Id of the trial; 0 until the run is open."""
        self.first_step = 0
        """First step that the experiment does not have yet."""

    @property
    def page(self) -> str:
        """Address of the experiment in the web page."""
        return f"{self._client.url}/#/experiments/{self.experiment_id}"

    def open(self) -> _RunClient:
        """Open the run on the server, unless it is open; return a client with its token.

        Raises:
            StaleRunError: If another process reports under the same id, or the run was canceled.
            UnreachableError: If the server is unreachable.
        """
        with self._lock:
            if self._run_client is None:
                self._run_client = self._open()
            return self._run_client

    def _open(self) -> _RunClient:
        info = self._directory.read_info()
        body = msgspec.to_builtins(info)
        del body["server"]
        for field in ("project", "create_project"):  # unknown to servers before 0.3
            if not body[field]:
                del body[field]
        try:
            run = self._client.post(
                "/external-runs", {**body, "replace": self._replace}, repeatable=True
            )
        except ConflictError as error:
            raise StaleRunError(str(error)) from error
        self._replace = False
        self._run_id, self.experiment_id = run["run_id"], run["experiment_id"]
        self.trial_id = run["trial_id"]
        steps = run.get("steps_completed") or 0
        self.first_step = steps + 1 if steps else 0
        return _RunClient(self._client.url, run["token"])

    def _call(self, request: Callable[[_RunClient, int], T]) -> T:
        client = self.open()
        try:
            return request(client, self._run_id)
        except StaleRunError:
            with self._lock:
                if self._run_client is client:
                    self._run_client = None
            return request(self.open(), self._run_id)

    def report(self, run_id: int, body: bytes) -> int:
        """Send reports, as :meth:`zerolab.client.http.Client.report`."""
        del run_id  # of the directory
        return self._call(lambda client, number: client.report(number, body))

    def ship_logs(self, run_id: int, first: int, entries: list[LogEntry], node: int = 0) -> int:
        """Send log lines, as :meth:`zerolab.client.http.Client.ship_logs`."""
        del run_id
        return self._call(lambda client, number: client.ship_logs(number, first, entries, node))

    def put(self, source: Path, digest: str) -> None:
        """Send the content of a medium, then remove the file."""
        content = source.read_bytes()
        self._call(lambda client, number: client.put_media(number, digest, content))
        source.unlink()

    def set_hparams(self, hparams: dict[str, Any]) -> None:
        """Replace the hyperparameters."""
        self._post("hparams", {"hparams": hparams})

    def keep_alive(self) -> None:
        """Send a heartbeat."""
        self._post("heartbeat", {})

    def directive(self, version: int | None, wait_s: float) -> Directive:
        """Wait until the directive differs from a version.

        Raises:
            StaleRunError: If the run has ended; it is not opened again.
        """
        return self.open().directive(self._run_id, version, wait_s)

    def end(self, error: str | None) -> None:
        """End the run."""
        self._post("end", {"error": None if error is None else error[:2000]})

    def _post(self, action: str, body: dict[str, Any]) -> None:
        self._call(
            lambda client, number: client.post(
                f"/external-runs/{number}/{action}", body, repeatable=True
            )
        )

    def close(self) -> None:
        """Close the connections; called by the sender, and a later request opens new ones."""
