"""Resources of the queue: jobs, pools and quotas."""

from typing import Literal

from zeroserver.api.resources import Pool
from zeroserver.api.rows import Resource, Time
from zeroserver.states import ExperimentState

__all__ = [
    "Job",
    "JobAnswer",
    "JobPage",
    "PoolAnswer",
    "PoolPage",
    "Quota",
    "QuotaAnswer",
    "QuotaPage",
    "QuotaRequest",
    "QuotaRequestAnswer",
    "QuotaRequestPage",
]


class Job(Resource, frozen=True):
    """Experiment in the queue."""

    experiment_id: int
    """Id of the experiment."""
    name: str
    """Name of the experiment."""
    owner: str | None
    """Its owner; null if the installation has only one user."""
    project: str | None
    """Its project; null if the installation has only one project."""
    state: ExperimentState
    """State of the experiment."""
    pool: str
    """Resource pool."""
    place: int | None
    """Position in the order in which the waiting experiments of its pool start, from 1; null if no
    trial waits, or the experiment is paused."""
    order_reason: str | None
    """Why it starts later than by priority and position: the shares; null if it does not."""
    priority: int
    """1 to 99; smaller values run first, unless the pool's policy is `fifo`."""
    weight: float
    """Weight of its share of the slots in a pool with the policy `fair_share`."""
    max_slots: int | None
    """Maximum number of slots that its trials may hold together."""
    queue_time: int | None
    """Seconds after which it fails if none of its trials got slots."""
    labels: list[str]
    """Labels; quotas may refer to them."""
    slots_per_trial: int
    """Number of slots of each trial in the pool."""
    host_slots: int
    """Number of slots of each trial on the machines of a hostfile; 0 without a hostfile."""
    running_trials: int
    """Number of trials that hold slots."""
    queued_trials: int
    """Number of trials that wait for slots."""
    held_slots: int
    """Number of slots of the pool that its runs hold."""
    waiting_reason: str | None
    """Why its next trial waits, even if others run; null if none waits."""
    fewer_reason: str | None
    """Message about its first trial that runs on fewer slots than requested; null if none does."""
    created_at: Time
    """Time of submission."""


class JobAnswer(Resource, frozen=True):
    """Response with one job."""

    job: Job


class JobPage(Resource, frozen=True):
    """Queue by pool: running, waiting in the order in which they start, and paused experiments."""

    jobs: list[Job]
    next_after: None = None


class PoolAnswer(Resource, frozen=True):
    """Response with one pool."""

    pool: Pool


class PoolPage(Resource, frozen=True):
    """Response with all pools."""

    pools: list[Pool]
    next_after: None = None


class Quota(Resource, frozen=True):
    """Maximum number of slots that some jobs may hold together."""

    group: str
    """`pool:NAME`, `label:NAME`, `user:NAME` or `project:NAME`; `user:*` is the default for each
    user without a quota."""
    max_slots: int
    """Maximum number of slots."""
    held_slots: int
    """Number of slots that these jobs hold now."""
    is_default: bool
    """Whether it is the default of `user:*` for a user without a quota."""
    request_limit: int | None
    """Of `user:*`: maximum number of slots that a user may request; null without a limit."""


class QuotaAnswer(Resource, frozen=True):
    """Response with one quota."""

    quota: Quota


class QuotaPage(Resource, frozen=True):
    """Response with all quotas."""

    quotas: list[Quota]
    next_after: None = None


class QuotaRequest(Resource, frozen=True):
    """Request of a user for a larger quota."""

    id: int
    """Id, from 1."""
    user: str
    """User who requests it."""
    max_slots: int
    """Requested quota."""
    reason: str
    """Reason that the user gives."""
    state: Literal["APPROVED", "DECLINED", "OPEN"]
    """`OPEN` until an administrator decides."""
    created_at: Time
    """Time of the request."""
    decided_at: Time | None
    """Time of the decision."""
    decided_by: str | None
    """Administrator who decided."""
    answer: str
    """Reason that the administrator gives."""


class QuotaRequestAnswer(Resource, frozen=True):
    """Response with one request."""

    request: QuotaRequest


class QuotaRequestPage(Resource, frozen=True):
    """Requests, newest first."""

    requests: list[QuotaRequest]
    next_after: None = None
