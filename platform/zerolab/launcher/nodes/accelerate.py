"""The file that ``accelerate config`` writes, as far as it says what runs where."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerolab.config.files import read_yaml
from zerolab.errors import ConfigError

__all__ = ["Accelerate", "read_accelerate"]

_ABOUT_PLACES = {
    "compute_environment", "distributed_type", "num_machines", "num_processes", "machine_rank",
    "main_process_ip", "main_process_port", "gpu_ids", "use_cpu", "mixed_precision",
    "main_training_function", "same_network", "rdzv_backend", "debug", "enable_cpu_affinity",
    "deepspeed_config",
}  # fmt: skip
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
    unused: list[str] = field(default_factory=list)
    """Keys that are set to something, and have no effect here."""


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
    found = Accelerate(
        hostfile=str(deepspeed.get("deepspeed_hostfile") or ""),
        include=str(deepspeed.get("deepspeed_inclusion_filter") or ""),
        exclude=str(deepspeed.get("deepspeed_exclusion_filter") or ""),
        nodes=machines,
        per_node=None if ranks is None else ranks // machines,
        node_rank=_number(content, "machine_rank", problems, least=0),
        address=str(content.get("main_process_ip") or ""),
        port=_number(content, "main_process_port", problems, least=0),
        cpu=bool(content.get("use_cpu")),
    )
    gpus = content.get("gpu_ids")
    if gpus not in (*_OFF, "all"):
        found.slots = str(gpus)
    if content.get("mixed_precision") not in _OFF:
        found.environment["ACCELERATE_MIXED_PRECISION"] = str(content["mixed_precision"])
    found.unused = _unused(content, deepspeed)
    if problems:
        raise ConfigError(str(path), problems)
    return found


def _number(content: dict[str, Any], key: str, problems: list[str], least: int) -> int | None:
    value = content.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        problems.append(f"{key}: must be a whole number of at least {least}, got {value!r}")
        return None
    return value


def _unused(content: dict[str, Any], deepspeed: dict[str, Any]) -> list[str]:
    here = {"deepspeed_hostfile", "deepspeed_inclusion_filter", "deepspeed_exclusion_filter"}
    here.add("deepspeed_multinode_launcher")
    others = [key for key in content if key not in _ABOUT_PLACES and content[key] not in _OFF]
    others += [
        f"deepspeed_config.{key}"
        for key in deepspeed
        if key not in here and deepspeed[key] not in _OFF
    ]
    return sorted(others)
