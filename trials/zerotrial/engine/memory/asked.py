"""What is asked of an estimate: sizes, stage, types and places, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zerolab.errors import ConfigError

__all__ = [
    "BYTES",
    "DEFAULT_BUCKET_NUMEL",
    "MOMENTS",
    "WHOLE",
    "Asked",
    "DTypeName",
    "Device",
    "Place",
    "check",
]

DTypeName = Literal["fp32", "bf16", "fp16"]
Place = Literal["none", "cpu", "nvme"]
Device = Literal["cuda", "cpu"]

MOMENTS = {"adam": 2, "lamb": 2, "lion": 1, "muon": 1, "adagrad": 1, "momentum": 1, "sgd": 0}
"""Optimizer states for each parameter, each in fp32, by kind of optimizer; Muon's of a matrix."""

WHOLE = frozenset({"lamb", "muon"})
"""Kinds of optimizers that update whole parameters."""

DEFAULT_BUCKET_NUMEL = 500_000_000
"""Elements in a bucket when the config does not say; never more than the model."""

BYTES: dict[DTypeName, int] = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Of one element."""


@dataclass(frozen=True)
class Asked:
    """The arguments of :func:`~zerotrial.engine.memory.estimate`, and what follows from them."""

    num_params: int
    largest: int
    world_size: int
    stage: int
    offload_optimizer: Place
    offload_param: Place
    precision: DTypeName
    optimizer: str
    kept: DTypeName
    """Type of the gradients that are kept, below stage 3."""
    sent: DTypeName | None
    bucket_numel: int
    """Of the largest bucket."""
    kept_whole: int
    """Elements of the blocks that stage 3 does not free before the update."""
    device: Device

    @property
    def shard(self) -> int:
        """Elements of a rank's part."""
        return -(-self.num_params // self.world_size)

    @property
    def owned(self) -> int:
        """Elements that a rank updates, or holds, below stage 3 and at it."""
        return self.shard if self.stage else self.num_params

    @property
    def owned_bucket(self) -> int:
        """Of the largest bucket, the elements that a rank updates."""
        return -(-self.bucket_numel // self.world_size) if self.stage else self.bucket_numel

    @property
    def crosses(self) -> bool:
        """Whether the optimizer works elsewhere than the parameters are."""
        away = self.offload_optimizer != "none" and self.offload_param == "none"
        return away and self.device != "cpu"

    @property
    def copied(self) -> bool:
        """Whether the optimizer has a copy of weights that could be their own master."""
        same = self.stage == 3 or self.precision == "fp32"
        return (same and self.crosses) or (self.stage == 3 and self.optimizer in WHOLE)

    @property
    def in_place(self) -> bool:
        """Whether the weights are their own master, which then stays where it is."""
        return (self.stage == 3 or self.precision == "fp32") and not self.copied


def check(  # noqa: PLR0917 - as estimate
    num_params: int, world_size: int, stage: int, optimizer_to: str, param_to: str, optimizer: str
) -> None:
    """Refuse a question that has no answer.

    Args:
        num_params: See :func:`~zerotrial.engine.memory.estimate`, for all of them.
        world_size: See there.
        stage: See there.
        optimizer_to: ``offload_optimizer``.
        param_to: ``offload_param``.
        optimizer: See there.

    Raises:
        ConfigError: With all that is wrong.
    """
    problems = []
    if num_params < 0:
        problems.append(f"num_params: must not be negative, got {num_params}")
    if world_size < 1:
        problems.append(f"world_size: must be at least 1, got {world_size}")
    if stage not in (0, 1, 2, 3):
        problems.append(f"stage: must be 0, 1, 2 or 3, got {stage}")
    if optimizer_to not in ("none", "cpu", "nvme"):
        problems.append(f"offload_optimizer: must be none, cpu or nvme, got {optimizer_to!r}")
    elif optimizer_to != "none" and stage == 0:
        problems.append("offload_optimizer: needs stage 1, 2 or 3, got 0")
    if param_to not in ("none", "cpu", "nvme"):
        problems.append(f"offload_param: must be none, cpu or nvme, got {param_to!r}")
    elif param_to != "none" and stage != 3:
        problems.append(f"offload_param: needs stage 3, got {stage}")
    elif param_to == "nvme" and optimizer in WHOLE:
        problems.append(
            f"offload_param: must be none or cpu for {optimizer}, which needs whole parameters in "
            "memory, got nvme"
        )
    if optimizer not in MOMENTS:
        known = ", ".join(MOMENTS)
        problems.append(f"optimizer: must be one of {known}, got {optimizer!r}")
    if problems:
        raise ConfigError("memory estimate", problems)
