"""What ``zerolab agent start --resource-manager FILE`` reads."""

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
"""Settings of a job's follower, as JSON; set by the launcher for its own process."""

_KEYS = {"type", "partition", "sbatch_args", "nodes", "slots_per_node", "slot_type", "grace_s"}


@dataclass(frozen=True)
class SlurmSettings:
    """How runs become jobs."""

    partition: str = ""
    sbatch_args: tuple[str, ...] = ()
    """Further options of sbatch, e.g. ``--gpus-per-node=4``."""
    nodes: int = 1
    """Nodes that all runs together may take."""
    slots_per_node: int = 1
    slot_type: str = "cpu"
    """What a slot is: ``cpu`` or ``cuda``."""
    grace_s: int = 60
    """Seconds before a time limit at which ranks are told to checkpoint."""

    @property
    def slots(self) -> list[SlotInfo]:
        """Slots that the agent offers."""
        device = "cpu" if self.slot_type == "cpu" else "cuda:0 Slurm"
        each = self.slots_per_node
        return [
            SlotInfo(number, device, node=number // each) for number in range(self.nodes * each)
        ]

    def slots_on(self, ready: int | None) -> list[SlotInfo]:
        """Slots that the agent offers while Slurm has so many nodes ready; None: not known.

        As many nodes are down as are missing; which of ours they are, nobody can say.
        """
        if ready is None:
            return self.slots
        return [
            msgspec.structs.replace(slot, down=slot.node is not None and slot.node >= ready)
            for slot in self.slots
        ]

    @property
    def nodes_slots(self) -> list[int]:
        """Slots of each node."""
        return [self.slots_per_node] * self.nodes


def read_settings(path: Path) -> SlurmSettings:
    """Read the block ``resource_manager`` of a file.

    Raises:
        ConfigError: With everything that is wrong with it.
    """
    content = read_yaml(path)
    block: Any = content.get("resource_manager", content)
    problems: list[str] = []
    if not isinstance(block, dict) or block.get("type") != "slurm":
        found = block.get("type") if isinstance(block, dict) else block
        problem = f"resource_manager.type: must be slurm, got {found!r}"
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
    words = block.get("sbatch_args", [])
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        problems.append(f"resource_manager.sbatch_args: must be a list of options, got {words!r}")
    partition = block.get("partition", "")
    if not isinstance(partition, str):
        problems.append(f"resource_manager.partition: must be a name, got {partition!r}")
    kind = block.get("slot_type", "cpu")
    if kind not in {"cpu", "cuda"}:
        problems.append(f"resource_manager.slot_type: must be cpu or cuda, got {kind!r}")
    if problems:
        raise ConfigError(str(path), problems)
    return SlurmSettings(partition, tuple(words), slot_type=kind, **numbers)


def settings_of_environment() -> SlurmSettings:
    """Return what the launcher has set for its follower."""
    return msgspec.json.decode(os.environ[ENV_SLURM], type=SlurmSettings)
