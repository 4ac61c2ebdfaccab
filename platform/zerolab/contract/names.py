"""Validation of names of pools, agents, tasks, metrics and files."""

import re
from collections.abc import Mapping

__all__ = [
    "DEFAULT_POOL",
    "DEFAULT_PROJECT",
    "HOST_KEY",
    "MAX_CHECKPOINT_FILES",
    "MAX_METRIC_NAME",
    "PORT_LABEL",
    "TASK_LABEL",
    "USER_NAME",
    "check_alias",
    "check_name",
    "check_pool",
    "check_project",
    "check_text",
    "file_name_problem",
    "metric_name_problem",
    "printable",
    "project_name",
    "resources_problem",
    "text_problem",
]

DEFAULT_POOL = "default"
"""The pool of agents and experiments that name none."""

DEFAULT_PROJECT = "default"
"""The project of experiments and models that name none."""

TASK_LABEL = "task"
"""Label of experiments that ``zerolab task run`` creates."""

PORT_LABEL = "interactive"
"""Label of tasks with a port, to which the server forwards requests."""

USER_NAME = r"^[A-Za-z0-9_.@$-]*$"
"""Pattern of a user name on a machine, which becomes a line of the configuration of ssh."""

HOST_KEY = r"^[A-Za-z0-9+/= -]*$"
"""Pattern of the public key of an sshd, which becomes a line of ``known_hosts``."""

MAX_METRIC_NAME = 200
"""Most characters of the name of a metric or of a metric group."""

MAX_CHECKPOINT_FILES = 50_000
"""Most files of one checkpoint."""

_MAX_FILE_NAME = 1024
_MAX_BYTES = 2**53
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""Control characters, line separators, and those that reverse the direction of text."""
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_IDENTIFIER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def check_pool(name: str) -> str:
    """Return a pool's name after validation.

    Raises:
        ValueError: If it is invalid.
    """
    if not _IDENTIFIER.fullmatch(name):
        msg = (
            "must be 1 to 64 letters, digits, '.', '_' or '-', the first of them a letter or a "
            f"digit, got {name!r}"
        )
        raise ValueError(msg)
    return name


def check_project(name: str) -> str:
    """Return a project's name after validation: the rule of pools.

    Raises:
        ValueError: If it is invalid.
    """
    return check_pool(name)


def check_alias(name: str) -> str:
    """Return an alias of a model version after validation: the rule of pools, and no number.

    Raises:
        ValueError: If it is invalid.
    """
    if check_pool(name).isdigit():
        msg = f"must have a character that is no digit, unlike a version, got {name!r}"
        raise ValueError(msg)
    return name


def project_name(text: str) -> str:
    """Return the name of a project for that of another tracker; empty if no character is allowed.

    Example:
        >>> project_name("Vision / digits (v2)")
        'Vision-digits-v2'
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:64].rstrip("-._")


def text_problem(text: str, *, lines: bool = False) -> str | None:
    """Return the problem of a name or a text for people, or None.

    Args:
        text: The name or the text.
        lines: Allow newlines and tabs, as in a description.
    """
    shown = text.replace("\n", " ").replace("\r", " ").replace("\t", " ") if lines else text
    if _CONTROL.search(shown):
        return f"must have no control characters, got {text[:50]!r}"
    if _SURROGATE.search(shown):
        return f"must be text in UTF-8, got {text[:50]!r} with a lone surrogate"
    return None


def check_text(text: str) -> str:
    """Return a text of several lines, such as a description, after validation.

    Raises:
        ValueError: If it has other control characters, or is no text.
    """
    if problem := text_problem(text, lines=True):
        raise ValueError(problem)
    return text


def printable(text: str) -> str:
    """Remove the characters that no name may have."""
    return _SURROGATE.sub("", _CONTROL.sub("", text))


def check_name(name: str) -> str:
    """Return a name of an experiment, an agent, a label, ... after validation.

    Raises:
        ValueError: If it has control characters, or is no text.
    """
    if problem := text_problem(name):
        raise ValueError(problem)
    return name


def metric_name_problem(name: str) -> str | None:
    """Return the problem of a metric's or a group's name, or None."""
    if not 0 < len(name) <= MAX_METRIC_NAME:
        shown = f"{name[:50]!r}... ({len(name)} characters)" if name else "''"
        return f"must have 1 to {MAX_METRIC_NAME} characters, got {shown}"
    return text_problem(name)


def file_name_problem(name: str) -> str | None:
    """Return the problem of a file's path inside a directory, or None.

    The same rule applies to files of checkpoints, archives and staged data, wherever such a name is
    stored or used.

    Example:
        >>> file_name_problem("model0/rank-0.pt")
        >>> file_name_problem("model0/../../x")
        "must be a path inside its directory, without '..', got 'model0/../../x'"
    """
    if not 0 < len(name) <= _MAX_FILE_NAME:
        shown = f"{name[:50]!r}... ({len(name)} characters)" if name else "''"
        return f"must have 1 to {_MAX_FILE_NAME} characters, got {shown}"
    if "\\" in name:
        return f"must have no backslash, got {name[:100]!r}"
    if problem := text_problem(name):
        return problem
    parts = name.split("/")
    if any(part in {"", ".", ".."} for part in parts):
        return f"must be a path inside its directory, without '..', got {name[:100]!r}"
    if any(len(part.encode()) > 255 for part in parts):
        return f"must have at most 255 bytes between slashes, got {name[:100]!r}"
    return None


def resources_problem(resources: Mapping[str, int]) -> str | None:
    """Return the problem of a checkpoint's files, or None.

    Args:
        resources: Path inside the checkpoint to size in bytes.
    """
    if len(resources) > MAX_CHECKPOINT_FILES:
        return f"must be at most {MAX_CHECKPOINT_FILES:,} files, got {len(resources):,}"
    if "checkpoint.json" in resources:
        return "must not be called checkpoint.json, which describes the checkpoint; rename the file"
    for name, size in resources.items():
        if problem := file_name_problem(name):
            return problem
        if not 0 <= size < _MAX_BYTES:
            return f"{name[:100]!r} must have 0 bytes or more, and less than 2**53, got {size}"
    if sum(resources.values()) >= _MAX_BYTES:
        return "must have less than 2**53 bytes in all"
    return None
