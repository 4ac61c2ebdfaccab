"""How many bytes a rank needs, before it is started.

P parameters in 16 bits with Adam on N ranks, bytes for each parameter and rank:

======  ==============  =============  ==============  =========  ==========
stage   parameters      gradients      master          moments    together
======  ==============  =============  ==============  =========  ==========
0       2               2              4               8          16
1       2               2              4/N             8/N        4 + 12/N
2       2               2/N            4/N             8/N        2 + 14/N
3       (the master)    4/N            4/N             8/N        16/N
======  ==============  =============  ==============  =========  ==========

Stage 3 keeps no 16-bit shard: it casts its fp32 shard while it gathers, and its gradients are
fp32, so that the sum is the same. In fp32 the parameters are their own master. Beside these model
states a rank needs room that the formula does not name, the *working set*: buckets under way, and
at stage 3 the blocks that are gathered at the moment. Activations are not counted: they depend on
the batch.

References:
    Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models,
    arXiv:1910.02054, sections 3 and 5.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from zerolab.errors import ConfigError

Precision = Literal["fp32", "bf16", "fp16"]
Place = Literal["none", "cpu", "nvme"]

MOMENTS = {"adam": 2, "lamb": 2, "lion": 1, "muon": 1, "adagrad": 1, "momentum": 1, "sgd": 0}
"""Optimizer states for each parameter, each in fp32, by kind of optimizer."""

DEFAULT_BUCKET_NUMEL = 500_000_000
"""Elements in a bucket when the config does not say; never more than the model."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that one rank holds, by what they are and where they lie.

    Attributes:
        stage: ZeRO stage.
        world_size: Data-parallel ranks.
        offload_optimizer: Where master weights and moments lie.
        offload_param: Where the sharded parameters lie.
        parameters: Weights that forward and backward use, bytes.
        gradients: Bytes.
        master: The fp32 copy that the optimizer updates, bytes.
        moments: Other optimizer states, bytes.
        working: Buckets and gathered blocks, beyond the model states; bytes on the device.
        device: Model states on the device, bytes; the working set comes on top.
        host: Model states in the host's memory, bytes.
        disk: Model states in files, bytes.
    """

    stage: int
    world_size: int
    offload_optimizer: Place
    offload_param: Place
    parameters: int
    gradients: int
    master: int
    moments: int
    working: int
    device: int
    host: int
    disk: int

    @property
    def peak_device(self) -> int:
        """Model states and working set on the device, bytes."""
        return self.device + self.working

    @property
    def offload(self) -> str:
        """What is offloaded and where to, in words."""
        parts = []
        if self.offload_optimizer != "none":
            parts.append(f"optimizer to {self.offload_optimizer}")
        if self.offload_param != "none":
            parts.append(f"parameters to {self.offload_param}")
        return ", ".join(parts) or "none"


def estimate(  # noqa: PLR0917 - the order of the public signature
    num_params: int,
    largest_layer_params: int = 0,
    world_size: int = 1,
    stage: int = 0,
    offload_optimizer: Place = "none",
    offload_param: Place = "none",
    precision: Precision = "bf16",
    *,
    optimizer: str = "adam",
    fp32_accumulation: bool = False,
    bucket_numel: int = DEFAULT_BUCKET_NUMEL,
) -> MemoryEstimate:
    """Compute what a rank holds between two steps, and its working set.

    Args:
        num_params: P, trainable parameters of the whole model, elements.
        largest_layer_params: Of the largest block that stage 3 gathers at once, elements.
        world_size: N, data-parallel ranks.
        stage: 0 to 3.
        offload_optimizer: Stages 1 to 3: ``cpu`` or ``nvme`` for master weights and moments.
        offload_param: Stage 3: ``cpu`` for the sharded parameters and all that belongs to them.
        precision: Of forward and backward.
        optimizer: A key of :data:`MOMENTS`.
        fp32_accumulation: Whether gradients of 16-bit weights are summed in fp32; stage 3 always
            does so, in place.
        bucket_numel: Elements in one bucket of gradients or weights under way.

    Returns:
        Bytes for one rank; fractions are rounded up.

    Raises:
        ConfigError: If the stage does not exist, or does not offload what is asked.
    """
    _check(num_params, world_size, stage, offload_optimizer, offload_param, optimizer)
    width = 4 if precision == "fp32" else 2
    shard = -(-num_params // world_size)
    gradient = 4 if fp32_accumulation and precision != "fp32" else width
    parameters = width * num_params if stage < 3 else 0
    gradients = {0: gradient * num_params, 1: gradient * num_params, 2: gradient * shard}.get(
        stage, 4 * shard
    )
    master_numel = 0 if precision == "fp32" and stage < 3 else shard if stage else num_params
    master = 4 * master_numel
    moments = 4 * MOMENTS[optimizer] * (shard if stage else num_params)
    away = offload_optimizer != "none" and offload_param == "none"
    if away and (stage == 3 or precision == "fp32"):
        # What is gathered stays on the device, and the optimizer works on a copy.
        master = 4 * shard
        parameters = parameters or 4 * shard

    states = parameters + gradients + master + moments
    disk = master + moments if offload_optimizer == "nvme" else 0
    host = master + moments if offload_optimizer == "cpu" else 0
    if offload_param == "cpu":
        host = states - disk
    return MemoryEstimate(
        stage=stage,
        world_size=world_size,
        offload_optimizer=offload_optimizer,
        offload_param=offload_param,
        parameters=parameters,
        gradients=gradients,
        master=master,
        moments=moments,
        working=_working(num_params, largest_layer_params, world_size, stage, width, bucket_numel),
        device=states - host - disk,
        host=host,
        disk=disk,
    )


def every_choice(
    num_params: int,
    largest_layer_params: int,
    world_size: int,
    precision: Precision = "bf16",
    *,
    optimizer: str = "adam",
    fp32_accumulation: bool = False,
    bucket_numel: int = DEFAULT_BUCKET_NUMEL,
) -> Iterator[MemoryEstimate]:
    """Estimate every stage with every offload that it supports, the cheapest in traffic first.

    Args:
        num_params: P, elements.
        largest_layer_params: Of the largest gathered block, elements.
        world_size: N, data-parallel ranks.
        precision: Of forward and backward.
        optimizer: A key of :data:`MOMENTS`.
        fp32_accumulation: Whether gradients of 16-bit weights are summed in fp32.
        bucket_numel: Elements in one bucket.

    Yields:
        One estimate for each choice.
    """
    choices: list[tuple[int, Place, Place]] = [
        (0, "none", "none"),
        (1, "none", "none"),
        (2, "none", "none"),
        (3, "none", "none"),
        (1, "cpu", "none"),
        (2, "cpu", "none"),
        (3, "cpu", "none"),
        (3, "cpu", "cpu"),
        (1, "nvme", "none"),
        (2, "nvme", "none"),
        (3, "nvme", "none"),
    ]
    for stage, offload_optimizer, offload_param in choices:
        yield estimate(
            num_params,
            largest_layer_params,
            world_size,
            stage,
            offload_optimizer,
            offload_param,
            precision,
            optimizer=optimizer,
            fp32_accumulation=fp32_accumulation,
            bucket_numel=bucket_numel,
        )


def _working(  # noqa: PLR0917 - as estimate
    num_params: int, largest: int, world_size: int, stage: int, width: int, bucket_numel: int
) -> int:
    """Bytes beyond the model states.

    Stages 0 and 1 reduce gradients where they lie. Stage 2 has two buckets under way, stage 3 two
    gathered blocks and the gradients of one, as computed and as summed.
    """
    if stage == 3:
        return (2 * width + width + 4) * largest
    if stage < 2 or world_size == 1:
        return 0
    return 2 * width * min(bucket_numel, num_params)


def _check(  # noqa: PLR0917 - as estimate
    num_params: int, world_size: int, stage: int, optimizer_to: str, param_to: str, optimizer: str
) -> None:
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
    if param_to not in ("none", "cpu"):
        problems.append(f"offload_param: must be none or cpu, got {param_to!r}")
    elif param_to != "none" and stage != 3:
        problems.append(f"offload_param: needs stage 3, got {stage}")
    if optimizer not in MOMENTS:
        known = ", ".join(MOMENTS)
        problems.append(f"optimizer: must be one of {known}, got {optimizer!r}")
    if problems:
        raise ConfigError("memory estimate", problems)
