"""Machines and slots of a multi-node run, in DeepSpeed's syntax.

```
worker-0 slots=4
worker-1 slots=8    # comments and empty lines do not count
worker-2 slots=0    # out of use
```

Filters are ``NODE[:slot[,slot...]][@NODE...]``: ``worker-0@worker-1:0,2`` is all of ``worker-0``
and two slots of ``worker-1``.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import PurePosixPath

from zerolab.config.experiment.model_files import ModelFiles
from zerolab.config.experiment.resources import ResourcesConfig, elastic_problems
from zerolab.errors import ConfigError

__all__ = ["combination_problems", "filter_slots", "parse_hostfile", "with_hosts"]

_ENTRY = re.compile(r"(\S+)\s+slots=0*([0-9]+)(?:[\s#](.*))?")
_BYTE_ORDER_MARK = "\ufeff"
_SLOTS_AGAIN = re.compile(r"\bslots=")
_NUMBER = re.compile(r"[0-9]{1,9}")
_MOST_SLOTS = 4096
"""Most slots of one machine: a typing error must not create a list of a billion slots."""


def parse_hostfile(text: str) -> dict[str, int]:
    r"""Read the text of a hostfile.

    Args:
        text: Content of the file.

    Returns:
        Host to its number of slots, in the order of the file. ``user@host`` stays as it is.

    Raises:
        ConfigError: If a line is invalid, a host occurs twice, or there is no host; all problems at
            once.

    Example:
        >>> from zerolab.launcher.hostfile import parse_hostfile
        >>> parse_hostfile("worker-0 slots=4\nworker-1 slots=8")
        {'worker-0': 4, 'worker-1': 8}
    """
    hosts: dict[str, int] = {}
    problems = []
    for number, line in enumerate(text.removeprefix(_BYTE_ORDER_MARK).splitlines(), start=1):
        content = line.strip()
        if not content or content.startswith("#"):
            continue
        entry = _ENTRY.fullmatch(content)
        if entry is None:
            problems.append(f"line {number}: must look like `HOST slots=N`, got {content!r}")
        elif entry[1] in hosts:
            problems.append(f"line {number}: {entry[1]} occurs a second time; keep one line")
        elif _SLOTS_AGAIN.search((entry[3] or "").partition("#")[0]):
            problems.append(f"line {number}: {entry[1]} has slots= twice; keep one of them")
        elif len(entry[2]) > len(str(_MOST_SLOTS)) or int(entry[2]) > _MOST_SLOTS:
            problem = f"must be at most {_MOST_SLOTS}, got {entry[2][:20]}"
            problems.append(f"line {number}: slots of {entry[1]}: {problem}")
        else:
            hosts[entry[1]] = int(entry[2])
    if not hosts and not problems:
        problems.append("must name at least one host, as `HOST slots=N`")
    if problems:
        raise ConfigError("hostfile", problems)
    return hosts


def filter_slots(
    hosts: Mapping[str, int],
    include: str = "",
    exclude: str = "",
    num_nodes: int | None = None,
    num_gpus: int | None = None,
) -> dict[str, list[int]]:
    """Choose hosts and slots of a hostfile.

    Args:
        hosts: From :func:`parse_hostfile`; hosts with 0 slots are ignored.
        include: Use these only; a host without slots means all of its slots, unless the same host
            also occurs with slots.
        exclude: Use all but these.
        num_nodes: Use the first N hosts.
        num_gpus: Use the first N slots of each host.

    Returns:
        Host to its slots in ascending order; hosts in the order of the hostfile, none without a
        slot.

    Raises:
        ConfigError: If filters and counts are combined, or name what the hostfile does not have,
            or if nothing is left; all problems at once.

    Example:
        >>> from zerolab.launcher.hostfile import filter_slots
        >>> filter_slots({"worker-0": 2, "worker-1": 4}, include="worker-0@worker-1:0,2")
        {'worker-0': [0, 1], 'worker-1': [0, 2]}
    """
    problems = combination_problems(include, exclude, num_nodes, num_gpus)
    available = {host: list(range(count)) for host, count in hosts.items() if count}
    without = [host for host, count in hosts.items() if not count]
    if include and not problems:
        chosen = _parse_filter("include", include, available, without, problems)
        available = {host: chosen[host] for host in available if host in chosen}
    elif exclude and not problems:
        removed = _parse_filter("exclude", exclude, available, without, problems)
        available = {
            host: [slot for slot in slots if slot not in removed.get(host, ())]
            for host, slots in available.items()
        }
    elif not problems:
        available = _first(available, num_nodes, num_gpus, problems)
    available = {host: slots for host, slots in available.items() if slots}
    if not available and not problems:
        problem = "no slot is left; include more, or exclude less"
        problems.append(problem if include or exclude else "every host of the hostfile has slots=0")
    if problems:
        raise ConfigError("hosts and slots", problems)
    return available


def combination_problems(
    include: str, exclude: str, num_nodes: int | None = None, num_gpus: int | None = None
) -> list[str]:
    """Return the conflicts between filters and counts, for any hostfile."""
    problems = []
    if include and exclude:
        problems.append("include and exclude: only one of them may be given")
    if (include or exclude) and not (num_nodes is None and num_gpus is None):
        problems.append("num_nodes, num_gpus: cannot be combined with include or exclude")
    return problems


def _first(
    available: Mapping[str, list[int]],
    num_nodes: int | None,
    num_gpus: int | None,
    problems: list[str],
) -> dict[str, list[int]]:
    if num_nodes is not None and not 1 <= num_nodes <= len(available):
        has = f"must be 1 to {len(available)}, the hosts of the hostfile that have slots"
        problems.append(f"num_nodes: {has}, got {num_nodes}")
    chosen = dict(list(available.items())[:num_nodes])
    if num_gpus is None:
        return chosen
    for host, slots in chosen.items():
        if not 1 <= num_gpus <= len(slots):
            has = f"must be 1 to {len(slots)}, the slots of {host}"
            problems.append(f"num_gpus: {has}, got {num_gpus}")
    return {host: slots[:num_gpus] for host, slots in chosen.items()}


def _parse_filter(
    key: str,
    text: str,
    available: Mapping[str, list[int]],
    without: Sequence[str],
    problems: list[str],
) -> dict[str, list[int]]:
    full_hosts: set[str] = set()
    chosen: dict[str, set[int]] = {}
    for part in _split_nodes(text, {*available, *without}):
        host, colon, numbers = (word.strip() for word in part.partition(":"))
        if not host:
            problems.append(f"{key}: must name a host before and after each @, got {text!r}")
        elif host in without:
            problems.append(f"{key}: {host} has no slots: the hostfile says slots=0")
        elif host not in available:
            problems.append(f"{key}: {host!r} is not in the hostfile ({', '.join(available)})")
        elif not colon:
            full_hosts.add(host)
        else:
            slots = chosen.setdefault(host, set())
            for number in numbers.split(","):
                if not _NUMBER.fullmatch(number.strip()):
                    problem = f"{part.strip()!r}: slots must be numbers with commas between them"
                    problems.append(f"{key}: {problem}, got {number!r}")
                elif int(number) not in available[host]:
                    has = f"has slots 0 to {len(available[host]) - 1}"
                    problems.append(f"{key}: {host} {has}, got {number.strip()}")
                else:
                    slots.add(int(number))
    return {
        host: sorted(chosen[host]) if host in chosen else available[host]
        for host in available
        if host in full_hosts or host in chosen
    }


def _split_nodes(text: str, hosts: Collection[str]) -> list[str]:
    """Split at ``@``, but not inside the ``user@host`` of the hostfile."""
    parts: list[str] = []
    for piece in text.strip().split("@"):
        if parts and f"{parts[-1]}@{piece.partition(':')[0]}".strip() in hosts:
            parts[-1] = f"{parts[-1]}@{piece}"
        else:
            parts.append(piece)
    return parts


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
        problem = f"must name a file in the model directory, got {path!r}: no such file"
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
