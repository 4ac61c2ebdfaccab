"""Client methods for the routes of the server, which raise Zerolab's errors.

Requests and responses are those of the REST reference.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from zerolab.client.objects import (
    Agent,
    Checkpoint,
    Experiment,
    Model,
    ObjectList,
    Project,
    Run,
    Trial,
)
from zerolab.client.objects.metrics_table import MetricSeries, read_series
from zerolab.client.transport import (
    PREFIX,
    Event,
    Json,
    Transport,
    drop_none,
    parse_events,
    resource,
)
from zerolab.contract.messages import (
    MSGPACK,
    AgentLeave,
    AgentLoad,
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
from zerolab.errors import ConfigError, NotFoundError

__all__ = ["Client", "Event", "Json"]


class Client(Transport):
    """Client of one server, over a connection that threads may share.

    Use it in a ``with`` block, or call :meth:`close`.

    Experiments, trials, runs, checkpoints, models and agents are objects with attributes and
    methods: ``client.experiment(1).wait().best_trial().hparams``. They are also the JSON resources
    of the REST reference: ``client.experiment(1)["state"]``. Other methods return dictionaries.

    In a dictionary, times are texts in ISO 8601, UTC, and metric values that are not finite are the
    texts ``NaN``, ``Infinity`` and ``-Infinity``. Attributes are times and numbers.

    Every method raises :class:`UnreachableError` if the server does not respond,
    :class:`ForbiddenError` if the token is not accepted, and otherwise the error of
    :mod:`zerolab.errors` that the response names.

    Args:
        url: Address of the server, e.g. ``http://127.0.0.1:8080``. By default address and token
            come from ``ZEROLAB_MASTER`` and ``ZEROLAB_TOKEN``, from the run that the process is
            part of, or from the server of the data directory.
        token: Token of the server, sent with every request.
        timeout_s: Maximum wait for a response, in seconds; long polls add their own wait.
        newer_token: Returns the current token if the server rejects the known one, which may
            have been renewed.

    Raises:
        ConfigError: If the address is invalid, or no server is found.

    Example:
        >>> with zerolab.Client() as client:
        ...     trial = client.experiment(1).wait().best_trial()
        ...     print(trial.id, trial.hparams, trial.best_validation)
        1 {'lr': 0.1} 0.01
    """

    # -- the server itself -------------------------------------------------------------------

    def info(self) -> Json:
        """Return the server's version, start time and cluster.

        Returns:
            ``version``, ``home``, ``database`` and ``started_at`` (str); ``cluster`` with the
            numbers ``agents``, ``slots`` and ``free_slots``.

        Example:
            >>> client = zerolab.Client()
            >>> client.info()["cluster"]["agents"]
            1
        """
        return self.get("/info")

    def agents(self) -> ObjectList[Agent]:
        """List the agents and their slots.

        Returns:
            One dict per agent: ``id``, ``name``, ``host``, ``pool``, ``state`` (``ready``,
            ``disabled``, ``draining``, ``leaving``, ``silent`` or ``gone``), and ``slots``, a list
            of dicts with ``id``, ``device``, ``run_id``, ``enabled`` and ``down``.

        Example:
            >>> client = zerolab.Client()
            >>> [slot["device"] for slot in client.agents()[0]["slots"]]
            ['cpu', 'cpu']
        """
        return ObjectList(Agent(self, item) for item in self._unpaged_list("/agents", "agents"))

    def agent_action(self, agent_id: int, action: str, **options: Any) -> Json:
        """Disable or enable an agent, or some of its slots.

        Args:
            agent_id: Id of the agent.
            action: ``disable`` or ``enable``.
            options: ``slots``: list of slot ids, all by default. ``drain=True`` with ``disable``:
                runs finish; otherwise they checkpoint and continue elsewhere.

        Returns:
            The agent, as in :meth:`agents`.

        Raises:
            NotFoundError: If the agent or the action does not exist.

        Example:
            >>> client = zerolab.Client()
            >>> client.agent_action(1, "disable", drain=True)["enabled"]
            False
        """
        body = {key: value for key, value in options.items() if value is not None}
        return resource(self.post(f"/agents/{agent_id}/{action}", body), "agent")

    def delete_agent(self, agent_id: int) -> None:
        """Remove an agent that has left.

        Args:
            agent_id: Id of the agent.

        Raises:
            NotFoundError: If it does not exist.
            ConflictError: If it has not left.

        Example:
            >>> from zerolab.contract.messages import AgentRegistration, SlotInfo
            >>> client = zerolab.Client()
            >>> registration = AgentRegistration("host-2", "host-2", [SlotInfo(0, "cpu")], "test")
            >>> agent_id = client.register_agent(registration)
            >>> client.leave(agent_id, done=True)
            >>> client.delete_agent(agent_id)
        """
        self._send("DELETE", f"/agents/{agent_id}")

    def jobs(self, pool: str | None = None) -> list[Json]:
        """List the jobs, which are experiments that have not ended.

        Args:
            pool: Name of a resource pool; None for all.

        Returns:
            One dict per job, in the order of the queue: ``experiment_id``, ``name``, ``state``,
            ``pool``, ``place`` (from 1; None unless it waits), ``priority`` (1 to 99, smaller
            first), ``weight``, ``max_slots``, ``queued_trials``, ``running_trials``,
            ``held_slots``, ``waiting_reason`` and ``order_reason`` (str or None).

        Example:
            >>> client = zerolab.Client()
            >>> [job["name"] for job in client.jobs()]
            ['waiting', 'waiting longer']
        """
        return self._unpaged_list("/jobs", "jobs", pool=pool)

    def move_job(self, experiment_id: int, **target: int | None) -> Json:
        """Put a job before or behind another one.

        Args:
            experiment_id: Experiment to move.
            target: ``ahead_of`` or ``behind``, with the id of another experiment of the same pool.

        Returns:
            The job, as in :meth:`jobs`, with the priority of the other one.

        Raises:
            NotFoundError: If one of the experiments does not exist.
            ConflictError: If one of them has ended.

        Example:
            >>> client = zerolab.Client()
            >>> client.move_job(3, ahead_of=2)["place"]
            1
        """
        body = {key: value for key, value in target.items() if value is not None}
        return resource(self.post(f"/jobs/{experiment_id}/move", body), "job")

    def patch_job(self, experiment_id: int, **changes: Any) -> Json:
        """Change the priority, weight or slot limit of a job.

        Args:
            experiment_id: Id of the experiment.
            changes: ``priority`` (1 to 99, smaller first), ``weight`` (more than 0), ``max_slots``
                (None for no limit).

        Returns:
            The job, as in :meth:`jobs`.

        Raises:
            NotFoundError: If the experiment does not exist.
            ConflictError: If it has ended.
            ConfigError: If a value is invalid.

        Example:
            >>> client = zerolab.Client()
            >>> client.patch_job(3, priority=10, max_slots=4)["priority"]
            10
        """
        return resource(self._send("PATCH", f"/jobs/{experiment_id}", json=changes).json(), "job")

    def pools(self) -> list[Json]:
        """List the resource pools and their free slots.

        Returns:
            One dict per pool: ``name``, ``policy``, ``agents``, ``slots``, ``free_slots``, ``jobs``
            and ``max_slots``.

        Example:
            >>> client = zerolab.Client()
            >>> client.pools()[0]["name"]
            'default'
        """
        return self._unpaged_list("/pools", "pools")

    def put_pool(self, name: str, policy: str) -> Json:
        """Set the scheduling policy of a pool.

        Args:
            name: Name of the pool; it may have no agents yet.
            policy: ``fair_share``, ``priority`` or ``fifo``.

        Returns:
            The pool, as in :meth:`pools`.

        Raises:
            ConfigError: If the policy is unknown.

        Example:
            >>> client = zerolab.Client()
            >>> client.put_pool("default", "priority")["policy"]
            'priority'
        """
        return resource(
            self._send("PUT", _path("pools", name), json={"policy": policy}).json(), "pool"
        )

    def quotas(self) -> list[Json]:
        """List the quotas with the slots in use.

        Returns:
            One dict per quota: ``group`` (``pool:NAME``, ``label:NAME``, ``user:NAME``,
            ``project:NAME``, or ``user:*`` for each user without a quota), ``max_slots``,
            ``held_slots``, ``is_default`` (whether it is the quota of a user by ``user:*``) and
            ``request_limit``.

        Example:
            >>> client = zerolab.Client()
            >>> client.quotas()
            []
        """
        return self._unpaged_list("/quotas", "quotas")

    def put_quota(
        self, kind: str, name: str, max_slots: int, *, request_limit: int | None = None
    ) -> Json:
        """Limit the slots of a pool, label, user or project.

        Args:
            kind: ``pool``, ``label``, ``user`` or ``project``.
            name: Name of the pool, user or project, or the label; the user ``*`` is each user who
                has no other quota.
            max_slots: Maximum number of slots that these jobs hold together.
            request_limit: With the user ``*``: maximum number of slots that a user may request.

        Returns:
            The quota, as in :meth:`quotas`.

        Raises:
            ConfigError: If a value is invalid.

        Example:
            >>> client = zerolab.Client()
            >>> client.put_quota("label", "students", 4)["max_slots"]
            4
        """
        body = {"max_slots": max_slots, "request_limit": request_limit}
        response = self._send("PUT", _path("quotas", kind, name), json=body)
        return resource(response.json(), "quota")

    def delete_quota(self, kind: str, name: str) -> None:
        """Remove the quota of a pool, label, user or project.

        Args:
            kind: ``pool``, ``label``, ``user`` or ``project``.
            name: Name of the pool, user or project, or the label.

        Raises:
            NotFoundError: If there is no such quota.

        Example:
            >>> client = zerolab.Client()
            >>> quota = client.put_quota("label", "guests", 2)
            >>> client.delete_quota("label", "guests")
        """
        self._send("DELETE", _path("quotas", kind, name))

    def quota_requests(self, state: str | None = None) -> list[Json]:
        """List the newest requests for larger quotas, newest first.

        Args:
            state: Only ``OPEN``, ``APPROVED`` or ``DECLINED`` ones.

        Returns:
            One dict per request: ``id``, ``user``, ``max_slots``, ``reason``, ``state``,
            ``created_at``, ``decided_at``, ``decided_by`` and ``answer``.

        Raises:
            ConfigError: If the state is unknown.

        Example:
            >>> client = zerolab.Client()
            >>> client.quota_requests("OPEN")
            []
        """
        return self._unpaged_list("/quota-requests", "requests", state=state)

    def request_quota(self, max_slots: int, reason: str) -> Json:
        """Request a larger quota for the user of this client.

        It replaces the open request of the user.

        Args:
            max_slots: Requested quota.
            reason: Why, for the administrator.

        Returns:
            The request, as in :meth:`quota_requests`.

        Raises:
            ConflictError: If no quota limits the user.
            ConfigError: If it is not more than the quota, or more than a user may request.

        Example:
            >>> client = zerolab.Client()
            >>> quota = client.put_quota("user", "admin", 4)
            >>> request = client.request_quota(8, "a large model")
            >>> client.decide_quota_request(request["id"], approve=True)["state"]
            'APPROVED'
            >>> client.delete_quota("user", "admin")
        """
        body = {"max_slots": max_slots, "reason": reason}
        return resource(self._send("POST", "/quota-requests", json=body).json(), "request")

    def decide_quota_request(self, request_id: int, *, approve: bool, reason: str = "") -> Json:
        """Approve or decline a request for a larger quota.

        An approved one sets the quota of its user.

        Args:
            request_id: The request.
            approve: Whether the user gets the quota.
            reason: Why, for the user.

        Returns:
            The request, as in :meth:`quota_requests`.

        Raises:
            NotFoundError: If there is no such request.
            ConflictError: If it was decided, or the quota is as large already.

        Example:
            >>> client = zerolab.Client()
            >>> quota = client.put_quota("user", "admin", 4)
            >>> request = client.request_quota(8, "a large model")
            >>> client.decide_quota_request(request["id"], approve=False)["state"]
            'DECLINED'
            >>> client.delete_quota("user", "admin")
        """
        action = "approve" if approve else "decline"
        path = _path("quota-requests", str(request_id), action)
        return resource(self._send("POST", path, json={"reason": reason}).json(), "request")

    def notification_channels(self) -> list[Json]:
        """List the notification channels, without their URLs and secrets.

        Returns:
            One dict per channel: ``name``, ``kind``, ``events``, ``all_experiments``, ``user``,
            ``project``, ``pending``, ``failed``, ``last_sent_at``, ``error`` and ``created_at``.

        Example:
            >>> client = zerolab.Client()
            >>> client.notification_channels()
            []
        """
        return self._unpaged_list("/notification-channels", "channels")

    def add_notification_channel(
        self,
        name: str,
        url: str,
        events: Sequence[str] | None = None,
        *,
        all_experiments: bool = False,
        user: str | None = None,
        project: str | None = None,
        kind: str = "webhook",
    ) -> Json:
        """Add a notification channel.

        Args:
            name: Name for ``notify.channels`` of experiments.
            url: URL of a webhook or of apprise; the server never shows it again.
            events: Names of events; None for ``finished``, ``failed`` and ``alert``.
            all_experiments: Send messages about all experiments, not only about those that name
                the channel.
            user: Send messages about all experiments of this user.
            project: Send messages about all experiments of this project; with ``user``, about the
                user's in it.
            kind: ``webhook`` or ``apprise``.

        Returns:
            ``channel``, as in :meth:`notification_channels`, and ``secret``, which signs the
            messages of a webhook.

        Raises:
            ConflictError: If the name exists.
            ConfigError: If a value is invalid, or the server must not send to the URL's address.

        Example:
            >>> client = zerolab.Client()
            >>> client.add_notification_channel("team", "ftp://example.org")
            Traceback (most recent call last):
            zerolab.errors.ConfigError: ...
        """
        body: Json = {
            "name": name,
            "url": url,
            "kind": kind,
            "all_experiments": all_experiments,
            "user": user,
            "project": project,
        }
        if events is not None:
            body["events"] = list(events)
        return self.post("/notification-channels", body)

    def delete_notification_channel(self, name: str) -> None:
        """Delete a notification channel and its messages.

        Args:
            name: Name of the channel.

        Raises:
            NotFoundError: If there is no such channel.

        Example:
            >>> client = zerolab.Client()
            >>> client.delete_notification_channel("nobody")
            Traceback (most recent call last):
            zerolab.errors.NotFoundError: there is no channel nobody; ...
        """
        self._send("DELETE", _path("notification-channels", name))

    def test_notification_channel(self, name: str) -> Json:
        """Send a test message to a channel and wait for the result.

        Args:
            name: Name of the channel.

        Returns:
            ``delivered`` and ``error``.

        Raises:
            NotFoundError: If there is no such channel.

        Example:
            >>> client = zerolab.Client()
            >>> client.test_notification_channel("nobody")
            Traceback (most recent call last):
            zerolab.errors.NotFoundError: there is no channel nobody; ...
        """
        return self.post(_path("notification-channels", name, "test"))

    def notifications(
        self, channel: str | None = None, experiment: int | None = None, limit: int = 100
    ) -> list[Json]:
        """List the newest messages to notification channels, newest first.

        Args:
            channel: Only of this channel.
            experiment: Only of this experiment.
            limit: Maximum number of messages.

        Returns:
            One dict per message: ``id``, ``channel``, ``event``, ``experiment_id``, ``title``,
            ``state`` (``PENDING``, ``SENT`` or ``FAILED``), ``attempts``, ``error``,
            ``created_at`` and ``ended_at``.

        Raises:
            NotFoundError: If there is no such channel.

        Example:
            >>> client = zerolab.Client()
            >>> client.notifications(limit=5)
            []
        """
        named = {"channel": channel, "experiment": experiment}
        given = {key: value for key, value in named.items() if value is not None}
        messages: list[Json] = self.get("/notifications", limit=limit, **given)["notifications"]
        return messages

    def views(self) -> list[Json]:
        """List the saved views of the user, and shared ones.

        Returns:
            One dict per view, sorted by name: ``id``, ``name``, ``owner``, ``path``, ``shared``,
            ``created_at`` and ``updated_at``.

        Example:
            >>> client = zerolab.Client()
            >>> client.views()
            []
        """
        return self._unpaged_list("/views", "views")

    def view(self, name: str) -> Json:
        """Read a saved view by its name.

        A view of the user has precedence over a shared one of another user.

        Args:
            name: Name of the view.

        Returns:
            The view, as in :meth:`views`.

        Raises:
            NotFoundError: If there is no such view.

        Example:
            >>> client = zerolab.Client()
            >>> client.view("best runs")
            Traceback (most recent call last):
            zerolab.errors.NotFoundError: there is no view 'best runs'; ...
        """
        named = [view for view in self.views() if view["name"] == name]
        user = self.whoami()["user"]
        found = next((view for view in named if view["owner"] == user), named[0] if named else None)
        if found is None:
            raise NotFoundError(f"there is no view {name!r}; `zerolab view list` lists them")
        return found

    def delete_view(self, view_id: int) -> None:
        """Delete a saved view.

        Args:
            view_id: Id of the view.

        Raises:
            NotFoundError: If there is no such view.
            ForbiddenError: If it belongs to another user.

        Example:
            >>> client = zerolab.Client()
            >>> client.delete_view(77)
            Traceback (most recent call last):
            zerolab.errors.NotFoundError: there is no view 77; ...
        """
        self._send("DELETE", _path("views", str(view_id)))

    def create_share(
        self,
        experiments: Sequence[int],
        *,
        name: str = "",
        path: str | None = None,
        expires_s: float | None = None,
    ) -> Json:
        """Create a link with which readers without an account see experiments.

        Args:
            experiments: Ids of the experiments, at most 100.
            name: Purpose of the link.
            path: Page that it opens, as ``path`` of a view; None for the experiment, or the
                comparison of several.
            expires_s: Validity in seconds; None for 7 days.

        Returns:
            ``url``, which is not shown again, and ``share``, as in :meth:`shares`.

        Raises:
            NotFoundError: If an experiment does not exist.
            ForbiddenError: If one belongs to another user.
            ConfigError: If a value is invalid.

        Example:
            >>> client = zerolab.Client()
            >>> created = client.create_share([1], expires_s=3600)
            >>> "/#/shared/zls_" in created["url"]
            True
            >>> client.revoke_share(created["share"]["id"])
        """
        values = {"name": name, "path": path, "expires_s": expires_s}
        body = {"experiments": list(experiments), **drop_none(values)}
        created = self.post("/shares", body)
        return {**created, "url": self.url + created["url"]}

    def shares(self, experiment: int | None = None) -> list[Json]:
        """List the user's share links; for administrators, those of all users.

        Args:
            experiment: Only links that show this experiment.

        Returns:
            One dict per link, newest first: ``id``, ``name``, ``owner``, ``experiments``, ``path``,
            ``created_at``, ``expires_at`` and ``valid``.

        Example:
            >>> client = zerolab.Client()
            >>> client.shares(experiment=77)
            []
        """
        query = {} if experiment is None else {"experiment": experiment}
        shares: list[Json] = self.get("/shares", **query)["shares"]
        return shares

    def revoke_share(self, share_id: int) -> None:
        """Revoke a share link; it stops working at once.

        Args:
            share_id: Id of the link.

        Raises:
            NotFoundError: If there is no such link.
            ForbiddenError: If it belongs to another user.

        Example:
            >>> client = zerolab.Client()
            >>> client.revoke_share(77)
            Traceback (most recent call last):
            zerolab.errors.NotFoundError: there is no share link 77; ...
        """
        self._send("DELETE", _path("shares", str(share_id)))

    def comments(self, experiment_id: int) -> list[Json]:
        """List the comments on an experiment, oldest first.

        Args:
            experiment_id: Id of the experiment.

        Returns:
            One dict per comment: ``id``, ``experiment_id``, ``author``, ``text``, ``created_at``
            and ``edited_at``.

        Raises:
            NotFoundError: If there is no such experiment.

        Example:
            >>> client = zerolab.Client()
            >>> client.comments(1)
            []
        """
        return self._list(_path("experiments", str(experiment_id), "comments"), "comments")

    def add_comment(self, experiment_id: int, text: str) -> Json:
        """Add a comment to an experiment.

        Args:
            experiment_id: Id of the experiment.
            text: Plain text, at most 10,000 characters.

        Returns:
            The comment, as in :meth:`comments`.

        Raises:
            NotFoundError: If there is no such experiment.
            ConfigError: If the text is empty or too long.

        Example:
            >>> client = zerolab.Client()
            >>> client.add_comment(77, "too slow")
            Traceback (most recent call last):
            zerolab.errors.NotFoundError: there is no experiment 77
        """
        path = _path("experiments", str(experiment_id), "comments")
        return resource(self.post(path, {"text": text}), "comment")

    def experiment_groups(self, by: str, **filters: Any) -> list[Json]:
        """Count experiments by a value, with the best result of each group.

        Args:
            by: ``user``, ``project``, ``label``, ``state``, ``pool``, ``searcher`` or a key of the
                configuration, such as ``hyperparameters.lr``.
            **filters: ``state``, ``name``, ``label``, ``user``, ``project`` or ``archived``, as in
                :meth:`experiments`.

        Returns:
            One dict per group, the largest first: ``value``, ``experiments``, ``unfinished``,
            ``failed`` and ``best``. The last is a list with ``metric``, ``value`` and
            ``experiment_id`` for each metric.

        Raises:
            ConfigError: If there is no such value or filter.

        Example:
            >>> client = zerolab.Client()
            >>> client.experiment_groups("project")[0]["value"]
            'default'
        """
        answer = self.get("/experiments/groups", by=by, **drop_none(filters))
        groups: list[Json] = answer["groups"]
        return groups

    def projects(self) -> ObjectList[Project]:
        """List the projects of the installation.

        Returns:
            One dict per project, as in :meth:`project`, sorted by name.

        Example:
            >>> client = zerolab.Client()
            >>> client.projects()[0].name
            'default'
        """
        items = self._unpaged_list("/projects", "projects")
        return ObjectList(Project(self, item) for item in items)

    def project(self, name: str) -> Project:
        """Read one project by its name.

        Args:
            name: Name of the project.

        Returns:
            ``name``, ``description``, ``notes``, ``owner``, ``archived``, ``restricted``,
            ``experiments``, ``unfinished`` and ``models`` (numbers), ``last_experiment_at`` and
            ``created_at``.

        Raises:
            NotFoundError: If it does not exist.

        Example:
            >>> client = zerolab.Client()
            >>> client.project("default").archived
            False
        """
        return Project(self, resource(self.get(_path("projects", name)), "project"))

    def create_project(self, name: str, description: str = "") -> Project:
        """Create a project for experiments and models.

        Args:
            name: 1 to 64 letters, digits, ``.``, ``_`` or ``-``.
            description: Description for readers.

        Returns:
            The project, as in :meth:`project`.

        Raises:
            ConflictError: If the name exists.
            ConfigError: If the name is invalid.

        Example:
            >>> client = zerolab.Client()
            >>> client.create_project("speech", "Speech recognition")
            Project('speech', experiments=0)
        """
        response = self.post("/projects", {"name": name, "description": description})
        return Project(self, resource(response, "project"))

    def patch_project(self, name: str, **changes: Any) -> Project:
        """Change, archive or restrict a project.

        Args:
            name: Name of the project.
            changes: ``description``, ``notes`` (str), ``archived``, ``restricted`` (bool).

        Returns:
            The project, as in :meth:`project`.

        Raises:
            NotFoundError: If it does not exist.
            ConflictError: If the project ``default`` is to be archived or restricted.

        Example:
            >>> client = zerolab.Client()
            >>> client.patch_project("default", notes="for everything else").notes
            'for everything else'
        """
        response = self._send("PATCH", _path("projects", name), json=changes).json()
        return Project(self, resource(response, "project"))

    def project_members(self, name: str) -> list[Json]:
        """List the users who see a restricted project.

        Args:
            name: Name of the project.

        Returns:
            One dict per user, sorted by name: ``user`` and ``owner`` (bool).

        Raises:
            NotFoundError: If it does not exist.

        Example:
            >>> client = zerolab.Client()
            >>> client.project_members("default")
            [{'user': 'admin', 'owner': True}]
        """
        members: list[Json] = self.get(f"{_path('projects', name)}/members")["members"]
        return members

    def add_project_member(self, name: str, user: str) -> None:
        """Add a member to a project.

        Args:
            name: Name of the project.
            user: Name of the user.

        Raises:
            NotFoundError: If the project does not exist.
            ConfigError: If the user does not exist.

        Example:
            >>> client = zerolab.Client()
            >>> client.add_project_member("default", "admin")
        """
        self._send("PUT", _path("projects", name, "members", user))

    def remove_project_member(self, name: str, user: str) -> None:
        """Remove a member of a project.

        Args:
            name: Name of the project.
            user: Name of the user.

        Raises:
            NotFoundError: If the project does not exist, or the user is no member.
            ConflictError: If the project belongs to the user.

        Example:
            >>> client = zerolab.Client()
            >>> client.remove_project_member("default", "admin")
            Traceback (most recent call last):
            zerolab.errors.ConflictError: project default belongs to admin, who is always a member
        """
        self._send("DELETE", _path("projects", name, "members", user))

    def defaults(self, project: str | None = None) -> Json:
        """Read the defaults and limits of new experiments.

        Args:
            project: Name of a project; None for the installation.

        Returns:
            ``project``, ``config`` (secrets are masked), ``limits`` (``slots_per_trial``,
            ``max_slots``, ``priority``) and ``updated_at``.

        Raises:
            NotFoundError: If there is no such project.

        Example:
            >>> client = zerolab.Client()
            >>> client.defaults()["config"]
            {}
        """
        given = {} if project is None else {"project": project}
        return resource(self.get("/defaults", **given), "defaults")

    def put_defaults(
        self,
        config: Mapping[str, Any],
        limits: Mapping[str, Any] | None = None,
        project: str | None = None,
    ) -> Json:
        """Set the defaults and limits of new experiments; only for administrators.

        Args:
            config: Keys of the experiment file.
            limits: ``slots_per_trial``, ``max_slots``, ``priority`` and ``storage_gb``.
            project: Name of a project; None for the installation.

        Returns:
            The defaults, as in :meth:`defaults`.

        Raises:
            ConfigError: If a key or value is invalid.
            NotFoundError: If there is no such project.

        Example:
            >>> client = zerolab.Client()
            >>> client.put_defaults({"max_restarts": 2}, {"slots_per_trial": 8})["config"]
            {'max_restarts': 2}
            >>> client.delete_defaults()
        """
        params = {} if project is None else {"project": project}
        body = {"config": dict(config), "limits": limits or {}}
        return resource(self._send("PUT", "/defaults", json=body, params=params).json(), "defaults")

    def delete_defaults(self, project: str | None = None) -> None:
        """Remove the defaults and limits of new experiments; only for administrators.

        Args:
            project: Name of a project; None for the installation.

        Raises:
            NotFoundError: If there is no such project.

        Example:
            >>> client = zerolab.Client()
            >>> client.delete_defaults()
        """
        params = {} if project is None else {"project": project}
        self._send("DELETE", "/defaults", params=params)

    def models(self, project: str | None = None) -> ObjectList[Model]:
        """List the models of the registry, with their versions.

        Args:
            project: Only of this project.

        Returns:
            One dict per model, as in :meth:`model`.

        Example:
            >>> client = zerolab.Client()
            >>> client.models()
            []
        """
        items = self._unpaged_list("/models", "models", project=project)
        return ObjectList(Model(self, item) for item in items)

    def model(self, name: str) -> Model:
        """Read one model of the registry.

        Args:
            name: Name of the model.

        Returns:
            ``name``, ``description``, ``created_at``, and ``versions``, a list of dicts with
            ``version`` (from 1), ``checkpoint`` (uuid), ``experiment_id``, ``trial_id``,
            ``steps_completed``, ``size_bytes``, ``metrics``, ``notes`` and ``aliases``.

        Raises:
            NotFoundError: If it does not exist.

        Example:
            >>> client = zerolab.Client()
            >>> model = client.create_model("reader")
            >>> client.model("reader")["versions"]
            []
        """
        return Model(self, resource(self.get(_path("models", name)), "model"))

    def create_model(self, name: str, description: str = "", project: str | None = None) -> Model:
        """Add a model without versions to the registry.

        Args:
            name: Name of the model.
            description: Description for readers.
            project: Its project; None for ``default``.

        Returns:
            The model, as in :meth:`model`.

        Raises:
            ConflictError: If the name exists.
            ConfigError: If the name is invalid.

        Example:
            >>> client = zerolab.Client()
            >>> client.create_model("digits", "Reads handwritten digits")["name"]
            'digits'
        """
        body = {"name": name, "description": description, "project": project}
        response = self.post("/models", body)
        return Model(self, resource(response, "model"))

    def register_version(self, name: str, checkpoint: str, notes: str = "") -> Model:
        """Make a checkpoint the next version of a model.

        Retention then keeps the checkpoint.

        Args:
            name: Name of the model.
            checkpoint: Uuid of the checkpoint.
            notes: Notes for readers.

        Returns:
            The model, as in :meth:`model`.

        Raises:
            NotFoundError: If the model does not exist.
            ConfigError: If the checkpoint does not exist, or files of it were removed.

        Example:
            >>> client = zerolab.Client()
            >>> model = client.create_model("best-digits")
            >>> uuid = client.best_checkpoint(1)["checkpoint"]["uuid"]
            >>> model = client.register_version("best-digits", uuid, "first release")
            >>> model["versions"][0]["version"]
            1
        """
        body = {"checkpoint": checkpoint, "notes": notes}
        response = self.post(_path("models", name, "versions"), body)
        return Model(self, resource(response, "model"))

    def put_alias(self, name: str, alias: str, version: int) -> Model:
        """Assign an alias to a version of a model.

        It moves there from its previous version.

        Args:
            name: Name of the model.
            alias: The alias: letters, digits, ``.``, ``_`` or ``-``, and no number.
            version: Number of the version.

        Returns:
            The model, as in :meth:`model`.

        Raises:
            NotFoundError: If the model or the version does not exist.
            ConfigError: If the alias is invalid.

        Example:
            >>> client = zerolab.Client()
            >>> uuid = client.best_checkpoint(1)["checkpoint"]["uuid"]
            >>> model = client.create_model("served-digits").register(uuid)
            >>> client.put_alias("served-digits", "production", 1).version("production")
            ModelVersion(1, checkpoint='...')
        """
        path = _path("models", name, "aliases", alias)
        response = self._send("PUT", path, json={"version": version})
        return Model(self, resource(response.json(), "model"))

    def remove_alias(self, name: str, alias: str) -> None:
        """Remove an alias of a model; its version stays.

        Args:
            name: Name of the model.
            alias: The alias.

        Raises:
            NotFoundError: If it does not exist.

        Example:
            >>> client = zerolab.Client()
            >>> uuid = client.best_checkpoint(1)["checkpoint"]["uuid"]
            >>> model = client.create_model("tried-digits").register(uuid)
            >>> model = client.put_alias("tried-digits", "candidate", 1)
            >>> client.remove_alias("tried-digits", "candidate")
        """
        self._send("DELETE", _path("models", name, "aliases", alias))

    def remove_version(self, name: str, version: int) -> None:
        """Remove a version from the registry; its checkpoint stays.

        Args:
            name: Name of the model.
            version: Number of the version.

        Raises:
            NotFoundError: If it does not exist.

        Example:
            >>> client = zerolab.Client()
            >>> model = client.create_model("old-digits")
            >>> uuid = client.best_checkpoint(1)["checkpoint"]["uuid"]
            >>> model = client.register_version("old-digits", uuid)
            >>> client.remove_version("old-digits", 1)
        """
        self._send("DELETE", _path("models", name, "versions", str(version)))

    def remove_model(self, name: str) -> None:
        """Remove a model from the registry; its checkpoints stay.

        Args:
            name: Name of the model.

        Raises:
            NotFoundError: If it does not exist.

        Example:
            >>> client = zerolab.Client()
            >>> model = client.create_model("mistake")
            >>> client.remove_model("mistake")
        """
        self._send("DELETE", _path("models", name))

    def login_link(self) -> str:
        """Create a link that opens the web page once, without a password.

        Returns:
            The URL; it is valid for five minutes.

        Example:
            >>> client = zerolab.Client()
            >>> client.login_link()
            'http://127.0.0.1:.../login?code=...'
        """
        link = str(self.post("/login-links")["url"])
        return link if "://" in link else f"{self.url}{link}"

    def log_out(self) -> None:
        """Sign out every browser of the token's user.

        Example:
            >>> client = zerolab.Client()
            >>> client.log_out()
        """
        self._send("POST", "/logout")

    def renew_token(self) -> str:
        """Replace the token of the server, and return the new one.

        The old token is invalid from then on. Call :meth:`use_token` to use the new one here.

        Returns:
            The new token.

        Example:
            >>> client = zerolab.Client()
            >>> client.use_token(client.renew_token())
        """
        return str(self.post("/token")["token"])

    def agent_token(self, *, renew: bool = False) -> str:
        """Return the join token of agents.

        Args:
            renew: Replace the token first; the old one is invalid from then on.

        Returns:
            The token, for ``zerolab agent start`` on other machines.

        Example:
            >>> client = zerolab.Client()
            >>> client.agent_token() == client.agent_token()
            True
        """
        response = self.post("/agent-token") if renew else self.get("/agent-token")
        return str(response["token"])

    # -- users -------------------------------------------------------------------------------

    def whoami(self) -> Json:
        """Return the user to whom the token belongs.

        Returns:
            ``user``, ``role`` (``viewer``, ``member`` or ``admin``), ``expires_at`` (str or None)
            of the token, and ``shared`` (bool): whether the installation has several users.

        Example:
            >>> client = zerolab.Client()
            >>> client.whoami()["user"], client.whoami()["role"]
            ('admin', 'admin')
        """
        return self.get("/whoami")

    def users(self) -> list[Json]:
        """List the users, sorted by name.

        Returns:
            One dict per user: ``name``, ``role``, ``active`` (bool), ``weight`` and
            ``created_at``.

        Example:
            >>> client = zerolab.Client()
            >>> [user["name"] for user in client.users()]
            ['admin']
        """
        return self._unpaged_list("/users", "users")

    def create_user(self, name: str, role: str) -> Json:
        """Create a user, who has no token yet.

        Args:
            name: Lower-case letters, digits and ``. _ @ -``.
            role: ``viewer``, ``member`` or ``admin``.

        Returns:
            The user, as in :meth:`users`.

        Raises:
            ConfigError: If the name or the role is invalid.
            ConflictError: If the user exists already.

        Example:
            >>> client = zerolab.Client()
            >>> client.create_user("ann", "member")["active"]
            True
        """
        return resource(self.post("/users", {"name": name, "role": role}), "user")

    def patch_user(
        self,
        name: str,
        *,
        role: str | None = None,
        active: bool | None = None,
        weight: float | None = None,
    ) -> Json:
        """Change the role or weight of a user, or deactivate one.

        Args:
            name: Name of the user.
            role: New role; None to keep it.
            active: False revokes all tokens and browser sessions of the user; None to keep it.
            weight: Share of the slots, relative to other users; None to keep it.

        Returns:
            The user, as in :meth:`users`.

        Raises:
            NotFoundError: If there is no such user.
            ConflictError: If it is the first administrator.

        Example:
            >>> client = zerolab.Client()
            >>> user = client.create_user("bob", "viewer")
            >>> client.patch_user("bob", role="member")["role"]
            'member'
        """
        changes = {"role": role, "active": active, "weight": weight}
        body = {key: value for key, value in changes.items() if value is not None}
        return resource(self._send("PATCH", _path("users", name), json=body).json(), "user")

    def changes(self, **filters: str | int | None) -> list[Json]:
        """List the changes that users made, newest first; for administrators.

        Args:
            filters: ``user`` (name), ``limit`` (one page of that size).

        Returns:
            One dict per change: ``id``, ``time``, ``user``, ``token_id`` (0 for the token of the
            installation), and ``action``, the method and path of the request.

        Example:
            >>> client = zerolab.Client()
            >>> user = client.create_user("eve", "viewer")
            >>> client.changes(limit=1)[0]["action"]
            'POST /users'
        """
        return self._list("/audit", "changes", filters)

    def usage(self, by: str = "user", month: str | None = None) -> Json:
        """Return slot-hours in a month, and the disk usage now.

        Args:
            by: ``user``, ``project``, ``label`` or ``pool``.
            month: ``YYYY-MM``, in UTC; None for the current one.

        Returns:
            ``month``, ``by`` and ``usage``: a list of dicts with ``name``, ``experiments``,
            ``slot_hours`` and ``disk_bytes``, the largest first.

        Raises:
            ConfigError: If a value is invalid.

        Example:
            >>> client = zerolab.Client()
            >>> client.usage(by="pool", month="2020-01")["month"]
            '2020-01'
        """
        params = {"by": by} if month is None else {"by": by, "month": month}
        return self.get("/usage", **params)

    def set_password(self, user: str, password: str | None, *, current: str | None = None) -> None:
        """Set the password of a user for the web page.

        All browser sessions of the user end.

        Args:
            user: Name of the user.
            password: At least 12 characters; None for no sign-in with a password.
            current: Current password, needed with a token that expires.

        Raises:
            ConfigError: If the password is too short.
            ForbiddenError: If the current password is needed and wrong.

        Example:
            >>> client = zerolab.Client()
            >>> client.set_password("admin", "correct horse battery")
            >>> client.set_password("admin", None)
        """
        body = {"password": password, "current_password": current}
        self._send("PUT", f"{_path('users', user)}/password", json=body)

    def tokens(self, user: str | None = None) -> list[Json]:
        """List the API tokens of a user, without their secrets.

        Args:
            user: Name of the user; None for the owner of the token in use.

        Returns:
            One dict per token: ``id``, ``name``, ``created_at``, ``expires_at`` and
            ``last_used_at`` (str or None).

        Raises:
            NotFoundError: If there is no such user.

        Example:
            >>> client = zerolab.Client()
            >>> client.tokens("admin")
            []
        """
        return self._unpaged_list(
            f"{_path('users', user or self.whoami()['user'])}/tokens", "tokens"
        )

    def create_token(
        self, user: str | None = None, *, name: str = "", expires_s: float | None = None
    ) -> Json:
        """Create an API token of a user.

        Args:
            user: Name of the user; None for the owner of the token in use.
            name: What the token is for.
            expires_s: Validity in seconds; None for no end.

        Returns:
            ``secret``, the token, which no later response contains, and ``token``, as in
            :meth:`tokens`.

        Raises:
            NotFoundError: If there is no such user.
            ConflictError: If the user is not active.

        Example:
            >>> client = zerolab.Client()
            >>> created = client.create_token("admin", name="laptop", expires_s=3600)
            >>> client.revoke_token(created["token"]["id"], "admin")
        """
        path = f"{_path('users', user or self.whoami()['user'])}/tokens"
        return self.post(path, {"name": name, "expires_s": expires_s})

    def revoke_token(self, token_id: int, user: str | None = None) -> None:
        """Revoke an API token, and the browser sessions opened with it.

        Args:
            token_id: Id of the token.
            user: Name of its user; None for the owner of the token in use.

        Raises:
            NotFoundError: If the user has no such token.

        Example:
            >>> client = zerolab.Client()
            >>> created = client.create_token("admin")
            >>> client.revoke_token(created["token"]["id"], "admin")
        """
        path = f"{_path('users', user or self.whoami()['user'])}/tokens/{token_id}"
        self._send("DELETE", path)

    # -- experiments -------------------------------------------------------------------------

    def create_experiment(
        self,
        config: Mapping[str, Any],
        archive: bytes | str | Path,
        *,
        activate: bool = True,
        test: bool = False,
    ) -> Experiment:
        """Submit an experiment and its model directory.

        Args:
            config: Content of the experiment file. Tuples, paths, numbers and arrays of numpy, and
                OmegaConf nodes are converted.
            archive: The model directory: its path, the path of an archive, or the result of
                :func:`zerolab.client.archive.pack`.
            activate: Start it; otherwise it is paused.
            test: Run one batch, one validation and one checkpoint only.

        Returns:
            The experiment, as in :meth:`experiment`; with ``warnings``, if there are any.

        Raises:
            ConfigError: If ``config`` or its engine configuration is invalid, with all problems; or
                if a text is not valid UTF-8.

        Example:
            >>> client = zerolab.Client()
            >>> config = {
            ...     "name": "one-run",
            ...     "entrypoint": "python train.py",
            ...     "hyperparameters": {"lr": 0.1},
            ...     "searcher": {"name": "single", "metric": "loss"},
            ... }
            >>> experiment = client.create_experiment(config, "model", activate=False)
            >>> experiment["name"], experiment["state"]
            ('one-run', 'PAUSED')
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
        return Experiment(self, resource(response.json(), "experiment"))

    def submit(
        self,
        source: str | Path | bytes | Mapping[str, str | bytes] | Callable[..., Any],
        config: Mapping[str, Any],
        *,
        activate: bool = True,
        test: bool = False,
    ) -> Experiment:
        """Submit code and a configuration as an experiment.

        Args:
            source: Directory with the model's code, an archive of
                :func:`zerolab.client.archive.pack`, a mapping of file names to contents, or a
                function. The experiment calls the function with its hyperparameters as keyword
                arguments. Its module is uploaded, or the statements of its notebook cell that it
                needs; defaults of its parameters become hyperparameters.
            config: Content of the experiment file; without ``entrypoint`` for a function.
            activate: Start it; otherwise it is paused.
            test: Run one batch, one validation and one checkpoint only.

        Returns:
            The experiment.

        Raises:
            ConfigError: If the code or ``config`` is invalid, with all problems.

        Example:
            >>> client = zerolab.Client()
            >>> config = {
            ...     "name": "from-a-text",
            ...     "entrypoint": "python train.py",
            ...     "searcher": {"name": "single"},
            ... }
            >>> client.submit({"train.py": "print('training')"}, config).name
            'from-a-text'
        """
        from zerolab.client.submission import read_source

        archive, config = read_source(source, config)
        return self.create_experiment(config, archive, activate=activate, test=test)

    def preview(self, config: Mapping[str, Any], **times: float | None) -> Json:
        """Estimate a search's trials and cost (dry run).

        Args:
            config: Content of the experiment file.
            times: ``seconds_per_batch``, ``seconds_per_epoch`` or ``like`` (id of an experiment),
                if known.

        Returns:
            ``outline`` (str), ``trials``, ``lengths`` (a list of dicts with ``length`` and
            ``trials``), ``total_length``, ``most_length``, ``slot_hours``, ``premise`` and
            ``warnings``. Unknown numbers are None.

        Raises:
            ConfigError: If ``config`` is invalid.

        Example:
            >>> client = zerolab.Client()
            >>> config = {
            ...     "entrypoint": "python train.py",
            ...     "hyperparameters": {"lr": {"type": "log", "minval": -4, "maxval": -1}},
            ...     "searcher": {"name": "random", "metric": "loss", "max_trials": 8,
            ...                  "max_length": {"batches": 900}},
            ... }
            >>> preview = client.preview(config, seconds_per_batch=0.5)
            >>> preview["trials"], preview["total_length"], preview["slot_hours"]
            (8, 7200, 1.0)
        """
        body = {"config": _to_json(dict(config)), **times}
        return resource(self.post("/experiments/preview", body), "preview")

    def search_events(self, experiment_id: int, after: int, wait_s: float) -> Json:
        """Wait for events of an external searcher, and return them.

        :func:`zerolab.client.search.serve` calls it for a Python class.

        Args:
            experiment_id: Id of an experiment with ``searcher.name: custom``.
            after: Id of the last handled event; 0 at the start.
            wait_s: Maximum wait for an event, in seconds.

        Returns:
            ``events``: a list of dicts with ``id``, ``kind`` (``created``, ``validated``,
            ``exited`` or ``exited_early``), ``trial_id``, ``metric``, ``length`` and ``reason``;
            ``handled`` (int) and ``over`` (bool).

        Raises:
            NotFoundError: If the experiment does not exist.

        Example:
            >>> client = zerolab.Client()
            >>> config = {"entrypoint": "python train.py", "hyperparameters": {"lr": 0.1},
            ...           "searcher": {"name": "custom", "metric": "loss", "max_length": 10}}
            >>> experiment = client.create_experiment(config, "model")
            >>> client.search_events(experiment["id"], after=0, wait_s=0)["events"]
            []
        """
        params = {"after": after, "wait_s": wait_s}
        path = f"/experiments/{experiment_id}/searcher/events"
        response: Json = self._get(path, params, extra_s=wait_s).json()
        return response

    def search_operations(self, experiment_id: int, body: Mapping[str, Any]) -> Json:
        """Send operations of an external searcher; repeated calls have no further effect.

        Args:
            experiment_id: Id of an experiment with ``searcher.name: custom``.
            body: ``after`` and ``handled`` (ids of events), ``operations`` (a list of dicts with
                ``kind``), and ``progress`` (0 to 1, optional).

        Returns:
            ``handled``: id of the last event that operations have handled.

        Raises:
            NotFoundError: If the experiment does not exist.
            ConflictError: If its searcher is not ``custom``.
            ConfigError: If an operation is invalid.

        Example:
            >>> client = zerolab.Client()
            >>> config = {"entrypoint": "python train.py", "hyperparameters": {"lr": 0.1},
            ...           "searcher": {"name": "custom", "metric": "loss", "max_length": 10}}
            >>> experiment = client.create_experiment(config, "model")
            >>> create = {"kind": "create", "trial_id": 1, "hparams": {"lr": 0.1}, "trial_seed": 0}
            >>> body = {"after": -1, "handled": 0, "operations": [create]}
            >>> client.search_operations(experiment["id"], body)["handled"]
            0
        """
        path = f"/experiments/{experiment_id}/searcher/operations"
        return self.post(path, body, repeatable=True)

    def searcher(self, experiment_id: int) -> Json:
        """Return the state of a search and its trials.

        Args:
            experiment_id: Id of the experiment.

        Returns:
            ``name``, ``unit``, ``metric``, ``smaller_is_better``, ``done``, ``progress`` (0 to 1),
            and ``brackets``, a list of dicts with ``trials`` and ``rungs``. Empty ``brackets``: the
            searcher does not compare trials during training.

        Raises:
            NotFoundError: If the experiment does not exist.

        Example:
            >>> client = zerolab.Client()
            >>> client.searcher(1)["name"], client.searcher(1)["done"]
            ('grid', True)
        """
        return resource(self.get(f"/experiments/{experiment_id}/searcher"), "searcher")

    def experiments(self, **filters: str | int | bool | None) -> ObjectList[Experiment]:
        """List experiments, the newest first.

        Args:
            filters: ``state``, ``name`` (a part of it), ``label``, ``user`` (the owner),
                ``project`` (its name), ``archived`` (bool), ``sort`` (a field, with ``-`` before it
                for descending order), ``limit`` (one page of that size).

        Returns:
            One dict per experiment, as in :meth:`experiment`.

        Raises:
            ConfigError: If a filter is unknown or invalid.

        Example:
            >>> client = zerolab.Client()
            >>> [experiment["name"] for experiment in client.experiments(state="COMPLETED")]
            ['digits']
        """
        items = self._list("/experiments", "experiments", filters)
        return ObjectList(Experiment(self, item) for item in items)

    def experiment(self, experiment_id: int) -> Experiment:
        """Return an experiment by its id.

        Args:
            experiment_id: Id of the experiment.

        Returns:
            ``id``, ``name``, ``state`` (``ACTIVE``, ``PAUSED``, ``STOPPING_...``, ``COMPLETED``,
            ``CANCELED`` or ``ERROR``), ``config`` (complete, with defaults), ``progress`` (0 to 1),
            ``num_trials``, ``failed_trials``, ``best_trial_id``, ``best_validation``,
            ``waiting_reason``, ``error``, and the other fields of the REST reference.

        Raises:
            NotFoundError: If it does not exist.

        Example:
            >>> client = zerolab.Client()
            >>> experiment = client.experiment(1)
            >>> experiment["state"], experiment["num_trials"], experiment["best_validation"]
            ('COMPLETED', 2, 0.01)
        """
        response = self.get(f"/experiments/{experiment_id}")
        return Experiment(self, resource(response, "experiment"))

    def patch_experiment(self, experiment_id: int, **changes: Any) -> Experiment:
        """Change an experiment's name, description, labels, notes or project.

        Args:
            experiment_id: Id of the experiment.
            changes: ``name``, ``description``, ``notes`` (str), ``labels`` (list of str),
                ``archived`` (bool), ``project`` (name of an existing project).

        Returns:
            The experiment, as in :meth:`experiment`.

        Raises:
            NotFoundError: If it does not exist.
            ConfigError: If a value is invalid.

        Example:
            >>> client = zerolab.Client()
            >>> client.patch_experiment(1, labels=["baseline"], notes="first try")["labels"]
            ['baseline']
        """
        path = f"/experiments/{experiment_id}"
        response = self._send("PATCH", path, json=changes).json()
        return Experiment(self, resource(response, "experiment"))

    def delete_experiment(self, experiment_id: int) -> None:
        """Delete an experiment that has ended, with everything that belongs to it.

        Args:
            experiment_id: Id of the experiment.

        Raises:
            NotFoundError: If it does not exist.
            ConflictError: If it has not ended, or a model of the registry needs a checkpoint of it.

        Example:
            >>> client = zerolab.Client()
            >>> config = {"entrypoint": "python train.py", "hyperparameters": {"lr": 0.1},
            ...           "searcher": {"name": "single", "metric": "loss"}}
            >>> experiment = client.create_experiment(config, "model", activate=False)
            >>> experiment = client.experiment_action(experiment["id"], "kill")
            >>> client.delete_experiment(experiment["id"])
        """
        self._send("DELETE", f"/experiments/{experiment_id}")

    def experiment_action(
        self, experiment_id: int, action: str, body: Mapping[str, Any] | None = None
    ) -> Experiment:
        """Pause, activate, cancel, kill, continue, archive, unarchive or fork an experiment.

        Args:
            experiment_id: Id of the experiment.
            action: Name of the action.
            body: For ``continue`` and ``fork``: ``config`` overrides and ``activate``.

        Returns:
            The experiment; the new one for ``fork``.

        Raises:
            NotFoundError: If the experiment does not exist.
            ConfigError: If the action is unknown.
            ConflictError: If its state does not allow it; the message states the remedy.

        Example:
            >>> client = zerolab.Client()
            >>> overrides = {"config": {"name": "digits-2"}, "activate": False}
            >>> client.experiment_action(1, "fork", overrides)["name"]
            'digits-2'
        """
        response = self.post(f"/experiments/{experiment_id}/{action}", body)
        return Experiment(self, resource(response, "experiment"))

    def trials(self, experiment_id: int, **filters: Any) -> ObjectList[Trial]:
        """List the trials of an experiment, the oldest first.

        Args:
            experiment_id: Id of the experiment.
            filters: ``state``, ``archived`` (bool), ``sort`` (``metric`` for the best first, or a
                column such as ``-hparams.lr``), ``where`` (conditions, as for
                :meth:`Experiment.trials <zerolab.client.objects.Experiment.trials>`), ``limit``.

        Returns:
            The trials, as in :meth:`trial`; ``to_pandas()`` makes a table of them.

        Raises:
            NotFoundError: If the experiment does not exist.
            ConfigError: If a filter is unknown or invalid.

        Example:
            >>> client = zerolab.Client()
            >>> [(trial["hparams"]["lr"], trial["best_validation"]) for trial in client.trials(1)]
            [(0.1, 0.01), (0.2, 0.02)]
        """
        if not isinstance(filters.get("where"), str | None):
            filters["where"] = msgspec.json.encode(filters["where"], enc_hook=_to_json).decode()
        items = self._list(f"/experiments/{experiment_id}/trials", "trials", filters)
        return ObjectList(Trial(self, item) for item in items)

    def trial(self, trial_id: int) -> Trial:
        """Return a trial by its id.

        Args:
            trial_id: Id of the trial, unique over all experiments.

        Returns:
            ``id``, ``experiment_id``, ``state`` (``QUEUED``, ``RUNNING``, ``STOPPING``, ``PAUSED``,
            ``COMPLETED``, ``CANCELED`` or ``ERROR``), ``hparams``, ``seed``, ``steps_completed``,
            ``progress`` (0 to 1), ``best_validation``, ``latest_checkpoint``, ``best_checkpoint``
            (uuid or None), ``slot_seconds``, ``error``, and the other fields of the REST reference.

        Raises:
            NotFoundError: If it does not exist.

        Example:
            >>> client = zerolab.Client()
            >>> client.trial(1)["steps_completed"]
            10
        """
        return Trial(self, resource(self.get(f"/trials/{trial_id}"), "trial"))

    def trial_action(
        self, trial_id: int, action: str, body: Mapping[str, Any] | None = None
    ) -> Trial | Experiment:
        """Pause, activate, cancel, kill, continue, archive, unarchive or fork one trial.

        Args:
            trial_id: Id of the trial.
            action: Name of the action.
            body: For ``fork``, as for an experiment.

        Returns:
            The trial; the new experiment for ``fork``.

        Raises:
            NotFoundError: If the trial does not exist.
            ConfigError: If the action is unknown.
            ConflictError: If its state does not allow it; the message states the remedy.

        Example:
            >>> client = zerolab.Client()
            >>> client.trial_action(1, "archive")["archived"]
            True
        """
        response = self.post(f"/trials/{trial_id}/{action}", body)
        if action == "fork":
            return Experiment(self, resource(response, "experiment"))
        return Trial(self, resource(response, "trial"))

    def delete_trial(self, trial_id: int) -> None:
        """Delete a trial and all its data; its experiment must have ended.

        Args:
            trial_id: Id of the trial.

        Raises:
            NotFoundError: If it does not exist.
            ConflictError: If its experiment has not ended, or a checkpoint of it is needed.

        Example:
            >>> client = zerolab.Client()
            >>> try:
            ...     client.delete_trial(1000)
            ... except zerolab.errors.NotFoundError as error:
            ...     print(error)
            there is no trial 1000
        """
        self._send("DELETE", f"/trials/{trial_id}")

    def kill_trial(self, trial_id: int) -> Trial:
        """Stop a trial immediately, without a checkpoint.

        A trial that has ended stays unchanged.

        Args:
            trial_id: Id of the trial.

        Returns:
            The trial, as in :meth:`trial`.

        Raises:
            NotFoundError: If it does not exist.

        Example:
            >>> client = zerolab.Client()
            >>> trial = client.trials(2)[0]
            >>> client.kill_trial(trial["id"])["state"]
            'CANCELED'
        """
        return Trial(self, self.trial_action(trial_id, "kill"))

    def metric_names(self, trial_id: int) -> list[Json]:
        """List the metrics that a trial has reported.

        Args:
            trial_id: Id of the trial.

        Returns:
            One dict per metric: ``group`` and ``name``.

        Raises:
            NotFoundError: If the trial does not exist.

        Example:
            >>> client = zerolab.Client()
            >>> [metric for metric in client.metric_names(1) if metric["group"] != "system"]
            [{'group': 'training', 'name': 'loss'}, {'group': 'validation', 'name': 'loss'}]
        """
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
        """Return the curves of a trial's metrics.

        Args:
            trial_id: Id of the trial.
            group: ``training``, ``validation`` or ``system``; None for all.
            names: Names of the metrics; all by default.
            max_points: Maximum number of points per curve; neighboring points are merged.
            first: First step; None for the beginning.

        Returns:
            One dict per metric: ``group``, ``name``, ``points`` (a list of ``[step, value]``, the
            mean of merged points), ``band`` (``[step, minimum, maximum, mean]`` of merged points,
            or None), and ``values_removed`` (whether the retention of metrics removed values).

        Raises:
            NotFoundError: If the trial does not exist.

        Example:
            >>> client = zerolab.Client()
            >>> client.metrics(1, "validation", ["loss"])[0]["points"]
            [[10, 0.01]]
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
        """Stream a file with all points of an experiment.

        Args:
            experiment_id: Id of the experiment.
            params: ``format`` (``ndjson`` or ``csv``), ``group``.

        Yields:
            Pieces of the file. A line has trial, group, name, step, value and time (seconds since
            1970).

        Raises:
            NotFoundError: If the experiment does not exist.

        Example:
            >>> client = zerolab.Client()
            >>> file = b"".join(client.export_metrics(1, format="csv", group="validation"))
            >>> file.decode().splitlines()[0]
            'trial_id,group,name,step,value,time_s'
        """
        path = f"{PREFIX}/experiments/{experiment_id}/metrics/export"
        yield from self._download(path, params)

    def metric_series(
        self,
        experiment_id: int,
        group: str | None = None,
        names: Sequence[str] = (),
        trial_id: int | None = None,
    ) -> Iterator[MetricSeries]:
        """Stream the points of an experiment's metrics, some thousand at a time.

        Args:
            experiment_id: Id of the experiment.
            group: ``training``, ``validation`` or ``system``; None for all.
            names: Names of the metrics; all by default.
            trial_id: Only this trial of the experiment; None for all.

        Yields:
            Points of one metric of one trial: ``trial_id``, ``group``, ``name``, ``steps``,
            ``values``, ``times`` (seconds since 1970), and ``problem`` if the server cannot read
            the points. A long metric has several.

        Raises:
            NotFoundError: If the experiment does not exist.

        Example:
            >>> client = zerolab.Client()
            >>> [list(series.values) for series in client.metric_series(1, "validation")]
            [[0.01], [0.02]]
        """
        path = f"{PREFIX}/experiments/{experiment_id}/metrics/export"
        params: dict[str, Any] = {"format": "columns", "group": group, "name": list(names)}
        params["trial_id"] = trial_id
        with self._stream(path, params=drop_none(params)) as response:
            yield from read_series(response.iter_bytes())

    def experiment_checkpoints(self, experiment_id: int) -> ObjectList[Checkpoint]:
        """List the checkpoints of an experiment.

        Args:
            experiment_id: Id of the experiment.

        Returns:
            One dict per checkpoint, as in :meth:`checkpoint`.

        Raises:
            NotFoundError: If the experiment does not exist.

        Example:
            >>> client = zerolab.Client()
            >>> sum(checkpoint["size_bytes"] for checkpoint in client.experiment_checkpoints(1))
            14
        """
        return self._checkpoints(f"/experiments/{experiment_id}/checkpoints")

    def checkpoint_totals(self, experiment_id: int) -> tuple[int, int]:
        """Return the number of an experiment's checkpoints, and their size.

        Args:
            experiment_id: Id of the experiment.

        Returns:
            Number of checkpoints, and bytes of all their files.

        Raises:
            NotFoundError: If the experiment does not exist.

        Example:
            >>> client = zerolab.Client()
            >>> client.checkpoint_totals(1)
            (2, 14)
        """
        page = self.get(f"/experiments/{experiment_id}/checkpoints", limit=1)
        return int(page["count"]), int(page["size_bytes"])

    def trial_checkpoints(self, trial_id: int) -> ObjectList[Checkpoint]:
        """List the checkpoints of a trial.

        Args:
            trial_id: Id of the trial.

        Returns:
            One dict per checkpoint, as in :meth:`checkpoint`.

        Raises:
            NotFoundError: If the trial does not exist.

        Example:
            >>> client = zerolab.Client()
            >>> client.trial_checkpoints(1)[0]["steps_completed"]
            10
        """
        return self._checkpoints(f"/trials/{trial_id}/checkpoints")

    def _checkpoints(self, path: str) -> ObjectList[Checkpoint]:
        return ObjectList(Checkpoint(self, item) for item in self._list(path, "checkpoints"))

    def best_checkpoint(self, experiment_id: int) -> Json:
        """Return the best checkpoint of an experiment.

        Args:
            experiment_id: Id of the experiment.

        Returns:
            ``checkpoint`` (as in :meth:`checkpoint`, None if no checkpoint has a validation at its
            step), its ``validation`` (the searcher's metric), and ``note`` (str or None).

        Raises:
            NotFoundError: If the experiment does not exist.

        Example:
            >>> client = zerolab.Client()
            >>> best = client.best_checkpoint(1)
            >>> best["checkpoint"]["trial_id"], best["validation"]
            (1, 0.01)
        """
        response = self.get(f"/experiments/{experiment_id}/best-checkpoint")
        return resource(response, "best_checkpoint")

    def trial_best_checkpoint(self, trial_id: int) -> Json:
        """Return the best checkpoint of a trial.

        Args:
            trial_id: Id of the trial.

        Returns:
            The dict of :meth:`best_checkpoint`.

        Raises:
            NotFoundError: If the trial does not exist.

        Example:
            >>> client = zerolab.Client()
            >>> client.trial_best_checkpoint(2)["validation"]
            0.02
        """
        return resource(self.get(f"/trials/{trial_id}/best-checkpoint"), "best_checkpoint")

    def checkpoint(self, uuid: str) -> Checkpoint:
        """Return a checkpoint by its uuid.

        Args:
            uuid: Uuid of the checkpoint.

        Returns:
            ``uuid``, ``trial_id``, ``experiment_id``, ``steps_completed``, ``state``
            (``COMPLETED``, ``PARTIAL``, ``DELETED`` or ``ERROR``), ``size_bytes``, ``resources``
            (file name to bytes), ``metadata``, ``metrics`` and ``path``.

        Raises:
            NotFoundError: If it does not exist.

        Example:
            >>> client = zerolab.Client()
            >>> uuid = client.trial(1)["best_checkpoint"]
            >>> client.checkpoint(uuid)["resources"]
            {'model.txt': 7}
        """
        return Checkpoint(self, resource(self.get(_path("checkpoints", uuid)), "checkpoint"))

    def checkpoint_file(self, uuid: str, name: str, first: int = 0) -> Iterator[bytes]:
        """Stream a file of a checkpoint.

        Args:
            uuid: Uuid of the checkpoint.
            name: Path of the file inside the checkpoint.
            first: First byte to send.

        Yields:
            Pieces of the file.

        Raises:
            NotFoundError: If the checkpoint or the file does not exist.

        Example:
            >>> client = zerolab.Client()
            >>> uuid = client.trial(1)["best_checkpoint"]
            >>> b"".join(client.checkpoint_file(uuid, "model.txt"))
            b'weights'
        """
        path = f"{PREFIX}/checkpoints/{uuid}/file"
        yield from self._download(path, {"name": name, "first": first})

    # -- media -------------------------------------------------------------------------------

    def media_names(self, trial_id: int) -> list[Json]:
        """List the names of a trial's media.

        Args:
            trial_id: Id of the trial.

        Returns:
            One dict per name: ``name``, ``type`` (``image``, ``table``, ``text``, ``histogram``,
            ``audio`` or ``file``), ``count``, ``first_step``, ``last_step``, and ``size`` in bytes.

        Raises:
            NotFoundError: If the trial does not exist.

        Example:
            >>> client = zerolab.Client()
            >>> [(entry["name"], entry["count"]) for entry in client.media_names(1)]
            [('sample', 1)]
        """
        return self._unpaged_list(f"/trials/{trial_id}/media/names", "names")

    def media(
        self, trial_id: int, *, name: str | None = None, step: int | None = None
    ) -> list[Json]:
        """List the media of a trial, sorted by name, step and position.

        Args:
            trial_id: Id of the trial.
            name: Only media of this name.
            step: Only media of this step.

        Returns:
            One dict per medium: ``name``, ``step``, ``position``, ``type``, ``digest``, ``size``,
            ``file_name``, ``metadata`` and ``time``.

        Raises:
            NotFoundError: If the trial does not exist.

        Example:
            >>> client = zerolab.Client()
            >>> client.media(1, name="sample")[0]["file_name"]
            'sample-10.png'
        """
        return self._list(f"/trials/{trial_id}/media", "media", {"name": name, "step": step})

    def media_file(self, trial_id: int, digest: str) -> Iterator[bytes]:
        """Stream the content of a medium.

        Args:
            trial_id: Id of the trial.
            digest: ``digest`` of the medium; a histogram has none, as its ``metadata`` is all.

        Yields:
            Pieces of the file.

        Raises:
            NotFoundError: If the trial has no such medium, or its file is not stored (yet).

        Example:
            >>> client = zerolab.Client()
            >>> sample = client.media(1, name="sample")[0]
            >>> len(b"".join(client.media_file(1, sample["digest"]))) == sample["size"]
            True
        """
        yield from self._download(f"{PREFIX}/trials/{trial_id}/media/{digest}", {})

    def delete_media(
        self, trial_id: int, *, name: str | None = None, step: int | None = None
    ) -> Json:
        """Delete all media of an ended trial, or some of them.

        Args:
            trial_id: Id of the trial.
            name: Only media of this name.
            step: Only media of this step.

        Returns:
            ``count`` and ``size`` (bytes) of the deleted media.

        Raises:
            NotFoundError: If the trial does not exist.
            ConflictError: If the trial has not ended.

        Example:
            >>> client = zerolab.Client()
            >>> client.delete_media(2, name="sample")["count"]
            1
        """
        selection = {"name": name, "step": step}
        params = {key: value for key, value in selection.items() if value is not None}
        response: Json = self._send("DELETE", f"/trials/{trial_id}/media", params=params).json()
        return response

    def remove_checkpoints(
        self, uuids: Sequence[str], globs: Sequence[str] = (), *, dry_run: bool = False
    ) -> Json:
        """Remove checkpoints, or some of their files.

        Args:
            uuids: Uuids of the checkpoints.
            globs: Patterns of files to remove; empty removes all files.
            dry_run: Change nothing.

        Returns:
            ``dry_run``; ``checkpoints``, a list of dicts with ``uuid``, ``trial_id``,
            ``steps_completed``, ``whole`` (bool), ``files`` and ``size_bytes``; and ``size_bytes``
            of all removed files.

        Raises:
            NotFoundError: If a checkpoint does not exist.
            ConflictError: If a checkpoint is still needed, for example by a model of the registry.

        Example:
            >>> client = zerolab.Client()
            >>> uuid = client.trial(2)["latest_checkpoint"]
            >>> client.remove_checkpoints([uuid], dry_run=True)["size_bytes"]
            7
        """
        body = {"uuids": list(uuids), "globs": list(globs), "dry_run": dry_run}
        return self.post("/checkpoints/remove", body)

    def collect_checkpoints(
        self, experiment_id: int, policy: Mapping[str, int], *, dry_run: bool = False
    ) -> Json:
        """Set an experiment's retention of checkpoints, and apply it.

        Args:
            experiment_id: Id of the experiment.
            policy: ``save_experiment_best``, ``save_trial_best`` and ``save_trial_latest``: numbers
                of checkpoints to keep; missing keys stay unchanged.
            dry_run: Change nothing.

        Returns:
            Removed checkpoints, as in :meth:`remove_checkpoints`.

        Raises:
            NotFoundError: If the experiment does not exist.
            ConfigError: If a number is invalid.

        Example:
            >>> client = zerolab.Client()
            >>> policy = {"save_trial_latest": 0, "save_trial_best": 0}
            >>> client.collect_checkpoints(1, policy, dry_run=True)["dry_run"]
            True
        """
        return self.post(f"/experiments/{experiment_id}/gc", {**policy, "dry_run": dry_run})

    def runs(self, trial_id: int) -> ObjectList[Run]:
        """List the runs of a trial, the oldest first.

        Args:
            trial_id: Id of the trial.

        Returns:
            One dict per run: ``id``, ``state`` (``ASSIGNED``, ``RUNNING`` or ``EXITED``),
            ``agents`` (names), ``created_at``, ``started_at``, ``ended_at``, ``exit_code``,
            ``reason`` and ``failed`` (bool).

        Raises:
            NotFoundError: If the trial does not exist.

        Example:
            >>> client = zerolab.Client()
            >>> [(run["state"], run["exit_code"]) for run in client.runs(1)]
            [('EXITED', 0)]
        """
        items = self._unpaged_list(f"/trials/{trial_id}/runs", "runs")
        return ObjectList(Run(self, item) for item in items)

    def trial_logs(self, trial_id: int, **filters: str | int | None) -> Json:
        """Return a page of a trial's log lines.

        Args:
            trial_id: Id of the trial.
            filters: ``tail`` (last N lines), ``after`` (id of a line), ``limit``, ``level`` (the
                least), ``rank``.

        Returns:
            ``logs``: a list of dicts with ``id``, ``text``, ``time``, ``rank``, ``stream``
            (``stdout``, ``stderr``, ``agent`` or ``server``), ``level`` and ``host``.
            ``next_after``: value of ``after`` for the next page; None on the last page.

        Raises:
            NotFoundError: If the trial does not exist.

        Example:
            >>> client = zerolab.Client()
            >>> [line["text"] for line in client.trial_logs(1, tail=1)["logs"]]
            ['trained 10 batches']
        """
        return self.get(f"/trials/{trial_id}/logs", **filters)

    def experiment_logs(self, experiment_id: int, **filters: str | int | None) -> Json:
        """Return a page of the log lines of an experiment's trials.

        Args:
            experiment_id: Id of the experiment.
            filters: As for :meth:`trial_logs`.

        Returns:
            ``logs`` and ``next_after``, as for :meth:`trial_logs`.

        Raises:
            NotFoundError: If the experiment does not exist.

        Example:
            >>> client = zerolab.Client()
            >>> len(client.experiment_logs(1)["logs"])
            2
        """
        return self.get(f"/experiments/{experiment_id}/logs", **filters)

    def events(
        self, experiment_id: int | None = None, *, after: str | None = None
    ) -> Iterator[Event]:
        """Stream events until the connection ends.

        Call it again with the id of the last event to continue.

        Args:
            experiment_id: Id of the experiment; None for all experiments.
            after: Id of the last known event; None begins with the present state.

        Yields:
            Events with ``id``, ``name`` (``experiment``, ``trial``, ``checkpoint``, ``log``,
            ``metric`` or ``cluster``) and ``data`` (the resource).

        Raises:
            NotFoundError: If the experiment does not exist.

        Example:
            >>> client = zerolab.Client()
            >>> for event in client.events(1):
            ...     print(event.name, event.data["state"])
            ...     break
            experiment COMPLETED
        """
        path = "/events" if experiment_id is None else f"/experiments/{experiment_id}/events"
        headers = {"Accept": "text/event-stream"}
        if after is not None:
            headers["Last-Event-ID"] = after
        with self._stream(PREFIX + path, headers=headers, endless=True) as response:
            yield from parse_events(response.iter_lines())

    def import_metrics(self, content: bytes, project: str | None = None) -> Experiment:
        """Import the metrics file of a run without a server.

        Args:
            content: Content of ``metrics.jsonl``.
            project: Name of its project; None for that of its configuration, or ``default``.

        Returns:
            The experiment with these metrics, as in :meth:`experiment`.

        Raises:
            ConfigError: If the content is not a metrics file, or there is no such project.
            ConflictError: If the project is archived.

        Example:
            >>> from pathlib import Path
            >>> with zerolab.core.init(directory="run") as context:
            ...     context.train.report_validation_metrics(1, {"loss": 0.5})
            >>> client = zerolab.Client()
            >>> client.import_metrics(Path("run/metrics.jsonl").read_bytes())["best_validation"]
            0.5
        """
        headers = {"Content-Type": "application/x-ndjson"}
        response = self._send(
            "POST",
            "/import",
            params=drop_none({"project": project}),
            content=content,
            headers=headers,
        )
        return Experiment(self, resource(response.json(), "experiment"))

    def import_medium(self, experiment_id: int, digest: str, content: bytes) -> None:
        """Send the content of a medium of an imported run.

        Args:
            experiment_id: Id of the imported experiment.
            digest: SHA-256 of the content.
            content: The content, at most 100 MiB.

        Raises:
            NotFoundError: If the experiment has no such medium.
            ConfigError: If ``digest`` is not the SHA-256 of the content.

        Example:
            >>> import hashlib
            >>> client = zerolab.Client()
            >>> client.import_medium(1, hashlib.sha256(b"text").hexdigest(), b"text")
            Traceback (most recent call last):
            zerolab.errors.NotFoundError: experiment 1 has no imported medium 982d9e3eb996
        """
        path = f"/import/{experiment_id}/media/{digest}"
        self._send("PUT", path, content=content, repeatable=True)

    # -- agents ------------------------------------------------------------------------------

    def register_agent(
        self, registration: AgentRegistration, *, use_join_token: bool = False
    ) -> int:
        """Register an agent, or the same agent again.

        Args:
            registration: Name and slots of the agent.
            use_join_token: Send the join token instead of the user's token in later requests.

        Returns:
            Id of the agent.

        Raises:
            ConflictError: If another agent is connected under this name.

        Example:
            >>> from zerolab.contract.messages import AgentRegistration, SlotInfo
            >>> client = zerolab.Client()
            >>> registration = AgentRegistration("host-3", "host-3", [SlotInfo(0, "cpu")], "test")
            >>> client.register_agent(registration)
            3
        """
        response = self._send_typed("/agents", registration).json()
        if use_join_token and response.get("token"):
            self.use_token(str(response["token"]))
        return int(response["agent_id"])

    def work(
        self,
        agent_id: int,
        version: int,
        wait_s: float = 30.0,
        identity: str | None = None,
        load: AgentLoad | None = None,
    ) -> AgentWork:
        """Wait until an agent's work differs from a version; also the heartbeat.

        Args:
            agent_id: Id of the agent.
            version: ``version`` of the last response; 0 at the start.
            wait_s: Maximum wait, in seconds.
            identity: Identity of the registration, if it had one.
            load: New measurements of the machine and its slots.

        Returns:
            ``version``, and all ``runs`` that the agent must start or kill.

        Raises:
            NotFoundError: If the agent does not exist; it must register again.

        Example:
            >>> from zerolab.contract.messages import AgentRegistration, SlotInfo
            >>> client = zerolab.Client()
            >>> registration = AgentRegistration("host-4", "host-4", [SlotInfo(0, "cpu")], "test")
            >>> agent_id = client.register_agent(registration)
            >>> client.work(agent_id, version=0, wait_s=0).runs
            []
        """
        params = {"version": version, "wait_s": wait_s, "identity": identity}
        path = f"/agents/{agent_id}/work"
        if load is None:
            response = self._get(path, params, extra_s=wait_s)
        else:
            response = self._send_typed(path, load, params=params, extra_s=wait_s)
        return msgspec.json.decode(response.content, type=AgentWork)

    def leave(self, agent_id: int, *, done: bool) -> None:
        """Report that an agent accepts no new run.

        Args:
            agent_id: Id of the agent.
            done: Whether its runs have ended and it has left.

        Raises:
            NotFoundError: If the agent does not exist.

        Example:
            >>> from zerolab.contract.messages import AgentRegistration, SlotInfo
            >>> client = zerolab.Client()
            >>> registration = AgentRegistration("host-5", "host-5", [SlotInfo(0, "cpu")], "test")
            >>> agent_id = client.register_agent(registration)
            >>> client.leave(agent_id, done=True)
        """
        self._send_typed(f"/agents/{agent_id}/leave", AgentLeave(done))

    def download_archive(self, path: str) -> bytes:
        r"""Download the files of an experiment by their path on the server.

        Args:
            path: ``/api/v1/experiments/ID/archive``.

        Returns:
            The model directory as tar.gz.

        Raises:
            NotFoundError: If the experiment does not exist.

        Example:
            >>> client = zerolab.Client()
            >>> archive = client.download_archive("/api/v1/experiments/1/archive")
            >>> archive[:2] == b"\x1f\x8b"
            True
        """
        return b"".join(self._download(path, {}))

    def run_started(self, run_id: int) -> None:
        """Report that the processes of a run have started.

        Args:
            run_id: Id of the run.

        Raises:
            StaleRunError: If another run has taken over, or this one has ended.
        """
        self.post(f"/runs/{run_id}/started", repeatable=True)

    def run_exited(self, run_id: int, end: RunExit) -> None:
        """Report that the processes of a run have ended.

        Args:
            run_id: Id of the run.
            end: Exit code and reason.

        Raises:
            NotFoundError: If the run does not exist.
        """
        self._send_typed(f"/runs/{run_id}/exited", end)

    def run_meeting(self, run_id: int, address: RendezvousAddress) -> None:
        """Report the rendezvous address of a run on several agents.

        Args:
            run_id: Id of the run.
            address: Address and port of the agent of node rank 0.

        Raises:
            NotFoundError: If the run has one agent.
            StaleRunError: If another run has taken over, or this one has ended.
        """
        self._send_typed(f"/runs/{run_id}/meeting", address)

    def run_activity(self, run_id: int, text: str) -> None:
        """Report the activity of a run before its ranks start.

        Args:
            run_id: Id of the run.
            text: Short text, shown as the trial's ``activity``.

        Raises:
            StaleRunError: If another run has taken over, or this one has ended.
        """
        self._send_typed(f"/runs/{run_id}/activity", RunActivity(text))

    def ship_logs(self, run_id: int, first: int, entries: Sequence[LogEntry], node: int = 0) -> int:
        """Send numbered log lines of a run.

        Args:
            run_id: Id of the run.
            first: Number of the first line, from 0.
            entries: The lines.
            node: Node rank of the agent, in a run on several agents.

        Returns:
            Number of the next line that the server expects.

        Raises:
            NotFoundError: If the run does not exist.
        """
        response = self._send_typed(f"/runs/{run_id}/logs", LogBatch(first, list(entries), node))
        return msgspec.json.decode(response.content, type=BatchReceipt).stored

    # -- runs --------------------------------------------------------------------------------

    def report(self, run_id: int, body: bytes) -> int:
        """Send reports of a run to the server.

        Args:
            run_id: Id of the run.
            body: A :class:`zerolab.contract.messages.ReportBatch`, encoded as MessagePack.

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
        """Wait until the directive of a run differs from a version.

        Args:
            run_id: Id of the run.
            version: ``version`` of the last response; None returns the current directive.
            wait_s: Maximum wait, in seconds.

        Returns:
            ``action`` (``train``, ``preempt`` or ``stop``), ``version``, and ``deadline_s``
            (seconds, or None).

        Raises:
            StaleRunError: If another run has taken over, or this one has ended.
        """
        params = {"wait_s": wait_s, "version": version}
        response = self._get(f"/runs/{run_id}/directive", params, extra_s=wait_s)
        return msgspec.json.decode(response.content, type=Directive)

    def extend(self, run_id: int, until: int) -> Extension:
        """Return whether a run may continue beyond its bound.

        Args:
            run_id: Id of the run.
            until: Bound that it has reached, in the unit of the search.

        Returns:
            ``goes_on`` (bool), and ``until``, the next bound; None when it may train to its length.

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
