"""Reader of files that ``accelerate config`` writes, for machines, slots and the engine."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerolab.config.files import read_yaml
from zerolab.errors import ConfigError
from zerolab.extensions.fsdp_settings import DEEPSPEED_VARIABLES, FSDP_KEYS, variables_of_sharding

__all__ = ["AccelerateConfig", "read_accelerate"]

_MACHINE_KEYS = {
    "compute_environment", "distributed_type", "num_machines", "num_processes", "machine_rank",
    "main_process_ip", "main_process_port", "gpu_ids", "use_cpu", "mixed_precision",
    "main_training_function", "same_network", "rdzv_backend", "debug", "enable_cpu_affinity",
    "deepspeed_config",
}  # fmt: skip
_AS_IT_IS: dict[str, tuple[Any, ...]] = {
    "compute_environment": ("LOCAL_MACHINE",),
    "distributed_type": ("NO", "MULTI_GPU", "MULTI_CPU", "DEEPSPEED", "FSDP"),
    "main_training_function": ("main",),
    "rdzv_backend": ("static", "c10d"),
    "same_network": (True,),
    "debug": (),
    "enable_cpu_affinity": (),
}
"""Values of keys about machines that apply here, too; other values have no effect."""
_HOST_KEYS = {
    "deepspeed_hostfile", "deepspeed_inclusion_filter", "deepspeed_exclusion_filter",
    "deepspeed_multinode_launcher",
}  # fmt: skip
_LAST_PORT = 65535
_BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_OFF: tuple[Any, ...] = (None, False, "", "no", "NO", "none", {}, [])


@dataclass
class AccelerateConfig:
    """Settings of such a file."""

    hostfile: str = ""
    include: str = ""
    exclude: str = ""
    nodes: int | None = None
    per_node: int | None = None
    slots: str = ""
    """Slots of this machine, ``0,2``; empty for all."""
    node_rank: int | None = None
    address: str = ""
    port: int | None = None
    cpu: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    engine: dict[str, str] = field(default_factory=dict)
    """Variables in which AccelerateConfig expects the sections about DeepSpeed or FSDP."""
    unused: list[str] = field(default_factory=list)
    """Keys that are set and have no effect here."""
    about_engine: list[str] = field(default_factory=list)
    """Keys that :attr:`engine` covers."""


def read_accelerate(path: Path) -> AccelerateConfig:
    """Read such a file.

    Raises:
        ConfigError: With all problems of the file.
    """
    content = read_yaml(path)
    problems: list[str] = []
    deepspeed = content.get("deepspeed_config") or {}
    if not isinstance(deepspeed, dict):
        problems.append(f"deepspeed_config: must be a block of keys, got {deepspeed!r}")
        deepspeed = {}
    machines = _number(content, "num_machines", problems, least=1) or 1
    ranks = _number(content, "num_processes", problems, least=1)
    if ranks is not None and ranks % machines:
        problems.append(
            f"num_processes: must be a multiple of num_machines ({machines}), got {ranks}"
        )
    rank = _number(content, "machine_rank", problems, least=0)
    if rank is not None and "num_machines" in content and rank >= machines:
        problems.append(f"machine_rank: must be less than num_machines ({machines}), got {rank}")
    port = _number(content, "main_process_port", problems, least=0)
    if port is not None and port > _LAST_PORT:
        problems.append(f"main_process_port: must be at most {_LAST_PORT}, got {port}")
    settings = AccelerateConfig(
        hostfile=str(deepspeed.get("deepspeed_hostfile") or ""),
        include=str(deepspeed.get("deepspeed_inclusion_filter") or ""),
        exclude=str(deepspeed.get("deepspeed_exclusion_filter") or ""),
        nodes=machines,
        per_node=None if ranks is None else ranks // machines,
        node_rank=rank,
        address=str(content.get("main_process_ip") or ""),
        port=port,
        cpu=_is_enabled(content, "use_cpu", problems),
    )
    settings.slots = _slots(content.get("gpu_ids"), settings.per_node, problems)
    if content.get("mixed_precision") not in _OFF:
        settings.environment["ACCELERATE_MIXED_PRECISION"] = str(content["mixed_precision"])
    settings.engine, settings.about_engine = _engine(content, deepspeed, problems)
    settings.unused = sorted(set(_unused(content, deepspeed)) - set(settings.about_engine))
    if problems:
        raise ConfigError(str(path), problems)
    return settings


def _is_enabled(content: dict[str, Any], key: str, problems: list[str]) -> bool:
    value = content.get(key)
    word = str(value).lower()
    if value not in (None, "") and word not in _BOOLEANS:
        problems.append(f"{key}: must be true or false, got {value!r}")
    return _BOOLEANS.get(word, False)


def _slots(ids: Any, ranks: int | None, problems: list[str]) -> str:
    """Return the slots in ``gpu_ids``, as many as there are processes on this machine."""
    if ids is None or ids in ("", "all", []):
        return ""
    numbers = [str(id_) for id_ in ids] if isinstance(ids, list) else str(ids).split(",")
    problems += [
        f"gpu_ids: must be numbers with commas between them, got {number.strip()!r}"
        for number in numbers
        if not re.fullmatch(r"[0-9]+", number.strip())
    ]
    if ranks is not None and ranks > len(numbers):
        requirement = f"must name at least as many as there are processes on a machine ({ranks})"
        problems.append(f"gpu_ids: {requirement}, got {', '.join(numbers)}")
    return ",".join(numbers[:ranks])


def _number(content: dict[str, Any], key: str, problems: list[str], least: int) -> int | None:
    value = content.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        problems.append(f"{key}: must be a whole number of at least {least}, got {value!r}")
        return None
    return value


def _unused(content: dict[str, Any], deepspeed: dict[str, Any]) -> list[str]:
    fsdp = content.get("fsdp_config")
    sections: dict[str, Any] = {"deepspeed_config": deepspeed}
    if isinstance(fsdp, dict):
        sections["fsdp_config"] = fsdp
    known_keys = _MACHINE_KEYS | sections.keys()
    unused = [key for key in content if key not in known_keys and content[key] not in _OFF]
    unused += [
        f"{key}: {content[key]}"
        for key, same in _AS_IT_IS.items()
        if content.get(key) not in (*_OFF, *same)
    ]
    return unused + [
        f"{name}.{key}"
        for name, section in sections.items()
        for key, value in section.items()
        if key not in _HOST_KEYS and value not in _OFF
    ]


def _engine(
    content: dict[str, Any], deepspeed: dict[str, Any], problems: list[str]
) -> tuple[dict[str, str], list[str]]:
    """Read the section about DeepSpeed or FSDP, depending on ``distributed_type``."""
    kind = content.get("distributed_type")
    fsdp = content.get("fsdp_config") or {}
    if kind == "DEEPSPEED":
        used = [key for key in DEEPSPEED_VARIABLES if deepspeed.get(key) is not None]
        variables = {DEEPSPEED_VARIABLES[key]: _text_value(deepspeed[key]) for key in used}
        variables["ACCELERATE_CONFIG_DS_FIELDS"] = ",".join(deepspeed)
        about = [f"deepspeed_config.{key}" for key in used]
    elif kind == "FSDP" and isinstance(fsdp, dict):
        variables = variables_of_sharding(fsdp, problems)
        about = [f"fsdp_config.{key}" for key in fsdp if key in FSDP_KEYS]
    else:
        return {}, []
    return {"ACCELERATE_USE_DEEPSPEED": "true"} | variables, about


def _text_value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
