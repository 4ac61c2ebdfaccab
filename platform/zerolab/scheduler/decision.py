"""Scheduling round: from the queue and the free slots to allocations and preemptions.

The rules, in order:

1. A pool's policy orders its jobs: by priority, by the shares of users and jobs, or by
   position (:class:`~zerolab.scheduler.types.Policy`).
2. A trial gets all its slots at once or none.
3. No quota is exceeded: neither an experiment's own ``max_slots`` nor that of a group.
4. A trial that does not fit preempts runs of lower priority, the newest first, if that
   frees enough.
5. Later trials may use only slots that cannot delay it (:func:`.backfill_limit`), so
   that small trials never starve a large one.
6. A trial that exceeds all agents of its pool together, or a quota, is set aside and
   blocks no other.
7. Every trial that keeps waiting gets a reason.
"""

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from zerolab.scheduler.ledger import Ledger
from zerolab.scheduler.types import (
    Account,
    Allocation,
    Cluster,
    Decision,
    Job,
    Policy,
    Request,
)
from zerolab.scheduler.usage import held_by_account

__all__ = ["queue_key", "queue_order", "schedule"]

QueueKey = tuple[int, float, float, int]
_Entry = tuple[int, float, float, int, int, Request]
"""A queue key, the number of remaining trials of the request, and the request."""


def schedule(
    cluster: Cluster, waiting: Iterable[Request], running: Sequence[Allocation]
) -> Decision:
    """Decide which waiting trials start, and which runs are preempted.

    Args:
        cluster: Connected agents, policies and quotas.
        waiting: Requests; a job may have several.
        running: Current allocations, including those of stopping runs.

    Returns:
        The decision, with the reason of each request that keeps waiting. It is empty when nothing
        can change. The time grows with the number of requests, not of trials. With quotas, a start
        can free capacity that was reserved in the same round: repeat until nothing starts.
    """
    ledger = Ledger(cluster, running)
    decision = ledger.decision
    held_slots = ledger.held_slots
    shares = _UserShares(cluster, held_by_account(running))
    queue = _sorted_queue(waiting, cluster, held_slots)
    requeued: defaultdict[_Line, list[_Entry]] = defaultdict(list)
    line_of = _line_of if _is_shared(queue) else _single_line
    for entry in _merge_lines(queue, line_of, requeued, shares):
        remaining, request = entry[4], entry[5]
        result = ledger.start(request)
        if isinstance(result, str):  # nor can the request's other trials start: they are equal
            decision.waiting[request.trial_id] = result
            continue
        decision.start.append(result)
        shares.add(request.job.account, sum(map(len, result.slots.values())))
        if remaining > 1:
            key = queue_key(request, cluster, held_slots[request.job.job_id])
            heapq.heappush(requeued[line_of(entry)], (*key, remaining - 1, request))
    return decision


def queue_order(
    cluster: Cluster, waiting: Iterable[Job], running: Iterable[tuple[Job, int]]
) -> list[int]:
    """Return waiting jobs in the order in which their next trials start as slots become free.

    It is the order of :func:`schedule` if each start takes all slots of one trial. A later job may
    still start earlier, where an earlier one lacks slots or a quota.

    Args:
        cluster: Policies, weights of users and recent usage; its agents and quotas are not used.
        waiting: Jobs with waiting trials, each once.
        running: Jobs that hold slots, each with their number.

    Returns:
        Ids of the waiting jobs, of all pools.
    """
    held_slots: dict[int, int] = {}
    held: dict[Account, int] = {}
    for job, slots in running:
        held_slots[job.job_id] = slots
        held[job.account] = held.get(job.account, 0) + slots
    requests = (Request(job.job_id, job) for job in waiting)
    queue = _sorted_queue(requests, cluster, held_slots)
    shares = _UserShares(cluster, held)
    line_of = _line_of if _is_shared(queue) else _single_line
    order = []
    for entry in _merge_lines(queue, line_of, defaultdict(list), shares):
        job = entry[5].job
        order.append(job.job_id)
        shares.add(job.account, job.slots)
    return order


_Line = tuple[int, str, str]
"""Priority, pool and user of jobs that are started in the order of their keys."""
_ONE_LINE = 0, "", ""
_HELD_S = 10.0
"""Usage in seconds that a held slot counts for at once, so that users with equal usage get slots in
turn. Less makes shares exact after fewer runs, more makes them even at any moment."""


def _line_of(entry: _Entry) -> _Line:
    job = entry[5].job
    return entry[0], job.pool, job.owner


