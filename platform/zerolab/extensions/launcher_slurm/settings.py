"""Settings of ``zerolab agent start --resource-manager FILE``."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from zerolab.config.files import read_yaml
from zerolab.contract.messages import SlotInfo
from zerolab.errors import ConfigError

__all__ = ["ENV_SLURM", "SlurmSettings", "read_settings", "settings_of_environment"]

ENV_SLURM = "ZEROLAB_SLURM"
"""Variable with the settings of a job's follower, as JSON."""

_KEYS = {"type", "partition", "sbatch_args", "nodes", "slots_per_node", "slot_type", "grace_s"}


@dataclass(frozen=True)
class SlurmSettings:
    """Settings for running runs as jobs of Slurm."""

    partition: str = ""
    sbatch_args: tuple[str, ...] = ()
    """Further options of sbatch, e.g. ``--gpus-per-node=4``."""
    nodes: int = 1
    """Maximum number of nodes of all runs together."""
    slots_per_node: int = 1
    slot_type: str = "cpu"
    """Kind of a slot: ``cpu`` or ``cuda``."""
    grace_s: int = 60
    """Seconds before a time limit at which ranks are preempted."""

    @property
    def slots(self) -> list[SlotInfo]:
        """Return the slots that the agent offers."""
        device = "cpu" if self.slot_type == "cpu" else "cuda:0 Slurm"
        per_node = self.slots_per_node
        return [
            SlotInfo(number, device, node=number // per_node)
            for number in range(self.nodes * per_node)
        ]

    def slots_on(self, ready: int | None) -> list[SlotInfo]:
        """Return the slots that the agent offers while N nodes are ready; None if unknown.

        The number of down nodes equals the missing ones; which nodes they are is unknown.
        """
        if ready is None:
            return self.slots
        return [
            msgspec.structs.replace(slot, down=slot.node is not None and slot.node >= ready)
            for slot in self.slots
        ]

    @property
    def nodes_slots(self) -> list[int]:
        """Return the slots of each node."""
        return [self.slots_per_node] * self.nodes


def read_settings(path: Path) -> SlurmSettings:
    """Read the block ``resource_manager`` of a file.

    Raises:
        ConfigError: With all problems of the block.
    """
    content = read_yaml(path)
    block: Any = content.get("resource_manager", content)
    problems: list[str] = []
    if not isinstance(block, dict) or block.get("type") != "slurm":
        manager = block.get("type") if isinstance(block, dict) else block
        problem = f"resource_manager.type: must be slurm, got {manager!r}"
        raise ConfigError(str(path), [problem])
    problems += [
        f"resource_manager.{key}: unknown key; known are {', '.join(sorted(_KEYS))}"
        for key in sorted(block.keys() - _KEYS)
    ]
    numbers = {}
    for key, default in (("nodes", 1), ("slots_per_node", 1), ("grace_s", 60)):
        value = block.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            problems.append(f"resource_manager.{key}: must be at least 1, got {value!r}")
        else:
            numbers[key] = value
    options = block.get("sbatch_args", [])
    if not isinstance(options, list) or not all(isinstance(word, str) for word in options):
        problems.append(f"resource_manager.sbatch_args: must be a list of options, got {options!r}")
    partition = block.get("partition", "")
    if not isinstance(partition, str):
        problems.append(f"resource_manager.partition: must be a name, got {partition!r}")
    kind = block.get("slot_type", "cpu")
    if kind not in {"cpu", "cuda"}:
        problems.append(f"resource_manager.slot_type: must be cpu or cuda, got {kind!r}")
    if problems:
        raise ConfigError(str(path), problems)
    return SlurmSettings(partition, tuple(options), slot_type=kind, **numbers)


def settings_of_environment() -> SlurmSettings:
    """Return the settings that the launcher passes to its follower."""
    return msgspec.json.decode(os.environ[ENV_SLURM], type=SlurmSettings)
