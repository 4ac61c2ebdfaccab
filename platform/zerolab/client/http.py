"""One method for each route of the server, and its errors as our own exceptions.

The bodies are those of the REST reference: what a method returns is the JSON resource, as a
dictionary. Metric values that are not finite arrive as the strings ``NaN``, ``Infinity`` and
``-Infinity``.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from zerolab.client.responses import Event, Json, parse_events, resource
from zerolab.client.transport import PREFIX, Transport
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
    """The routes of one server, over a connection that threads may share.

    ``Client()`` talks to the server of this installation, or to the one that the environment names.

    Every method raises :class:`UnreachableError` when nothing answers,
    :class:`ForbiddenError` when the token is not accepted, and the error of
    :mod:`zerolab.errors` that the server names for everything else.
    """

    # -- the server itself -------------------------------------------------------------------

    def info(self) -> Json:
        """Return the server's version, start time and cluster."""
        return self.get("/info")

    def agents(self) -> list[Json]:
        """List the agents and their slots."""
        return self._whole("/agents", "agents")

    def agent_action(self, agent_id: int, action: str, **wish: Any) -> Json:
        """Disable or enable an agent, or some of its ``slots``; ``drain`` lets runs finish."""
        given = {key: value for key, value in wish.items() if value is not None}
        return resource(self.post(f"/agents/{agent_id}/{action}", given), "agent")

    def delete_agent(self, agent_id: int) -> None:
        """Forget an agent that is gone."""
        self._send("DELETE", f"/agents/{agent_id}")

    def jobs(self, pool: str | None = None) -> list[Json]:
        """List what waits for slots and what holds them, the first to run first."""
        return self._whole("/jobs", "jobs", pool=pool)

    def move_job(self, experiment_id: int, **where: int | None) -> Json:
        """Put a job ``ahead_of`` another one, or ``behind`` it."""
        given = {key: value for key, value in where.items() if value is not None}
        return resource(self.post(f"/jobs/{experiment_id}/move", given), "job")

    def patch_job(self, experiment_id: int, **changes: Any) -> Json:
        """Change a job's ``priority``, ``weight`` or ``max_slots``."""
        return resource(self._send("PATCH", f"/jobs/{experiment_id}", json=changes).json(), "job")

    def pools(self) -> list[Json]:
        """List the resource pools."""
        return self._whole("/pools", "pools")

    def put_pool(self, name: str, policy: str) -> Json:
        """Say in which order the jobs of a pool start."""
        return resource(
            self._send("PUT", _path("pools", name), json={"policy": policy}).json(), "pool"
        )

    def quotas(self) -> list[Json]:
        """List the quotas, and what is held of each."""
        return self._whole("/quotas", "quotas")

    def put_quota(self, kind: str, name: str, max_slots: int) -> Json:
        """Limit the slots that the jobs of a pool, or with a label, hold together."""
        answer = self._send("PUT", _path("quotas", kind, name), json={"max_slots": max_slots})
        return resource(answer.json(), "quota")

    def delete_quota(self, kind: str, name: str) -> None:
        """Take a limit away."""
        self._send("DELETE", _path("quotas", kind, name))

    def models(self) -> list[Json]:
        """List the models of the registry, with their versions."""
        return self._whole("/models", "models")

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
        """Take a version out of the registry."""
        self._send("DELETE", _path("models", name, "versions", str(version)))

    def remove_model(self, name: str) -> None:
        """Take a model out of the registry."""
        self._send("DELETE", _path("models", name))

    def login_link(self) -> str:
        """Make a link that opens the web page once, without a password."""
        link = str(self.post("/login-links")["url"])
        return link if "://" in link else f"{self.url}{link}"

    def log_out(self) -> None:
        """Sign every browser out."""
        self._send("POST", "/logout")

    def renew_token(self) -> str:
        """Have the server make a new token, which is the only one from then on; return it."""
        return str(self.post("/token")["token"])

    def agent_token(self, *, renew: bool = False) -> str:
        """Return the join token of agents; with ``renew``, a new one that replaces it."""
        answer = self.post("/agent-token") if renew else self.get("/agent-token")
        return str(answer["token"])

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
            config: What the experiment file holds, as it is written there. Tuples, paths, numbers
                and arrays of numpy, and OmegaConf nodes are converted.
            archive: The model directory: its path, the path of an archive, or what
                :func:`zerolab.client.archive.pack` returned.
            activate: Start it; else it waits, paused.
            test: One batch, one validation and one checkpoint only.

        Raises:
            ConfigError: If something in ``config`` or in its engine config does not hold; all
                problems at once. Or if it is no text in UTF-8.
        """
        content = archive if isinstance(archive, bytes) else _read_archive(Path(archive))
        try:
            text = msgspec.json.encode(config, enc_hook=_plain).decode()
        except UnicodeEncodeError:
            from zerolab.schema.json_values import (
                json_value_problems,  # takes long, and is rarely asked
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

    def preview(self, config: Mapping[str, Any], **known: float | None) -> Json:
        """Say what a search would come to.

        Args:
            config: What the experiment file holds.
            known: ``seconds_per_batch``, ``seconds_per_epoch`` or ``like``, where they are known.

        Returns:
            Trials by length, and their cost; see ``SearchPreview`` in the REST API.
        """
        body = {"config": _plain(dict(config)), **known}
        return resource(self.post("/experiments/preview", body), "preview")

    def search_events(self, experiment_id: int, after: int, wait_s: float) -> Json:
        """Return what a searcher outside of the server must know, waiting for it."""
        params = {"after": after, "wait_s": wait_s}
        path = f"/experiments/{experiment_id}/searcher/events"
        found: Json = self._get(path, params, extra_s=wait_s).json()
        return found

    def search_operations(self, experiment_id: int, body: Mapping[str, Any]) -> Json:
        """Send what a searcher outside of the server wants; saying it again changes nothing."""
        path = f"/experiments/{experiment_id}/searcher/operations"
        return self.post(path, body, repeatable=True)

    def searcher(self, experiment_id: int) -> Json:
        """Return where the trials of a search stand."""
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
            experiment_id: Which.
            action: What to do.
            body: For ``continue`` and ``fork``: ``config``, laid over the one that was submitted,
                and ``activate``.

        Returns:
            The experiment; the new one for ``fork``.

        Raises:
            ConflictError: If its state does not allow it; the message says what to do.
        """
        answer = self.post(f"/experiments/{experiment_id}/{action}", body)
        return resource(answer, "experiment")

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
            trial_id: Which.
            action: What to do.
            body: For ``fork``, as for an experiment.

        Returns:
            The trial; the new experiment for ``fork``.

        Raises:
            ConflictError: If its state does not allow it; the message says what to do.
        """
        answer = self.post(f"/trials/{trial_id}/{action}", body)
        return resource(answer, "experiment" if action == "fork" else "trial")

    def delete_trial(self, trial_id: int) -> None:
        """Delete a trial of an experiment that has ended, with all that belongs to it."""
        self._send("DELETE", f"/trials/{trial_id}")

    def kill_trial(self, trial_id: int) -> Json:
        """Stop one trial now."""
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

        A point is ``[step, value]``; the mean of several where there are more than ``max_points``.
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
        """Stream every point of an experiment, in pieces of the file."""
        path = f"{PREFIX}/experiments/{experiment_id}/metrics/export"
        yield from self._download(path, params)

    def experiment_checkpoints(self, experiment_id: int) -> list[Json]:
        """List an experiment's checkpoints."""
        return self._list(f"/experiments/{experiment_id}/checkpoints", "checkpoints")

    def checkpoint_totals(self, experiment_id: int) -> tuple[int, int]:
        """Return how many checkpoints of an experiment are there, and their bytes."""
        page = self.get(f"/experiments/{experiment_id}/checkpoints", limit=1)
        return int(page["count"]), int(page["size_bytes"])

    def trial_checkpoints(self, trial_id: int) -> list[Json]:
        """List a trial's checkpoints."""
        return self._list(f"/trials/{trial_id}/checkpoints", "checkpoints")

    def best_checkpoint(self, experiment_id: int) -> Json:
        """Return the best ``checkpoint`` of an experiment, its ``validation``, and a ``note``."""
        found = self.get(f"/experiments/{experiment_id}/best-checkpoint")
        return resource(found, "best_checkpoint")

    def trial_best_checkpoint(self, trial_id: int) -> Json:
        """Return the same of one trial."""
        return resource(self.get(f"/trials/{trial_id}/best-checkpoint"), "best_checkpoint")

    def checkpoint(self, uuid: str) -> Json:
        """Return one checkpoint."""
        return resource(self.get(_path("checkpoints", uuid)), "checkpoint")

    def checkpoint_file(self, uuid: str, name: str, first: int = 0) -> Iterator[bytes]:
        """Stream a file of a checkpoint from byte ``first`` on, from whatever storage."""
        path = f"{PREFIX}/checkpoints/{uuid}/file"
        yield from self._download(path, {"name": name, "first": first})

    def remove_checkpoints(
        self, uuids: Sequence[str], globs: Sequence[str] = (), *, dry_run: bool = False
    ) -> Json:
        """Remove checkpoints, or files of them; return what went, or would go."""
        body = {"uuids": list(uuids), "globs": list(globs), "dry_run": dry_run}
        return self.post("/checkpoints/remove", body)

    def collect_checkpoints(
        self, experiment_id: int, policy: Mapping[str, int], *, dry_run: bool = False
    ) -> Json:
        """Set how many checkpoints an experiment keeps; return what went, or would go."""
        return self.post(f"/experiments/{experiment_id}/gc", {**policy, "dry_run": dry_run})

    def runs(self, trial_id: int) -> list[Json]:
        """List the runs of a trial, the oldest first."""
        return self._whole(f"/trials/{trial_id}/runs", "runs")

    def trial_logs(self, trial_id: int, **filters: str | int | None) -> Json:
        """Return a page of a trial's log lines: ``logs`` and ``next_after``."""
        return self.get(f"/trials/{trial_id}/logs", **filters)

    def experiment_logs(self, experiment_id: int, **filters: str | int | None) -> Json:
        """Return a page of an experiment's log lines: ``logs`` and ``next_after``."""
        return self.get(f"/experiments/{experiment_id}/logs", **filters)

    def events(
        self, experiment_id: int | None = None, *, after: str | None = None
    ) -> Iterator[Event]:
        """Follow what happens, until the connection ends; call again with the last id."""
        path = "/events" if experiment_id is None else f"/experiments/{experiment_id}/events"
        headers = {"Accept": "text/event-stream"}
        if after is not None:
            headers["Last-Event-ID"] = after
        with self._stream(PREFIX + path, headers=headers, endless=True) as response:
            yield from parse_events(response.iter_lines())

    def import_metrics(self, content: bytes) -> Json:
        """Bring the metrics file of a run without a server into this one.

        Returns:
            The experiment that now holds them.
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
            use_join_token: In place of the owner's token, send the join token from then on.
        """
        answer = self._send_typed("/agents", registration).json()
        if use_join_token and answer.get("token"):
            self.use_token(str(answer["token"]))
        return int(answer["agent_id"])

    def work(
        self, agent_id: int, version: int, wait_s: float = 30.0, identity: str | None = None
    ) -> AgentWork:
        """Wait until what an agent must run differs from ``version``; also the heartbeat."""
        params = {"version": version, "wait_s": wait_s, "identity": identity}
        response = self._get(f"/agents/{agent_id}/work", params, extra_s=wait_s)
        return msgspec.json.decode(response.content, type=AgentWork)

    def leave(self, agent_id: int, *, done: bool) -> None:
        """Tell the server that an agent stops: nothing new there; with ``done``, it is gone."""
        self._send_typed(f"/agents/{agent_id}/leave", AgentLeave(done))

    def download_archive(self, path: str) -> bytes:
        """Fetch the archive whose path on the server a work item names."""
        return b"".join(self._download(path, {}))

    def run_started(self, run_id: int) -> None:
        """Tell the server that the processes of a run are there."""
        self.post(f"/runs/{run_id}/started", repeatable=True)

    def run_exited(self, run_id: int, end: RunExit) -> None:
        """Tell the server that the processes of a run are gone."""
        self._send_typed(f"/runs/{run_id}/exited", end)

    def run_meeting(self, run_id: int, place: RendezvousAddress) -> None:
        """Tell the server where the ranks of a run on several agents meet."""
        self._send_typed(f"/runs/{run_id}/meeting", place)

    def run_activity(self, run_id: int, text: str) -> None:
        """Tell the server what a run does before its ranks are there."""
        self._send_typed(f"/runs/{run_id}/activity", RunActivity(text))

    def ship_logs(self, run_id: int, first: int, entries: Sequence[LogEntry], node: int = 0) -> int:
        """Send log lines numbered from ``first``; return the number of the next one wanted."""
        answer = self._send_typed(f"/runs/{run_id}/logs", LogBatch(first, list(entries), node))
        return msgspec.json.decode(answer.content, type=BatchReceipt).stored

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
        answer = self._send("POST", path, content=body, headers=headers, repeatable=True)
        return msgspec.json.decode(answer.content, type=BatchReceipt).stored

    def directive(self, run_id: int, version: int | None = None, wait_s: float = 30.0) -> Directive:
        """Wait until what the server wants of a run differs from ``version``.

        Raises:
            StaleRunError: If another run has taken over, or this one has ended.
        """
        params = {"wait_s": wait_s, "version": version}
        response = self._get(f"/runs/{run_id}/directive", params, extra_s=wait_s)
        return msgspec.json.decode(response.content, type=Directive)

    def extend(self, run_id: int, until: int) -> Extension:
        """Ask whether a run that has come to its bound ``until`` may go on at once.

        Raises:
            StaleRunError: If another run has taken over, or this one has ended.
        """
        answer = self._send_typed(f"/runs/{run_id}/extend", BoundReached(until))
        return msgspec.json.decode(answer.content, type=Extension)


def _path(*words: str) -> str:
    """Put words of a user into a path.

    Raises:
        ConfigError: If one cannot stand there.
    """
    for word in words:
        if word in {"", ".", ".."} or "/" in word:
            problem = f"must be neither empty nor a path, got {word!r}"
            raise ConfigError("name", [problem])
    return "".join(f"/{quote(word, safe='')}" for word in words)


def _plain(value: Any) -> Any:
    """Convert a value that JSON does not have.

    Raises:
        ConfigError: If it cannot be converted.
    """
    from zerolab.schema.json_values import to_json_values  # takes long, and is rarely needed

    plain = to_json_values(value)
    if plain is value:
        problem = f"must hold text, numbers, lists and mappings, got {type(value).__name__}"
        raise ConfigError("experiment", [f"config: {problem}"])
    return plain


def _read_archive(path: Path) -> bytes:
    if path.is_file():
        return path.read_bytes()
    from zerolab.client.archive import pack  # takes long, and is rarely needed

    return pack(path)
