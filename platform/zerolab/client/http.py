"""Client methods for the routes of the server, which raise Zerolab's errors.

Requests and responses are those of the REST reference. A method returns the JSON resource as a
dictionary. Metric values that are not finite are the strings ``NaN``, ``Infinity`` and
``-Infinity``.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from zerolab.client.transport import PREFIX, Event, Json, Transport, parse_events, resource
from zerolab.contract.messages import (
    MSGPACK,
    AgentLeave,
    AgentRegistration,
    AgentWork,
    BatchReceipt,
    BoundReached,
    Directive,
    Extension,
    LogBatch,
    LogEntry,
    RendezvousAddress,
    RunActivity,
    RunExit,
)
from zerolab.errors import ConfigError

__all__ = ["Client", "Event", "Json"]


class Client(Transport):
    """Client of one server, over a connection that threads may share.

    ``Client()`` connects to the server of this installation, or to the one that the environment
    names.

    Every method raises :class:`UnreachableError` if the server does not respond,
    :class:`ForbiddenError` if the token is not accepted, and otherwise the error of
    :mod:`zerolab.errors` that the response names.
    """

    # -- the server itself -------------------------------------------------------------------

    def info(self) -> Json:
        """Return the server's version, start time and cluster."""
        return self.get("/info")

    def agents(self) -> list[Json]:
        """List the agents and their slots."""
        return self._unpaged_list("/agents", "agents")

    def agent_action(self, agent_id: int, action: str, **options: Any) -> Json:
        """Disable or enable an agent, or some of its ``slots``; ``drain`` lets runs finish."""
        body = {key: value for key, value in options.items() if value is not None}
        return resource(self.post(f"/agents/{agent_id}/{action}", body), "agent")

    def delete_agent(self, agent_id: int) -> None:
        """Remove an agent that has left."""
        self._send("DELETE", f"/agents/{agent_id}")

    def jobs(self, pool: str | None = None) -> list[Json]:
        """List the jobs that wait for slots or use them, in the order of the queue."""
        return self._unpaged_list("/jobs", "jobs", pool=pool)

    def move_job(self, experiment_id: int, **target: int | None) -> Json:
        """Put a job ``ahead_of`` another one, or ``behind`` it."""
        body = {key: value for key, value in target.items() if value is not None}
        return resource(self.post(f"/jobs/{experiment_id}/move", body), "job")

    def patch_job(self, experiment_id: int, **changes: Any) -> Json:
        """Change a job's ``priority``, ``weight`` or ``max_slots``."""
        return resource(self._send("PATCH", f"/jobs/{experiment_id}", json=changes).json(), "job")

    def pools(self) -> list[Json]:
        """List the resource pools."""
        return self._unpaged_list("/pools", "pools")

    def put_pool(self, name: str, policy: str) -> Json:
        """Set the scheduling policy of a pool."""
        return resource(
            self._send("PUT", _path("pools", name), json={"policy": policy}).json(), "pool"
        )

    def quotas(self) -> list[Json]:
        """List the quotas with the slots in use."""
        return self._unpaged_list("/quotas", "quotas")

    def put_quota(self, kind: str, name: str, max_slots: int) -> Json:
        """Limit the total slots of the jobs of a pool, or with a label."""
        response = self._send("PUT", _path("quotas", kind, name), json={"max_slots": max_slots})
        return resource(response.json(), "quota")

    def delete_quota(self, kind: str, name: str) -> None:
        """Remove a quota."""
        self._send("DELETE", _path("quotas", kind, name))

    def models(self) -> list[Json]:
        """List the models of the registry, with their versions."""
        return self._unpaged_list("/models", "models")

    def model(self, name: str) -> Json:
        """Read one model of the registry."""
        return resource(self.get(_path("models", name)), "model")

    def create_model(self, name: str, description: str = "") -> Json:
        """Add a model to the registry."""
        return resource(self.post("/models", {"name": name, "description": description}), "model")

    def register_version(self, name: str, checkpoint: str, notes: str = "") -> Json:
        """Make a checkpoint the next version of a model, and return the model."""
        body = {"checkpoint": checkpoint, "notes": notes}
        return resource(self.post(_path("models", name, "versions"), body), "model")

    def remove_version(self, name: str, version: int) -> None:
        """Remove a version from the registry."""
        self._send("DELETE", _path("models", name, "versions", str(version)))

    def remove_model(self, name: str) -> None:
        """Remove a model from the registry."""
        self._send("DELETE", _path("models", name))

    def login_link(self) -> str:
        """Create a link that opens the web page once, without a password."""
        link = str(self.post("/login-links")["url"])
        return link if "://" in link else f"{self.url}{link}"

    def log_out(self) -> None:
        """Sign every browser out."""
        self._send("POST", "/logout")

    def renew_token(self) -> str:
        """Replace the token of the server, and return the new one."""
        return str(self.post("/token")["token"])

    def agent_token(self, *, renew: bool = False) -> str:
        """Return the join token of agents; with ``renew``, replace it first."""
        response = self.post("/agent-token") if renew else self.get("/agent-token")
        return str(response["token"])

    # -- experiments -------------------------------------------------------------------------

    def create_experiment(
        self,
        config: Mapping[str, Any],
        archive: bytes | str | Path,
        *,
        activate: bool = True,
        test: bool = False,
    ) -> Json:
        """Submit an experiment.

        Args:
            config: Content of the experiment file. Tuples, paths, numbers and arrays of numpy, and
            OmegaConf nodes are converted.
            archive: The model directory: its path, the path of an archive, or the result of
            :func:`zerolab.client.archive.pack`.
            activate: Start it; otherwise it is paused.
            test: Run one batch, one validation and one checkpoint only.

        Raises:
            ConfigError: If ``config`` or its engine configuration is invalid, with all problems; or
                if a text is not valid UTF-8.
        """
        content = archive if isinstance(archive, bytes) else _read_archive(Path(archive))
        try:
            text = msgspec.json.encode(config, enc_hook=_to_json).decode()
        except UnicodeEncodeError:
            from zerolab.schema.json_values import (
                json_value_problems,  # slow import, rarely needed
            )

            raise ConfigError("experiment", json_value_problems(config)) from None
        response = self._send(
            "POST",
            "/experiments",
            params={"activate": activate, "test": test},
            data={"config": text},
            files={"archive": ("model.tar.gz", content, "application/gzip")},
        )
        return resource(response.json(), "experiment")

    def preview(self, config: Mapping[str, Any], **times: float | None) -> Json:
        """Estimate a search's trials and cost (dry run).

        Args:
            config: Content of the experiment file.
            times: ``seconds_per_batch``, ``seconds_per_epoch`` or ``like``, if known.

        Returns:
            Trials by length, and their cost, as ``SearchPreview`` of the REST API.
        """
        body = {"config": _to_json(dict(config)), **times}
        return resource(self.post("/experiments/preview", body), "preview")

    def search_events(self, experiment_id: int, after: int, wait_s: float) -> Json:
        """Wait for events of an external searcher, and return them."""
        params = {"after": after, "wait_s": wait_s}
        path = f"/experiments/{experiment_id}/searcher/events"
        response: Json = self._get(path, params, extra_s=wait_s).json()
        return response

    def search_operations(self, experiment_id: int, body: Mapping[str, Any]) -> Json:
        """Send operations of an external searcher; repeated calls have no further effect."""
        path = f"/experiments/{experiment_id}/searcher/operations"
        return self.post(path, body, repeatable=True)

    def searcher(self, experiment_id: int) -> Json:
        """Return the state of a search and its trials."""
        return resource(self.get(f"/experiments/{experiment_id}/searcher"), "searcher")

    def experiments(self, **filters: str | int | bool | None) -> list[Json]:
        """List experiments; ``state``, ``name``, ``sort``, ``archived`` narrow the list."""
        return self._list("/experiments", "experiments", filters)

    def experiment(self, experiment_id: int) -> Json:
        """Return one experiment."""
        return resource(self.get(f"/experiments/{experiment_id}"), "experiment")

    def patch_experiment(self, experiment_id: int, **changes: Any) -> Json:
        """Change an experiment's name, description, labels or notes."""
        path = f"/experiments/{experiment_id}"
        return resource(self._send("PATCH", path, json=changes).json(), "experiment")

    def delete_experiment(self, experiment_id: int) -> None:
        """Delete an experiment that has ended, with everything that belongs to it."""
        self._send("DELETE", f"/experiments/{experiment_id}")

    def experiment_action(
        self, experiment_id: int, action: str, body: Mapping[str, Any] | None = None
    ) -> Json:
        """Pause, activate, cancel, kill, continue, archive, unarchive or fork an experiment.

        Args:
            experiment_id: Id of the experiment.
            action: Name of the action.
            body: For ``continue`` and ``fork``: ``config`` overrides and ``activate``.

        Returns:
            The experiment; the new one for ``fork``.

        Raises:
            ConflictError: If its state does not allow it; the message says what to do.
        """
        response = self.post(f"/experiments/{experiment_id}/{action}", body)
        return resource(response, "experiment")

    def trials(self, experiment_id: int, **filters: str | int | bool | None) -> list[Json]:
        """List an experiment's trials; ``state``, ``sort``, ``archived`` narrow the list."""
        return self._list(f"/experiments/{experiment_id}/trials", "trials", filters)

    def trial(self, trial_id: int) -> Json:
        """Return one trial."""
        return resource(self.get(f"/trials/{trial_id}"), "trial")

    def trial_action(
        self, trial_id: int, action: str, body: Mapping[str, Any] | None = None
    ) -> Json:
        """Pause, activate, cancel, kill, continue, archive, unarchive or fork one trial.

        Args:
            trial_id: Id of the trial.
            action: Name of the action.
            body: For ``fork``, as for an experiment.

        Returns:
            The trial; the new experiment for ``fork``.

        Raises:
            ConflictError: If its state does not allow it; the message says what to do.
        """
        response = self.post(f"/trials/{trial_id}/{action}", body)
        return resource(response, "experiment" if action == "fork" else "trial")

    def delete_trial(self, trial_id: int) -> None:
        """Delete a trial of an experiment that has ended, with all its data."""
        self._send("DELETE", f"/trials/{trial_id}")

    def kill_trial(self, trial_id: int) -> Json:
        """Stop a trial immediately."""
        return self.trial_action(trial_id, "kill")

    def metric_names(self, trial_id: int) -> list[Json]:
        """List the metrics that a trial has reported: ``group`` and ``name``."""
        names: list[Json] = self.get(f"/trials/{trial_id}/metric-names")["names"]
        return names

    def metrics(
        self,
        trial_id: int,
        group: str | None = None,
        names: Sequence[str] = (),
        max_points: int | None = None,
        first: int | None = None,
    ) -> list[Json]:
        """Return a trial's curves from step ``first`` on: ``group``, ``name``, ``points``.

        A point is ``[step, value]``, or the mean of several if there are more than ``max_points``.
        """
        params = {
            "group": group,
            "names": ",".join(names) or None,
            "max_points": max_points,
            "first": first,
        }
        curves: list[Json] = self.get(f"/trials/{trial_id}/metrics", **params)["metrics"]
        return curves

    def export_metrics(self, experiment_id: int, **params: str | int | None) -> Iterator[bytes]:
        """Stream a file with all points of an experiment."""
        path = f"{PREFIX}/experiments/{experiment_id}/metrics/export"
        yield from self._download(path, params)

    def experiment_checkpoints(self, experiment_id: int) -> list[Json]:
        """List an experiment's checkpoints."""
        return self._list(f"/experiments/{experiment_id}/checkpoints", "checkpoints")

    def checkpoint_totals(self, experiment_id: int) -> tuple[int, int]:
        """Return the number of an experiment's checkpoints, and their bytes."""
        page = self.get(f"/experiments/{experiment_id}/checkpoints", limit=1)
        return int(page["count"]), int(page["size_bytes"])

    def trial_checkpoints(self, trial_id: int) -> list[Json]:
        """List a trial's checkpoints."""
        return self._list(f"/trials/{trial_id}/checkpoints", "checkpoints")

    def best_checkpoint(self, experiment_id: int) -> Json:
        """Return the best ``checkpoint`` of an experiment, its ``validation``, and a ``note``."""
        response = self.get(f"/experiments/{experiment_id}/best-checkpoint")
        return resource(response, "best_checkpoint")

    def trial_best_checkpoint(self, trial_id: int) -> Json:
        """Return the best ``checkpoint`` of a trial, its ``validation``, and a ``note``."""
        return resource(self.get(f"/trials/{trial_id}/best-checkpoint"), "best_checkpoint")

    def checkpoint(self, uuid: str) -> Json:
        """Return one checkpoint."""
        return resource(self.get(_path("checkpoints", uuid)), "checkpoint")

    def checkpoint_file(self, uuid: str, name: str, first: int = 0) -> Iterator[bytes]:
        """Stream a file of a checkpoint from byte ``first`` on."""
        path = f"{PREFIX}/checkpoints/{uuid}/file"
        yield from self._download(path, {"name": name, "first": first})

    def remove_checkpoints(
        self, uuids: Sequence[str], globs: Sequence[str] = (), *, dry_run: bool = False
    ) -> Json:
        """Remove checkpoints, or some of their files; return the removed ones."""
        body = {"uuids": list(uuids), "globs": list(globs), "dry_run": dry_run}
        return self.post("/checkpoints/remove", body)

    def collect_checkpoints(
        self, experiment_id: int, policy: Mapping[str, int], *, dry_run: bool = False
    ) -> Json:
        """Set an experiment's retention of checkpoints; return the removed ones."""
        return self.post(f"/experiments/{experiment_id}/gc", {**policy, "dry_run": dry_run})

    def runs(self, trial_id: int) -> list[Json]:
        """List the runs of a trial, the oldest first."""
        return self._unpaged_list(f"/trials/{trial_id}/runs", "runs")

    def trial_logs(self, trial_id: int, **filters: str | int | None) -> Json:
        """Return a page of a trial's log lines: ``logs`` and ``next_after``."""
        return self.get(f"/trials/{trial_id}/logs", **filters)

    def experiment_logs(self, experiment_id: int, **filters: str | int | None) -> Json:
        """Return a page of an experiment's log lines: ``logs`` and ``next_after``."""
        return self.get(f"/experiments/{experiment_id}/logs", **filters)

    def events(
        self, experiment_id: int | None = None, *, after: str | None = None
    ) -> Iterator[Event]:
        """Stream events until the connection ends; call again with the last id."""
        path = "/events" if experiment_id is None else f"/experiments/{experiment_id}/events"
        headers = {"Accept": "text/event-stream"}
        if after is not None:
            headers["Last-Event-ID"] = after
        with self._stream(PREFIX + path, headers=headers, endless=True) as response:
            yield from parse_events(response.iter_lines())

    def import_metrics(self, content: bytes) -> Json:
        """Import the metrics file of a run without a server.

        Returns:
            The experiment with these metrics.
        """
        headers = {"Content-Type": "application/x-ndjson"}
        response = self._send("POST", "/import", content=content, headers=headers)
        return resource(response.json(), "experiment")

    # -- agents ------------------------------------------------------------------------------

    def register_agent(
        self, registration: AgentRegistration, *, use_join_token: bool = False
    ) -> int:
        """Register an agent, or the same agent again; return its id.

        Args:
            registration: Name and slots of the agent.
            use_join_token: Send the join token instead of the owner's token in later requests.
        """
        response = self._send_typed("/agents", registration).json()
        if use_join_token and response.get("token"):
            self.use_token(str(response["token"]))
        return int(response["agent_id"])

    def work(
        self, agent_id: int, version: int, wait_s: float = 30.0, identity: str | None = None
    ) -> AgentWork:
        """Wait until an agent's work differs from ``version``; also the heartbeat."""
        params = {"version": version, "wait_s": wait_s, "identity": identity}
        response = self._get(f"/agents/{agent_id}/work", params, extra_s=wait_s)
        return msgspec.json.decode(response.content, type=AgentWork)

    def leave(self, agent_id: int, *, done: bool) -> None:
        """Report that an agent accepts no new run; with ``done``, that it has left."""
        self._send_typed(f"/agents/{agent_id}/leave", AgentLeave(done))

    def download_archive(self, path: str) -> bytes:
        """Download a work item's archive by its path on the server."""
        return b"".join(self._download(path, {}))

    def run_started(self, run_id: int) -> None:
        """Report that the processes of a run have started."""
        self.post(f"/runs/{run_id}/started", repeatable=True)

    def run_exited(self, run_id: int, end: RunExit) -> None:
        """Report that the processes of a run have ended."""
        self._send_typed(f"/runs/{run_id}/exited", end)

    def run_meeting(self, run_id: int, address: RendezvousAddress) -> None:
        """Report the rendezvous address of a run on several agents."""
        self._send_typed(f"/runs/{run_id}/meeting", address)

    def run_activity(self, run_id: int, text: str) -> None:
        """Report the activity of a run before its ranks start."""
        self._send_typed(f"/runs/{run_id}/activity", RunActivity(text))

    def ship_logs(self, run_id: int, first: int, entries: Sequence[LogEntry], node: int = 0) -> int:
        """Send log lines numbered from ``first``; return the number of the next one."""
        response = self._send_typed(f"/runs/{run_id}/logs", LogBatch(first, list(entries), node))
        return msgspec.json.decode(response.content, type=BatchReceipt).stored

    # -- runs --------------------------------------------------------------------------------

    def report(self, run_id: int, body: bytes) -> int:
        """Send a :class:`zerolab.contract.messages.ReportBatch`, encoded as MessagePack.

        Returns:
            Number of the last record of this run that the server has stored.

        Raises:
            StaleRunError: If another run has taken over, or this one has ended.
        """
        headers = {"Content-Type": MSGPACK}
        path = f"/runs/{run_id}/reports"
        response = self._send("POST", path, content=body, headers=headers, repeatable=True)
        return msgspec.json.decode(response.content, type=BatchReceipt).stored

    def directive(self, run_id: int, version: int | None = None, wait_s: float = 30.0) -> Directive:
        """Wait until the directive of a run differs from ``version``.

        Raises:
            StaleRunError: If another run has taken over, or this one has ended.
        """
        params = {"wait_s": wait_s, "version": version}
        response = self._get(f"/runs/{run_id}/directive", params, extra_s=wait_s)
        return msgspec.json.decode(response.content, type=Directive)

    def extend(self, run_id: int, until: int) -> Extension:
        """Return whether a run that reached its bound ``until`` may continue immediately.

        Raises:
            StaleRunError: If another run has taken over, or this one has ended.
        """
        response = self._send_typed(f"/runs/{run_id}/extend", BoundReached(until))
        return msgspec.json.decode(response.content, type=Extension)


def _path(*segments: str) -> str:
    """Join path segments, escaped for a URL.

    Raises:
        ConfigError: If a segment is not possible in a path.
    """
    for segment in segments:
        if segment in {"", ".", ".."} or "/" in segment:
            problem = f"must be neither empty nor a path, got {segment!r}"
            raise ConfigError("name", [problem])
    return "".join(f"/{quote(segment, safe='')}" for segment in segments)


def _to_json(value: Any) -> Any:
    """Convert a value to plain JSON types.

    Raises:
        ConfigError: If it cannot be converted.
    """
    from zerolab.schema.json_values import to_json_values  # slow import, rarely needed

    plain = to_json_values(value)
    if plain is value:
        problem = f"must hold text, numbers, lists and mappings, got {type(value).__name__}"
        raise ConfigError("experiment", [f"config: {problem}"])
    return plain


def _read_archive(path: Path) -> bytes:
    if path.is_file():
        return path.read_bytes()
    from zerolab.client.archive import pack  # slow import, rarely needed

    return pack(path)
