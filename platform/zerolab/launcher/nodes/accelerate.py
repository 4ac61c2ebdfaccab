"""The file that ``accelerate config`` writes, as far as it says what runs where."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerolab.config.files import read_yaml
from zerolab.errors import ConfigError

__all__ = ["Accelerate", "engine_like_fsdp", "read_accelerate"]

_ABOUT_PLACES = {
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
"""Keys of :data:`_ABOUT_PLACES` to what they say that holds here, too; with anything else they have
no effect."""
_ABOUT_HOSTS = {
    "deepspeed_hostfile", "deepspeed_inclusion_filter", "deepspeed_exclusion_filter",
    "deepspeed_multinode_launcher",
}  # fmt: skip
_DEEPSPEED = {
    "zero_stage": "ACCELERATE_DEEPSPEED_ZERO_STAGE",
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING",
    "offload_optimizer_device": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
    "offload_param_device": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
    "offload_optimizer_nvme_path": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH",
    "zero3_init_flag": "ACCELERATE_DEEPSPEED_ZERO3_INIT",
    "zero3_save_16bit_model": "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
    "deepspeed_config_file": "ACCELERATE_DEEPSPEED_CONFIG_FILE",
}
"""Keys of ``deepspeed_config`` to the variables in which ``accelerate launch`` hands them on."""
_STAGES = {
    "FULL_SHARD": 3, "1": 3, "TRUE": 3, "HYBRID_SHARD": 3, "4": 3,
    "SHARD_GRAD_OP": 2, "2": 2, "FALSE": 2, "HYBRID_SHARD_ZERO2": 2, "5": 2,
    "NO_SHARD": 0, "3": 0,
}  # fmt: skip
"""What FSDP shards, in its words, to the stage that shards as much."""
_FSDP = {"fsdp_version", "fsdp_sharding_strategy", "fsdp_reshard_after_forward"}
_FSDP |= {"fsdp_offload_params", "fsdp_state_dict_type"}
_LAST_PORT = 65535
_BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_OFF: tuple[Any, ...] = (None, False, "", "no", "NO", "none", {}, [])


@dataclass
class Accelerate:
    """What such a file says."""

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
    """Variables by which Accelerate learns of the sections about DeepSpeed or FSDP."""
    unused: list[str] = field(default_factory=list)
    """Keys that are set to something, and have no effect here."""
    about_engine: list[str] = field(default_factory=list)
    """Keys that :attr:`engine` stands for."""


def read_accelerate(path: Path) -> Accelerate:
    """Read such a file.

    Raises:
        ConfigError: With everything that is wrong with it.
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
    found = Accelerate(
        hostfile=str(deepspeed.get("deepspeed_hostfile") or ""),
        include=str(deepspeed.get("deepspeed_inclusion_filter") or ""),
        exclude=str(deepspeed.get("deepspeed_exclusion_filter") or ""),
        nodes=machines,
        per_node=None if ranks is None else ranks // machines,
        node_rank=rank,
        address=str(content.get("main_process_ip") or ""),
        port=port,
        cpu=_is_on(content, "use_cpu", problems),
    )
    found.slots = _slots(content.get("gpu_ids"), found.per_node, problems)
    if content.get("mixed_precision") not in _OFF:
        found.environment["ACCELERATE_MIXED_PRECISION"] = str(content["mixed_precision"])
    found.engine, found.about_engine = _engine(content, deepspeed, problems)
    found.unused = sorted(set(_unused(content, deepspeed)) - set(found.about_engine))
    if problems:
        raise ConfigError(str(path), problems)
    return found


def _is_on(content: dict[str, Any], key: str, problems: list[str]) -> bool:
    value = content.get(key)
    word = str(value).lower()
    if value not in (None, "") and word not in _BOOLEANS:
        problems.append(f"{key}: must be true or false, got {value!r}")
    return _BOOLEANS.get(word, False)


