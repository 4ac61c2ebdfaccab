"""The machines of an experiment's hostfile after its filters."""

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from zerolab.config.experiment.model_files import ModelFiles
from zerolab.config.experiment.resources import ResourcesConfig, elastic_problems
from zerolab.config.hostfile import combination_problems, filter_slots, parse_hostfile
from zerolab.errors import ConfigError

__all__ = ["with_hosts", "with_ranks"]

_HOST_KEYS = frozenset({"hostfile", "include", "exclude", "ssh_config", "hosts"})


def with_hosts(resources: ResourcesConfig, model: ModelFiles) -> ResourcesConfig:
    """Fill in machines, their slots, and the ranks of a trial.

    Args:
        resources: The block, with a hostfile.
        model: The files of the model directory.

    Returns:
        The block with ``hosts``.

    Raises:
        ConfigError: With all problems of the file, the filters and the requested slots.
    """
    assert resources.hostfile is not None
    problems = _ssh_problems(resources, model)
    chosen: dict[str, list[int]] = {}
    hosts: dict[str, int] = {}
    try:
        hosts = parse_hostfile(_read("hostfile", resources.hostfile, model).decode())
        chosen = filter_slots(hosts, resources.include, resources.exclude)
    except UnicodeDecodeError:
        problems.append(f"resources.hostfile: {resources.hostfile} must be text in UTF-8")
    except ConfigError as error:
        problems += [_with_position(problem, resources.hostfile) for problem in error.problems]
    if not hosts:  # filters are then checked against each other only
        filter_problems = combination_problems(resources.include, resources.exclude)
        problems += [f"resources.{problem}" for problem in filter_problems]
    ranks = sum(map(len, chosen.values()))
    requested = resources.slots_per_trial
    if ranks and requested != ranks and "slots_per_trial" in resources.model_fields_set:
        problems.append(
            f"resources.slots_per_trial: must be {ranks}, the slots that {resources.hostfile} and "
            f"the filters leave, got {requested}; leave it out, or choose slots with "
            "resources.include"
        )
    filled = resources.model_copy(update={"hosts": chosen, "slots_per_trial": ranks})
    if ranks:
        problems += elastic_problems(filled)
    if problems:
        raise ConfigError("resources", problems)
    return filled


def with_ranks(content: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    """Return an experiment file with another number of ranks, on any machines.

    Args:
        content: The file; its block ``resources`` may be missing.
        ranks: Replacement of ``slots_per_trial``, or of the hostfile's slots.
    """
    resources = content.get("resources") or {}
    if not isinstance(resources, Mapping):
        return dict(content)  # the check of the file reports this
    other_keys = {key: value for key, value in resources.items() if key not in _HOST_KEYS}
    return {**content, "resources": {**other_keys, "slots_per_trial": ranks}}


def _with_position(problem: str, file: str) -> str:
    """Add the position to a problem of the file or of a filter."""
    key = problem.partition(":")[0]
    if key == "resources.hostfile":
        return problem
    if key in {"include", "exclude", "include and exclude"}:
        return f"resources.{problem}"
    return f"resources.hostfile: {file}: {problem}"


def _read(key: str, path: str, model: ModelFiles) -> bytes:
    named = PurePosixPath(path)
    if named.is_absolute() or ".." in named.parts:
        problem = f"must be a path inside the model directory, got {path!r}"
        raise ConfigError("resources", [f"resources.{key}: {problem}"])
    content = model.read(str(named))
    if content is None:
        problem = f"must name a file in the model directory, got {path!r}, which is not there"
        raise ConfigError("resources", [f"resources.{key}: {problem}"])
    return content


def _ssh_problems(resources: ResourcesConfig, model: ModelFiles) -> list[str]:
    config = resources.ssh_config
    if config is None or PurePosixPath(config).is_absolute():
        return []
    try:
        _read("ssh_config", config, model)
    except ConfigError as error:
        return error.problems
    return []
