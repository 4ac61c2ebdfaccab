"""Scheduling round: from the queue and the free slots to allocations and preemptions.

The rules, in order:

1. A pool's policy orders its jobs: by priority, by share, or by position
   (:class:`~zerolab.scheduler.types.Policy`).
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
from collections.abc import Iterable, Iterator, Mapping, Sequence

from zerolab.scheduler.ledger import Ledger
from zerolab.scheduler.types import Allocation, Cluster, Decision, Policy, Request

__all__ = ["queue_key", "schedule"]

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
    queue = _sorted_queue(waiting, cluster, held_slots)
    requeued: list[_Entry] = []
    for entry in _merge_queues(queue, requeued):
        remaining, request = entry[4], entry[5]
        result = ledger.start(request)
        if isinstance(result, str):
            decision.waiting[request.trial_id] = result
            continue
        decision.start.append(result)
        if remaining > 1:
            key = queue_key(request, cluster, held_slots[request.job.job_id])
            heapq.heappush(requeued, (*key, remaining - 1, request))
    return decision


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
