"""Log policies: patterns in a trial's log that label it, and may forbid its restart."""

import re
from collections.abc import Iterable

import msgspec
from sqlalchemy import RowMapping

from zeroserver.orchestrator.desk import World, find, save, touch
from zeroserver.store.database import Transaction
from zeroserver.store.schema import runs, trials

__all__ = ["apply"]

_LINE = 4096
"""Characters of a line that are searched; a pattern must not stall the server."""


def apply(world: World, transaction: Transaction, run: RowMapping, lines: Iterable[str]) -> None:
    """Search new lines of a run's log for the patterns of its experiment."""
    texts = [line[:_LINE] for line in lines]
    matched, no_retry, excluded = [], False, False
    for policy in world.config(transaction, run["experiment_id"]).policies():
        pattern = re.compile(policy.pattern)
        if any(pattern.search(text) for text in texts):
            matched.append(policy.name or policy.pattern)
            no_retry = no_retry or policy.action == "cancel_retries"
            excluded = excluded or policy.action == "exclude_node"
    if not matched:
        return
    if no_retry:
        save(transaction, runs, run["id"], no_retry=1)
    trial = find(transaction, trials, run["trial_id"])
    if excluded:
        agents = {*msgspec.json.decode(trial["excluded"]), run["agent_id"]}
        save(transaction, trials, trial["id"], excluded=msgspec.json.encode(agents).decode())
    known: list[str] = msgspec.json.decode(trial["labels"])
    labels = list(dict.fromkeys([*known, *matched]))
    if labels != known:
        save(transaction, trials, trial["id"], labels=msgspec.json.encode(labels).decode())
        touch(transaction, "trial", trial["experiment_id"], trial["id"])