def _single_line(_entry: _Entry) -> _Line:
    return _ONE_LINE


def _is_shared(queue: Sequence[_Entry]) -> bool:
    """Whether jobs of several users wait in one pool; otherwise usage by user has no effect."""
    owners: dict[str, str] = {}
    for entry in queue:
        job = entry[5].job
        if owners.setdefault(job.pool, job.owner) != job.owner:
            return True
    return False


class _UserShares:
    """Share of each user in each pool: recent usage for the user's weight, in this round."""

    def __init__(self, cluster: Cluster, held: dict[Account, int]) -> None:
        self._cluster = cluster
        self._held = held

    def of(self, line: _Line) -> float:
        """Return the share of the user of some jobs; the smallest is served first."""
        account: Account = line[1:]
        pool, owner = account
        if self._cluster.policy(pool) is not Policy.FAIR_SHARE:
            return 0.0
        used = self._cluster.usage.get(account, 0.0) + _HELD_S * self._held.get(account, 0)
        return used / self._cluster.weights.get(owner, 1.0)

    def add(self, account: Account, slots: int) -> None:
        """Count the slots of a trial that starts."""
        self._held[account] = self._held.get(account, 0) + slots


def _sorted_queue(
    waiting: Iterable[Request], cluster: Cluster, held_slots: Mapping[int, int]
) -> list[_Entry]:
    """Sort the requests; without policies :func:`queue_key` is inlined for speed."""
    if cluster.policies:
        return sorted(
            (
                *queue_key(request, cluster, held_slots.get(request.job.job_id, 0)),
                request.trials,
                request,
            )
            for request in waiting
        )
    slots_of = held_slots.get
    queue = [
        (
            job.priority,
            slots_of(job.job_id, 0) / job.weight,
            job.position,
            request[0],
            request[2],
            request,
        )
        for request in waiting
        for job in (request[1],)
    ]
    queue.sort()
    return queue


def _merge_lines(
    queue: Sequence[_Entry],
    line_of: Callable[[_Entry], _Line],
    requeued: defaultdict[_Line, list[_Entry]],
    shares: _UserShares,
) -> Iterator[_Entry]:
    """Yield entries by priority, then by the shares of users, which grow during iteration.

    Args:
        queue: Sorted queue.
        line_of: Returns the line of an entry.
        requeued: Heap of each line, to which entries return during iteration.
        shares: Shares of the users.
    """
    if line_of is _single_line:
        yield from _merge_queues(queue, requeued[_ONE_LINE])
        return
    lines: defaultdict[_Line, list[_Entry]] = defaultdict(list)
    for entry in queue:
        lines[line_of(entry)].append(entry)
    entries = {line: _merge_queues(lines[line], requeued[line]) for line in lines}
    heads = [(line[0], shares.of(line), next(entries[line]), line) for line in lines]
    heapq.heapify(heads)
    while heads:
        priority, share, entry, line = heads[0]
        # Shares only grow during a round, so outdated shares in the heap are lower bounds: if the
        # share of the head is current, it is the smallest.
        if (now := shares.of(line)) > share:  # the user's jobs of other priorities have started
            heapq.heapreplace(heads, (priority, now, entry, line))
            continue
        yield entry
        following = next(entries[line], None)
        if following is None:
            heapq.heappop(heads)
        else:
            heapq.heapreplace(heads, (priority, shares.of(line), following, line))


def _merge_queues(queue: Iterable[_Entry], requeued: list[_Entry]) -> Iterator[_Entry]:
    """Yield from a sorted queue and from the heap ``requeued``, which grows during iteration."""
    for entry in queue:
        while requeued and requeued[0] < entry:
            yield heapq.heappop(requeued)
        yield entry
    while requeued:
        yield heapq.heappop(requeued)


def queue_key(request: Request, cluster: Cluster, held_slots: int) -> QueueKey:
    """Return the sort key of a request; the smallest starts first.

    Args:
        request: Waiting request.
        cluster: With the policy of its pool.
        held_slots: Slots that its job holds now.
    """
    job = request.job
    policy = cluster.policies.get(job.pool, Policy.FAIR_SHARE)
    priority = _DEFAULT_PRIORITY if policy is Policy.FIFO else job.priority
    share = held_slots / job.weight if policy is Policy.FAIR_SHARE else 0.0
    return priority, share, job.position, request.trial_id


_DEFAULT_PRIORITY = 42
"""Priority of jobs in pools without priorities, relative to jobs that share a quota with them."""
