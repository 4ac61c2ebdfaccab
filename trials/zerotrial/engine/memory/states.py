"""The model states of a rank, by the formula, and one estimate for each choice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from zerotrial.engine.memory.asked import (
    BYTES,
    DEFAULT_BUCKET_NUMEL,
    MOMENTS,
    WHOLE,
    Asked,
    Device,
    DTypeName,
    Place,
    check,
)
from zerotrial.engine.memory.working import host_working, working

__all__ = ["MemoryEstimate", "estimate", "every_choice"]


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that one rank holds, by what they are and where they lie.

    Attributes:
        stage: ZeRO stage.
        world_size: Data-parallel ranks.
        offload_optimizer: Where master weights and moments lie.
        offload_param: Where the sharded parameters lie.
        parameters: Weights that forward and backward use, bytes.
        gradients: As backward makes them, bytes.
        accumulation: What gradients take beyond that since they are summed in fp32, bytes.
        master: The fp32 copy that the optimizer updates, bytes.
        moments: Other optimizer states, bytes.
        working: Buckets and gathered blocks, beyond the model states; bytes on the device.
        host_working: What is under way between device, host and files; bytes on the host.
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
    accumulation: int
    master: int
    moments: int
    working: int
    host_working: int
    device: int
    host: int
    disk: int

    @property
    def peak_device(self) -> int:
        """Model states and working set on the device, bytes."""
        return self.device + self.working

    @property
    def peak_host(self) -> int:
        """Model states and working set in the host's memory, bytes."""
        return self.host + self.host_working

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
    precision: DTypeName = "bf16",
    *,
    optimizer: str = "adam",
    grad_accum_dtype: DTypeName | None = None,
    communication_data_type: DTypeName | None = None,
    bucket_numel: int = DEFAULT_BUCKET_NUMEL,
    kept_whole: int = 0,
    device: Device = "cuda",
) -> MemoryEstimate:
    """Compute what a rank holds between two steps, and its working set.

    Args:
        num_params: P, trainable parameters of the whole model, elements.
        largest_layer_params: Of the largest block that stage 3 gathers at once, elements.
        world_size: N, data-parallel ranks.
        stage: 0 to 3.
        offload_optimizer: Stages 1 to 3: ``cpu`` or ``nvme`` for master weights and moments.
        offload_param: Stage 3: ``cpu`` for the sharded parameters and all that belongs to them;
            ``nvme`` for shards and gradients in files.
        precision: Of forward and backward.
        optimizer: A key of :data:`MOMENTS`.
        grad_accum_dtype: In which gradients are summed over micro-batches; None: as backward makes
            them. Stage 3 always keeps them in fp32.
        communication_data_type: In which gradients travel; None: as they are kept, at stage 2 as
            backward makes them.
        bucket_numel: Elements in the largest bucket of gradients or weights.
        kept_whole: Elements of the blocks that stage 3 keeps whole: by
            ``stage3_param_persistence_threshold`` until the update, by
            ``stage3_max_live_parameters`` from forward to backward.
        device: What trains. On ``cpu`` device and host are one memory, and ``offload_optimizer:
            cpu`` moves nothing.

    Returns:
        Bytes for one rank; fractions are rounded up.

    Raises:
        ConfigError: If the stage does not exist, or does not offload what is asked.
    """
    check(num_params, world_size, stage, offload_optimizer, offload_param, optimizer)
    asked = Asked(
        num_params,
        largest_layer_params,
        world_size,
        stage,
        offload_optimizer,
        offload_param,
        precision,
        optimizer,
        grad_accum_dtype or precision,
        communication_data_type,
        min(bucket_numel, num_params),
        kept_whole,
        device,
    )
    states = _states(asked)
    away = states.moments if asked.in_place else states.master + states.moments
    disk = away if offload_optimizer == "nvme" else 0
    host = away if offload_optimizer == "cpu" else 0
    if offload_param == "nvme":
        disk += states.total - states.moments
        host = states.total - disk
    elif offload_param == "cpu":
        host = states.total - disk
    return MemoryEstimate(
        stage=stage,
        world_size=world_size,
        offload_optimizer=offload_optimizer,
        offload_param=offload_param,
        working=working(asked),
        host_working=host_working(asked, away),
        device=states.total - host - disk,
        host=host,
        disk=disk,
        **vars(states),
    )


@dataclass(frozen=True)
class _States:
    """Model states of one rank by what they are, bytes; see :class:`MemoryEstimate`."""

    parameters: int
    gradients: int
    accumulation: int
    master: int
    moments: int

    @property
    def total(self) -> int:
        return sum(vars(self).values())


def _states(asked: Asked) -> _States:
    width, kept = BYTES[asked.precision], BYTES[asked.kept]
    moments = 4 * MOMENTS[asked.optimizer] * asked.owned
    if asked.stage == 3:
        shards = 4 * asked.shard
        # A copy for the optimizer is the master; else the shards are.
        parameters, master = (shards, shards) if asked.copied else (0, shards)
        return _States(parameters, shards, 0, master, moments)
    summed = asked.num_params if asked.stage < 2 else asked.shard
    own = asked.precision == "fp32"
    return _States(
        parameters=width * asked.num_params,
        gradients=min(width, kept) * summed,
        accumulation=max(kept - width, 0) * summed,
        master=4 * asked.shard if asked.copied else 0 if own else 4 * asked.owned,
        moments=moments,
    )


def every_choice(
    num_params: int,
    largest_layer_params: int,
    world_size: int,
    precision: DTypeName = "bf16",
    *,
    optimizer: str = "adam",
    grad_accum_dtype: DTypeName | None = None,
    communication_data_type: DTypeName | None = None,
    bucket_numel: int | Callable[[int, Place], int] = DEFAULT_BUCKET_NUMEL,
    kept_whole: int = 0,
    device: Device = "cuda",
) -> Iterator[MemoryEstimate]:
    """Estimate every stage with every offload that it supports, the cheapest in traffic first.

    Args:
        num_params: P, elements.
        largest_layer_params: Of the largest gathered block, elements.
        world_size: N, data-parallel ranks.
        precision: Of forward and backward.
        optimizer: A key of :data:`MOMENTS`.
        grad_accum_dtype: See :func:`estimate`.
        communication_data_type: See :func:`estimate`.
        bucket_numel: Elements in the largest bucket, or what tells them for a stage and an
            ``offload_optimizer``.
        kept_whole: See :func:`estimate`.
        device: See :func:`estimate`.

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
        (3, "nvme", "cpu"),
        (3, "cpu", "nvme"),
        (3, "nvme", "nvme"),
    ]
    if optimizer in WHOLE:
        choices = [choice for choice in choices if choice[2] != "nvme"]
    for stage, offload_optimizer, offload_param in choices:
        largest = (
            bucket_numel
            if isinstance(bucket_numel, int)
            else bucket_numel(stage, offload_optimizer)
        )
        yield estimate(
            num_params,
            largest_layer_params,
            world_size,
            stage,
            offload_optimizer,
            offload_param,
            precision,
            optimizer=optimizer,
            grad_accum_dtype=grad_accum_dtype,
            communication_data_type=communication_data_type,
            bucket_numel=largest,
            kept_whole=kept_whole,
            device=device,
        )
