"""Log policies: patterns in a trial's log that label it or forbid its restart.

Searching is done before the writer's job, on a thread that may take its time; the job only
applies what was found.
"""

import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec
from sqlalchemy import select

from zeroserver.store.database import Database
from zeroserver.store.schema import experiments, runs

__all__ = ["Match", "PolicySearch", "logger"]

logger = logging.getLogger(__name__)
_LINE = 4096
"""Characters of a line that are searched."""
_RUNS = 4096
"""Whose policies are kept."""


class Match(msgspec.Struct, frozen=True):
    """A policy whose pattern was found."""

    label: str
    action: str | None
    last: int
    """Index of the last line that it was found in."""


class _Policy(msgspec.Struct, frozen=True):
    label: str
    action: str | None
    pattern: Any


class _Policies(msgspec.Struct, frozen=True):
    all: tuple[_Policy, ...]
    any: Any = None
    """The alternation of all patterns."""


_NO_POLICIES = _Policies(())


class PolicySearch:
    """Searches lines for the patterns of an experiment; any thread but the writer's may.

    Args:
        database: Asked once for each run: neither a run's experiment nor its policies change.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._known: dict[int, _Policies] = {}

    def search(self, run_id: int, lines: Sequence[str]) -> list[Match]:
        """Search lines of a run's log.

        A run that is not known matches nothing: whoever stores the lines says so.
        """
        if not lines:
            return []
        policies = self._policies(run_id)
        if not policies.all:
            return []
        # Most lines match nothing: one search over all patterns says so.
        candidates = [
            (index, text)
            for index, line in enumerate(lines)
            if policies.any.search(text := line[:_LINE])
        ]
        candidates.reverse()
        matches = []
        for policy in policies.all:
            last = next((index for index, text in candidates if policy.pattern.search(text)), None)
            if last is not None:
                matches.append(Match(policy.label, policy.action, last))
        return matches

    def _policies(self, run_id: int) -> _Policies:
        policies = self._known.get(run_id)
        if policies is None:
            query = select(experiments.c.config).join(
                runs, runs.c.experiment_id == experiments.c.id
            )
            with self._database.read() as connection:
                config = connection.scalar(query.where(runs.c.id == run_id))
            if config is None:
                return _NO_POLICIES
            if len(self._known) >= _RUNS:
                self._known.clear()
            policies = self._known[run_id] = _compiled(config)
        return policies


class _Stored(msgspec.Struct):
    log_policies: list[dict[str, Any]] = []


@lru_cache(maxsize=64)
def _compiled(config: str) -> _Policies:
    """Compile the policies of a stored configuration."""
    # Loads the whole configuration's code, which a server that only starts can do without.
    from zerolab.config.experiment.experiment_config import effective_log_policies
    from zerolab.config.experiment.patterns import compile_any, compile_pattern
    from zerolab.config.experiment.sections import LogPolicy

    stored = msgspec.json.decode(config, type=_Stored).log_policies
    policies, patterns = [], []
    for policy in effective_log_policies(
        [LogPolicy.model_construct(**policy_fields) for policy_fields in stored]
    ):
        try:
            pattern = compile_pattern(policy.pattern)
        except ValueError as error:  # submitted when patterns were Python's own
            logger.warning("log policy %s is not applied: %s", policy.name, error)
            continue
        policies.append(_Policy(policy.name or policy.pattern, policy.action, pattern))
        patterns.append(policy.pattern)
    return _Policies(tuple(policies), compile_any(patterns) if policies else None)
