"""Log policies: patterns in a trial's log that label it or forbid its restart.

A reader thread searches the lines before the writer's job, since a search may be slow. The job only
applies the matches.
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
"""Number of characters of a line that are searched."""
_RUNS = 4096
"""Maximum number of runs whose policies are cached."""


class Match(msgspec.Struct, frozen=True):
    """Policy whose pattern matched a line."""

    label: str
    action: str | None
    last: int
    """Index of the last matching line."""
    line: str = ""
    """Beginning of that line."""


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
    """Search of log lines for the patterns of an experiment, outside of the writer thread.

    Args:
        database: Queried once for each run, since a run's policies never change.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._known: dict[int, _Policies] = {}

    def search(self, run_id: int, lines: Sequence[str]) -> list[Match]:
        """Search lines of a run's log.

        An unknown run matches nothing; storing its lines raises the error.
        """
        if not lines:
            return []
        policies = self._policies(run_id)
        if not policies.all:
            return []
        # Most lines match nothing: one search for all patterns excludes them.
        candidates = [
            (index, text)
            for index, line in enumerate(lines)
            if policies.any.search(text := line[:_LINE])
        ]
        candidates.reverse()
        matches = []
        for policy in policies.all:
            last = next((entry for entry in candidates if policy.pattern.search(entry[1])), None)
            if last is not None:
                matches.append(Match(policy.label, policy.action, *last))
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
def _compiled(text: str) -> _Policies:
    """Compile the log policies of a stored configuration."""
    # Imported here, since they load all configuration code, which startup does not need.
    from zerolab.config.experiment.experiment_config import effective_log_policies
    from zerolab.config.experiment.patterns import compile_any, compile_pattern
    from zerolab.config.experiment.sections import LogPolicy

    stored = msgspec.json.decode(text, type=_Stored).log_policies
    policies, patterns = [], []
    for policy in effective_log_policies(
        [LogPolicy.model_construct(**policy_fields) for policy_fields in stored]
    ):
        try:
            pattern = compile_pattern(policy.pattern)
        except ValueError as error:  # stored by a version that used Python's re
            logger.warning("log policy %s is not applied: %s", policy.name, error)
            continue
        policies.append(_Policy(policy.name or policy.pattern, policy.action, pattern))
        patterns.append(policy.pattern)
    return _Policies(tuple(policies), compile_any(patterns) if policies else None)
