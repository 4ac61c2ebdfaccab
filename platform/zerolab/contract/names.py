"""Names of pools, agents, tasks and metrics, and what they must look like."""

import re

__all__ = ["DEFAULT_POOL", "MAX_METRIC_NAME", "TASK_LABEL", "check_pool", "metric_name_problem"]

DEFAULT_POOL = "default"
"""The pool of agents and experiments that name none."""

TASK_LABEL = "task"
"""The label by which an experiment is known as one that ``zerolab task run`` made."""

MAX_METRIC_NAME = 200
"""Most characters of the name of a metric or of a metric group."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_POOL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def check_pool(name: str) -> str:
    """Return the name of a pool.

    Raises:
        ValueError: If it is none.
    """
    if not _POOL.fullmatch(name):
        msg = (
            "must be 1 to 64 letters, digits, '.', '_' or '-', the first of them a letter or a "
            f"digit, got {name!r}"
        )
        raise ValueError(msg)
    return name


def metric_name_problem(name: str) -> str | None:
    """Return what is wrong with the name of a metric or of a group; None if nothing is."""
    if not 0 < len(name) <= MAX_METRIC_NAME:
        shown = f"{name[:50]!r}... ({len(name)} characters)" if name else "''"
        return f"must have 1 to {MAX_METRIC_NAME} characters, got {shown}"
    if _CONTROL.search(name):
        return f"must have no control characters, got {name[:50]!r}"
    if _SURROGATE.search(name):
        return f"must be text in UTF-8, got {name[:50]!r} with a lone surrogate"
    return None
