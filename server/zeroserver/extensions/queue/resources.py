"""Resources of the queue: jobs, pools and quotas."""

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
]


class Job(Resource, frozen=True):
    """An experiment in the queue."""

    experiment_id: int
    """Which one."""
    name: str
    """Its name."""
    state: ExperimentState
    """Where it stands."""
    pool: str
    """The resource pool in which it waits."""
    place: int
    """Place in the queue of its pool, from 1."""
    priority: int
    """1 to 99; the smallest is the first to run, unless the pool's policy is `fifo`."""
    weight: float
    """Its share of the slots, in a pool with the policy `fair_share`."""
    max_slots: int | None
    """Most slots that its trials may hold together."""
    queue_time: int | None
    """Seconds after which it ends if no trial of it has had slots."""
    labels: list[str]
    """Its labels; a quota may name one."""
    slots_per_trial: int
    """What one trial of it needs in the pool."""
    host_slots: int
    """Slots of its hostfile's machines on which a trial has its ranks, started from the pool's; 0
    without a hostfile."""
    running_trials: int
    """Those that hold slots."""
    queued_trials: int
    """Those that wait for slots."""
    held_slots: int
    """Slots of the pool that its runs hold."""
    waiting_reason: str | None
    """Why its next trial waits, whether or not others run; null when none waits."""
    fewer_reason: str | None
    """Which of its trials runs on fewer slots than it was made for, and whether it leaves for more;
    null when none does."""
    created_at: Time
    """When it was submitted."""


class JobAnswer(Resource, frozen=True):
    """One job."""

    job: Job


class JobPage(Resource, frozen=True):
    """The queue, the first to run first."""

    jobs: list[Job]
    next_after: None = None


class PoolAnswer(Resource, frozen=True):
    """One pool."""

    pool: Pool


class PoolPage(Resource, frozen=True):
    """All pools."""

    pools: list[Pool]
    next_after: None = None


class Quota(Resource, frozen=True):
    """Most slots that some jobs may hold together."""

    group: str
    """`pool:NAME` or `label:NAME`."""
    max_slots: int
    """The limit."""
    held_slots: int
    """Slots that such jobs hold now."""


class QuotaAnswer(Resource, frozen=True):
    """One quota."""

    quota: Quota


class QuotaPage(Resource, frozen=True):
    """All quotas."""

    quotas: list[Quota]
    next_after: None = None
