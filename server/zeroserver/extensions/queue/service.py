"""Settings of the queue: priority, order, pools and quotas."""

from typing import Any, Literal

import msgspec
from sqlalchemy import (
    delete,
    func,
    select,
    update,
)

from zerolab.contract.names import check_pool, text_problem
from zerolab.errors import ConfigError, ConflictError, NotFoundError
from zerolab.scheduler import Policy
from zeroserver.orchestrator.cluster.scheduler_input import EVERY_USER
from zeroserver.orchestrator.service import Service
from zeroserver.states import EXPERIMENT_ENDED
from zeroserver.store.rows import ExperimentRow
from zeroserver.store.schema import experiments, pools, projects, quotas, users

__all__ = ["JobChange", "QueueService"]

_NAMED = {"user": users, "project": projects}
"""Tables of the groups that must exist."""
_STEP = 1024.0
"""Distance between the positions of two jobs."""
_LABEL_CHARACTERS = 255


class JobChange(msgspec.Struct, frozen=True):
    """Changes of a job; None keeps a value."""

    priority: int | None = None
    weight: float | None = None
    max_slots: int | None = None
    unlimited: bool = False
    """Remove ``max_slots``."""


class QueueService(Service):
    """Changes the order and the limits of the queue."""

    def change(self, experiment_id: int, change: JobChange, *, limited: bool) -> None:
        """Change a job's priority, weight or maximum slots; runs continue.

        Args:
            experiment_id: The job.
            change: Its new settings.
            limited: Apply the limits that administrators set.

        Raises:
            NotFoundError: If there is no such experiment.
            ConflictError: If it has ended.
            ConfigError: If ``max_slots`` is less than one trial needs, or a limit is exceeded.
        """
        job = self._open_job(experiment_id)
        if limited:
            self.work.orchestrator.defaults.check_job(
                job.project_id,
                priority=change.priority,
                max_slots=change.max_slots,
                unlimited=change.unlimited,
            )
        if change.max_slots is not None and change.max_slots < job.slots:
            problem = f"max_slots: must be at least slots_per_trial = {job.slots}"
            raise ConfigError("request", [f"{problem}, got {change.max_slots}"])
        changes = {
            "priority": change.priority,
            "weight": change.weight,
            "max_slots": change.max_slots,
        }
        values: dict[str, Any] = {
            name: value for name, value in changes.items() if value is not None
        }
        if change.unlimited:
            values["max_slots"] = None
        if values:
            self.work.save(experiments, experiment_id, **values)
        self._changed(experiment_id)

    def move(
        self,
        experiment_id: int,
        anchor_id: int,
        side: Literal["ahead", "behind"],
        *,
        limited: bool,
    ) -> None:
        """Move a job directly ahead of or behind another of its pool, with the same priority.

        Args:
            experiment_id: The job.
            anchor_id: The other one.
            side: Where to put it.
            limited: Apply the limits that administrators set.

        Raises:
            NotFoundError: If there is no such experiment.
            ConflictError: If one of the two has ended, or they are in two pools.
            ConfigError: If they are one, or a limit of the priority is exceeded.
        """
        if experiment_id == anchor_id:
            problem = (
                f"the job to move and the one to move it to must be two, got {anchor_id} twice"
            )
            raise ConfigError("request", [problem])
        job, anchor = (self._open_job(job_id) for job_id in (experiment_id, anchor_id))
        if job.pool != anchor.pool:
            msg = (
                f"experiment {experiment_id} waits in pool {job.pool}, "
                f"experiment {anchor_id} in "
                f"pool {anchor.pool}: a job can only be moved within its pool"
            )
            raise ConflictError(msg)
        if limited and anchor.priority < job.priority:
            self.work.orchestrator.defaults.check_job(
                job.project_id, priority=anchor.priority, max_slots=None, unlimited=False
            )
        position = self._between(job, anchor, side)
        if position is None:
            self._renumber(job.pool)
            position = self._between(job, self.work.find(ExperimentRow, anchor_id), side)
        assert position is not None, "there is room between two jobs that were renumbered"
        values = {"position": position, "priority": anchor.priority}
        self.work.save(experiments, experiment_id, **values)
        self._changed(experiment_id)

    def _between(
        self, job: ExperimentRow, anchor: ExperimentRow, side: Literal["ahead", "behind"]
    ) -> float | None:
        """Return a position next to ``anchor``; None if no number is left there."""
        columns = experiments.c
        position: float = anchor.position
        ahead = side == "ahead"
        edge, beyond = (
            (func.max(columns.position), columns.position < position)
            if ahead
            else (func.min(columns.position), columns.position > position)
        )
        query = select(edge).where(columns.pool == anchor.pool, columns.id != job.id, beyond)
        neighbour: float | None = self.work.connection.scalar(query)
        if neighbour is None:
            return position - _STEP if ahead else position + _STEP
        middle = (position + neighbour) / 2
        return middle if middle not in {position, neighbour} else None

    def _renumber(self, pool: str) -> None:
        """Renumber the positions of a pool's jobs, keeping their order."""
        query = select(experiments.c.id).where(experiments.c.pool == pool)
        order = query.order_by(experiments.c.position, experiments.c.id)
        for number, experiment_id in enumerate(self.work.connection.scalars(order).all(), 1):
            changed = update(experiments).where(experiments.c.id == experiment_id)
            self.work.connection.execute(changed.values(position=number * _STEP))
            self.work.forget_job(experiment_id)

    def _open_job(self, experiment_id: int) -> ExperimentRow:
        """Return an experiment that has not ended.

        Raises:
            NotFoundError: If there is no such experiment.
            ConflictError: If it has ended.
        """
        job = self.work.find(ExperimentRow, experiment_id)
        if job.project_id in self.work.hidden:
            raise NotFoundError(f"there is no experiment {experiment_id}")
        if job.state in EXPERIMENT_ENDED:
            msg = f"experiment {experiment_id} is {job.state}: it is no longer in the queue"
            raise ConflictError(msg)
        return job

    def _changed(self, experiment_id: int) -> None:
        self.work.forget_job(experiment_id)
        self.work.touch("experiment", experiment_id, experiment_id)

    def set_policy(self, name: str, policy: Policy) -> None:
        """Set the scheduling policy of a pool.

        Raises:
            ConfigError: If that is no name of a pool.
        """
        try:
            check_pool(name)
        except ValueError as error:
            raise ConfigError("pool", [f"name: {error}"]) from None
        self.work.connection.execute(delete(pools).where(pools.c.name == name))
        self.work.connection.execute(pools.insert().values(name=name, policy=policy.value))

    def set_quota(
        self, kind: str, name: str, max_slots: int, request_limit: int | None = None
    ) -> None:
        """Limit the slots that the jobs of a pool, label, user or project hold together.

        Args:
            kind: Kind of the group.
            name: Its name; ``*`` is each user who has no other quota.
            max_slots: Maximum number of slots.
            request_limit: Maximum number of slots that a user may request.

        Raises:
            ConfigError: If the name is invalid, or there is no such user or project.
        """
        if problem := text_problem(name):
            raise ConfigError("quota", [f"{kind}: {problem}"])
        group = _group(kind, name)
        if request_limit is not None and group != EVERY_USER:
            problem = f"request_limit: must be set with {EVERY_USER}"
            raise ConfigError("quota", [f"{problem}, got {group}"])
        if request_limit is not None and request_limit < max_slots:
            problem = f"request_limit: must be at least max_slots = {max_slots}"
            raise ConfigError("quota", [f"{problem}, got {request_limit}"])
        if group != EVERY_USER and (table := _NAMED.get(kind)) is not None:
            known = self.work.connection.scalars(select(table.c.name).order_by(table.c.name)).all()
            if name not in known:
                problem = f"{kind}: must be one of {', '.join(known)}, got {name!r}"
                raise ConfigError("quota", [problem])
        self.work.connection.execute(delete(quotas).where(quotas.c.group_name == group))
        row = {"group_name": group, "max_slots": max_slots, "request_limit": request_limit}
        self.work.connection.execute(quotas.insert().values(row))

    def remove_quota(self, kind: str, name: str) -> None:
        """Remove a quota.

        Raises:
            NotFoundError: If there is no such quota.
        """
        group = f"{kind}:{name}"
        removed = self.work.connection.execute(delete(quotas).where(quotas.c.group_name == group))
        if removed.rowcount == 0:
            msg = f"there is no quota {group}"
            raise NotFoundError(msg)


def _group(kind: str, name: str) -> str:
    """Return the name of a group.

    Raises:
        ConfigError: If the name is invalid.
    """
    try:
        if kind == "pool":
            check_pool(name)
        elif not 0 < len(name) <= _LABEL_CHARACTERS or "\0" in name:
            raise ValueError(f"must have 1 to {_LABEL_CHARACTERS} characters, got {name!r}")
    except ValueError as error:
        raise ConfigError("quota", [f"{kind}: {error}"]) from None
    return f"{kind}:{name}"
