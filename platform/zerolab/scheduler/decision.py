"""Queue and free slots in, allocations and preemptions out.

The rules, in order:

1. A pool's policy says who goes first: by priority, by share, as queued
   (:class:`~zerolab.scheduler.types.Policy`).
2. A trial gets all its slots at once or none.
3. No quota is exceeded: neither an experiment's own ``max_slots`` nor that of a group.
4. A trial that does not fit preempts runs of lower priority, the newest first, if that makes room.
5. Of what it waits for, those behind it get only what cannot delay it
   (:mod:`~zerolab.scheduler.backfill`), so that a large trial is never starved by small ones.
6. A trial that all agents of its pool together could not hold, or that no quota will ever allow,
   is set aside and blocks nobody.
7. Every trial that goes on waiting is told why.
"""

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence

from zerolab.scheduler.ledger import Ledger
from zerolab.scheduler.types import Allocation, Cluster, Decision, Policy, Request

__all__ = ["schedule", "turn"]

Turn = tuple[int, float, float, int]
_Entry = tuple[int, float, float, int, int, Request]
"""A turn, how many trials of the request are left, and the request."""


def schedule(
    cluster: Cluster, waiting: Iterable[Request], running: Sequence[Allocation]
) -> Decision:
    """Decide which waiting trials start, and which runs must make room.

    Args:
        cluster: Agents that are there, policies and quotas.
        waiting: What wants to run; a job may have several requests.
        running: What is held now, by runs that were asked to stop too.

    Returns:
        The decision, with the reason of each request that goes on waiting. Nothing is to be done
        when nothing can change, so asking again costs nothing. It takes time for each request
        once, however many there are; where there are quotas, what starts can leave to others what
        was kept in the same round for somebody who went before them: ask again until nothing
        starts.
    """
    ledger = Ledger(cluster, running)
    decision = ledger.decision
    held = ledger.held
    queue = _in_turn(waiting, cluster, held)
    again: list[_Entry] = []
    for entry in _merged(queue, again):
        left, request = entry[4], entry[5]
        found = ledger.start(request)
        if isinstance(found, str):
            decision.waiting[request.trial_id] = found
            continue
        decision.start.append(found)
        if left > 1:
            key = turn(request, cluster, held[request.job.job_id])
            heapq.heappush(again, (*key, left - 1, request))
    return decision


def _in_turn(waiting: Iterable[Request], cluster: Cluster, held: Mapping[int, int]) -> list[_Entry]:
    """Sort what waits. Where no pool has a policy of its own, :func:`turn` is written out."""
    if cluster.policies:
        return sorted(
            (*turn(each, cluster, held.get(each.job.job_id, 0)), each.trials, each)
            for each in waiting
        )
    slots = held.get
    queue = [
        (job.priority, slots(job.job_id, 0) / job.weight, job.position, each[0], each[2], each)
        for each in waiting
        for job in (each[1],)
    ]
    queue.sort()
    return queue


def _merged(queue: Iterable[_Entry], again: list[_Entry]) -> Iterator[_Entry]:
    """Go through a sorted queue, and through the heap ``again``, which grows meanwhile."""
    for entry in queue:
        while again and again[0] < entry:
            yield heapq.heappop(again)
        yield entry
    while again:
        yield heapq.heappop(again)


def turn(request: Request, cluster: Cluster, held_slots: int) -> Turn:
    """What says whose turn it is: the smallest goes first.

    Args:
        request: What wants to run.
        cluster: With the policy of its pool.
        held_slots: What its job holds now.
    """
    job = request.job
    policy = cluster.policies.get(job.pool, Policy.FAIR_SHARE)
    priority = _NO_PRIORITY if policy is Policy.FIFO else job.priority
    share = held_slots / job.weight if policy is Policy.FAIR_SHARE else 0.0
    return priority, share, job.position, request.trial_id


_NO_PRIORITY = 42
"""Where the jobs of a pool without priorities stand among others that share a quota with them."""
