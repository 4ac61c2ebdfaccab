"""Names of pools, agents and tasks, and what they must look like."""

import re

__all__ = ["DEFAULT_POOL", "TASK_LABEL", "check_pool"]

DEFAULT_POOL = "default"
"""The pool of agents and experiments that name none."""

TASK_LABEL = "task"
"""The label by which an experiment is known as one that ``zerolab task run`` made."""

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