def _slots(ids: Any, ranks: int | None, problems: list[str]) -> str:
    """The slots of this machine that ``gpu_ids`` names, as many as there are processes on it."""
    if ids is None or ids in ("", "all", []):
        return ""
    words = [str(one) for one in ids] if isinstance(ids, list) else str(ids).split(",")
    problems += [
        f"gpu_ids: must be numbers with commas between them, got {word.strip()!r}"
        for word in words
        if not re.fullmatch(r"[0-9]+", word.strip())
    ]
    if ranks is not None and ranks > len(words):
        told = f"must name at least as many as there are processes on a machine ({ranks})"
        problems.append(f"gpu_ids: {told}, got {', '.join(words)}")
    return ",".join(words[:ranks])


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
    known = _ABOUT_PLACES | sections.keys()
    others = [key for key in content if key not in known and content[key] not in _OFF]
    others += [
        f"{key}: {content[key]}"
        for key, same in _AS_IT_IS.items()
        if content.get(key) not in (*_OFF, *same)
    ]
    return others + [
        f"{name}.{key}"
        for name, section in sections.items()
        for key, value in section.items()
        if key not in _ABOUT_HOSTS and value not in _OFF
    ]


def _engine(
    content: dict[str, Any], deepspeed: dict[str, Any], problems: list[str]
) -> tuple[dict[str, str], list[str]]:
    """Read the section about DeepSpeed or FSDP, whichever ``distributed_type`` names."""
    kind = content.get("distributed_type")
    fsdp = content.get("fsdp_config") or {}
    if kind == "DEEPSPEED":
        used = [key for key in _DEEPSPEED if deepspeed.get(key) is not None]
        variables = {_DEEPSPEED[key]: _word(deepspeed[key]) for key in used}
        variables["ACCELERATE_CONFIG_DS_FIELDS"] = ",".join(deepspeed)
        about = [f"deepspeed_config.{key}" for key in used]
    elif kind == "FSDP" and isinstance(fsdp, dict):
        variables = _like_fsdp(fsdp, problems)
        about = [f"fsdp_config.{key}" for key in fsdp if key in _FSDP]
    else:
        return {}, []
    return {"ACCELERATE_USE_DEEPSPEED": "true"} | variables, about


def _like_fsdp(fsdp: dict[str, Any], problems: list[str]) -> dict[str, str]:
    """Say in DeepSpeed's variables what FSDP would do."""
    newer = str(fsdp.get("fsdp_version", 1)) == "2"
    key = "fsdp_reshard_after_forward" if newer else "fsdp_sharding_strategy"
    said = str(fsdp.get(key, "FULL_SHARD")).upper()
    stage = _STAGES.get(said)
    if stage is None:
        words = "FULL_SHARD, SHARD_GRAD_OP or NO_SHARD"
        problems.append(f"fsdp_config.{key}: must be {words}, got {fsdp[key]!r}")
        return {}
    away = "cpu" if fsdp.get("fsdp_offload_params") else "none"
    return {
        _DEEPSPEED["zero_stage"]: str(stage),
        _DEEPSPEED["offload_optimizer_device"]: away if stage else "none",
        _DEEPSPEED["offload_param_device"]: away if stage == 3 else "none",
        _DEEPSPEED["zero3_save_16bit_model"]: "true",  # get_state_dict() is whole with FSDP, too
    }


def engine_like_fsdp(environment: Mapping[str, str]) -> dict[str, str]:
    """Say in DeepSpeed's variables what ``accelerate launch`` says in FSDP's.

    Args:
        environment: Of a process that it has started.

    Returns:
        What to set.

    Raises:
        ConfigError: If what is said names no stage.
    """
    said: dict[str, Any] = {
        key: environment[key.upper()] for key in _FSDP if key.upper() in environment
    }
    said["fsdp_offload_params"] = said.get("fsdp_offload_params") == "true"
    problems: list[str] = []
    variables = _like_fsdp(said, problems)
    if problems:
        raise ConfigError("accelerate launch", problems)
    return {"ACCELERATE_USE_FSDP": "false", "ACCELERATE_USE_DEEPSPEED": "true"} | variables


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
