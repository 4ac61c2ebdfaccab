"""Formulas for the memory of one rank: model states, offload and working set.

P parameters in 16 bits with Adam on N ranks, bytes per parameter and rank:

======  ==============  =============  ==============  =========  ==========  ==============
stage   parameters      gradients      master          moments    together    accumulation
======  ==============  =============  ==============  =========  ==========  ==============
0       2               2              4               8          16          2
1       2               2              4/N             8/N        4 + 12/N    2
2       2               2/N            4/N             8/N        2 + 14/N    2/N
3       (the master)    4/N            4/N             8/N        16/N        none
======  ==============  =============  ==============  =========  ==========  ==============

Stage 3 has no 16-bit shard: it casts its fp32 shard while it gathers, and its gradients are fp32.
*Accumulation* is the additional memory where 16-bit gradients are summed in fp32. A 16-bit gradient
is freed as soon as it is added, so this costs 2 bytes per parameter and not 4.

fp32 weights, and the shards of stage 3, are their own master. Offloading does not move them: on a
GPU the optimizer updates a copy elsewhere; on a CPU it updates them in place, and only the moments
go to files. Optimizers that need whole parameters (LAMB, Muon) have a copy at stage 3 in any case.

The *working set* comes on top of the model states: gradient buckets in transit, gathered blocks at
stage 3, and host buffers between device, host and files. Activations depend on the batch and are
not counted.

References:
    Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models,
    arXiv:1910.02054, sections 3 and 5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from zerolab.errors import ConfigError

__all__ = [
    "DEFAULT_BUCKET_NUMEL",
    "MOMENTS",
    "WHOLE",
    "DTypeName",
    "Device",
    "MemoryEstimate",
    "Place",
    "estimate",
    "every_choice",
]

DTypeName = Literal["fp32", "bf16", "fp16"]
Place = Literal["none", "cpu", "nvme"]
Device = Literal["cuda", "cpu"]

MOMENTS = {"adam": 2, "lamb": 2, "lion": 1, "muon": 1, "adagrad": 1, "momentum": 1, "sgd": 0}
"""fp32 optimizer states per parameter, by kind of optimizer; those of Muon's matrices."""

WHOLE = frozenset({"lamb", "muon"})
"""Kinds of optimizers that update whole parameters."""

DEFAULT_BUCKET_NUMEL = 500_000_000
"""Default elements of a bucket; never more than the model has."""

_BYTES: dict[DTypeName, int] = {"fp32": 4, "bf16": 2, "fp16": 2}

_BUCKETS_IN_TRANSIT = 2  # of stage 2
_BLOCKS_REDUCED_ON_CPU = 3  # of stage 3: blocks that ranks of one host reduce at the same time
_BUCKETS_PAGED = 4  # of offloaded states: read, updated, written, and one spare

_CHOICES: tuple[tuple[int, Place, Place], ...] = (
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
)
"""The ranking: stage, ``offload_optimizer``, ``offload_param``; least communication first."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank, by kind and by location.

    Attributes:
        stage: ZeRO stage.
        world_size: Data-parallel ranks.
        offload_optimizer: Location of master weights and moments.
        offload_param: Location of the sharded parameters.
        parameters: Weights that forward and backward use, bytes.
        gradients: Gradients in the type of backward, bytes.
        accumulation: Additional bytes of gradients that are summed in fp32.
        master: fp32 copy that the optimizer updates, bytes.
        moments: Other optimizer states, bytes.
        working: Buckets and gathered blocks on the device, beyond the model states, bytes.
        host_working: Buffers in the host's memory, beyond the model states, bytes.
        device: Model states on the device, bytes.
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
        """Offloaded states and their location, as text."""
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
    kept_gathered: int = 0,
    replicated: int = 0,
    device: Device = "cuda",
) -> MemoryEstimate:
    """Estimate the bytes that one rank holds between two steps.

    Args:
        num_params: P, trainable parameters of the whole model, elements.
        largest_layer_params: Largest block that stage 3 gathers at once, elements.
        world_size: N, data-parallel ranks.
        stage: ZeRO stage, 0 to 3.
        offload_optimizer: Stages 1 to 3: ``cpu`` or ``nvme`` for master weights and moments.
        offload_param: Stage 3: ``cpu`` for the sharded parameters with their gradients and
            optimizer states; ``nvme`` for shards and gradients in files.
        precision: Type of forward and backward.
        optimizer: A key of :data:`MOMENTS`.
        grad_accum_dtype: Type in which gradients are summed over micro-batches; None: the type of
            backward. Stage 3 always uses fp32.
        communication_data_type: Type of gradients in collectives; None: as they are stored, at
            stage 2 the type of backward.
        bucket_numel: Largest bucket of gradients or weights, elements.
        kept_gathered: Elements that stage 3 keeps gathered from forward to backward, by
            ``stage3_max_live_parameters``.
        replicated: Trainable elements that stage 3 keeps whole on every rank, by
            ``stage3_param_persistence_threshold``.
        device: Device that trains. On ``cpu`` device and host are one memory, and
            ``offload_optimizer: cpu`` moves nothing.

    Returns:
        Bytes for one rank, fractions rounded up: ``device``, ``host`` and ``disk`` are the model
        states by location; ``peak_device`` and ``peak_host`` include buffers.

    Raises:
        ConfigError: If the stage does not exist or does not support the offload; all problems.

    Example:
        2 bytes of weights and 14 / 4 bytes of gradients and optimizer states per parameter:

        >>> from zerotrial.engine.memory import estimate
        >>> estimate(1_000_000, world_size=4, stage=2).device
        5500000
    """
    _check(num_params, world_size, stage, offload_optimizer, offload_param, optimizer)
    job = _Job(
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
        kept_gathered,
        replicated if stage == 3 else 0,
        device,
    )
    states = job.states()
    total, moments = sum(states), states.moments
    # Weights that are their own master are not moved.
    in_place = job.fp32_weights and not job.copies_master
    offloaded = moments if in_place else states.master + moments
    disk = offloaded if offload_optimizer == "nvme" else 0
    host = offloaded if offload_optimizer == "cpu" else 0
    if offload_param != "none":
        disk += total - moments if offload_param == "nvme" else 0
        host = total - disk
    replicated_bytes = _BYTES[precision] * job.replicated
    states = states._replace(parameters=states.parameters + replicated_bytes)
    return MemoryEstimate(
        stage=stage,
        world_size=world_size,
        offload_optimizer=offload_optimizer,
        offload_param=offload_param,
        working=job.working(),
        host_working=job.host_working(offloaded),
        device=total - host - disk + replicated_bytes,
        host=host,
        disk=disk,
        **states._asdict(),
    )


def every_choice(
    num_params: int,
    largest_layer_params: int,
    world_size: int,
    precision: DTypeName = "bf16",
    *,
    bucket_numel: int | Callable[[int, Place], int] = DEFAULT_BUCKET_NUMEL,
    optimizer: str = "adam",
    **options: Any,
) -> Iterator[MemoryEstimate]:
    """Estimate every stage and offload, least communication first.

    Args:
        num_params: P, elements.
        largest_layer_params: Largest gathered block, elements.
        world_size: N, data-parallel ranks.
        precision: Type of forward and backward.
        bucket_numel: Elements of the largest bucket, or a function of stage and
            ``offload_optimizer`` that returns them.
        optimizer: A key of :data:`MOMENTS`.
        **options: Further arguments of :func:`estimate`.

    Yields:
        One estimate per choice.
    """
    for stage, states, shards in _CHOICES:
        if shards == "nvme" and optimizer in WHOLE:
            continue
        yield estimate(
            num_params,
            largest_layer_params,
            world_size,
            stage,
            states,
            shards,
            precision,
            optimizer=optimizer,
            bucket_numel=bucket_numel(stage, states) if callable(bucket_numel) else bucket_numel,
            **options,
        )


class _States(NamedTuple):
    parameters: int
    gradients: int
    accumulation: int
    master: int
    moments: int


@dataclass(frozen=True)
class _Job:
    """Arguments of :func:`estimate`, and the quantities that several formulas share."""

    num_params: int
    largest: int
    world_size: int
    stage: int
    offload_optimizer: Place
    offload_param: Place
    precision: DTypeName
    optimizer: str
    accumulate: DTypeName
    communicate: DTypeName | None
    bucket: int
    gathered: int
    replicated: int
    device: Device

    @property
    def shard(self) -> int:
        return -(-self.num_params // self.world_size)

    @property
    def fp32_weights(self) -> bool:
        return self.stage == 3 or self.precision == "fp32"

    @property
    def updates_remotely(self) -> bool:
        """Whether the optimizer runs on the host while the weights are on a GPU."""
        offloaded = self.offload_optimizer != "none" and self.offload_param == "none"
        return offloaded and self.device != "cpu"

    @property
    def copies_master(self) -> bool:
        """Whether fp32 weights have a second copy, which the optimizer updates."""
        copied = self.stage == 3 and self.optimizer in WHOLE
        return copied or (self.fp32_weights and self.updates_remotely)

    def states(self) -> _States:
        """Bytes of the model states, as in the table of the module."""
        width, sums = _BYTES[self.precision], _BYTES[self.accumulate]
        shard = 4 * self.shard
        master = shard if self.stage else 4 * self.num_params
        moments = MOMENTS[self.optimizer] * master
        if self.stage == 3:
            parameters = shard if self.copies_master else 0
            return _States(parameters, shard, 0, shard, moments)
        summed = self.num_params if self.stage < 2 else self.shard
        if self.fp32_weights:
            master = shard if self.copies_master else 0
        gradients, more = min(width, sums) * summed, max(sums - width, 0) * summed
        return _States(width * self.num_params, gradients, more, master, moments)

    def working(self) -> int:
        """Bytes of buckets and gathered blocks on the device."""
        width = _BYTES[self.precision]
        if self.stage == 3:
            # Two gathered blocks and the gradients of one, and the blocks that stay gathered.
            blocks = width * (3 * self.largest + self.gathered)
            # Small parameters: gradients, and the buffer in which they are sent in fp32.
            blocks += (width + 4) * self.replicated
            if self.device != "cpu" or self.world_size == 1:
                return blocks + 4 * self.largest  # the gradients of a block in fp32
            sent = _BYTES[self.communicate or self.accumulate]
            # Ranks of one host publish their shards to each other in shared memory.
            sharded = self.shard - self.replicated // self.world_size
            published = 0 if self.offload_param == "nvme" else width * sharded
            return blocks + _BLOCKS_REDUCED_ON_CPU * sent * self.largest + published
        widened = 0 if self.updates_remotely else self._widened()
        if self.stage == 2 and self.world_size > 1:
            count = min(_BUCKETS_IN_TRANSIT, -(-self.num_params // max(self.bucket, 1)))
            return count * _BYTES[self.communicate or self.precision] * self.bucket + widened
        # Stages 0 and 1 reduce gradients in place, unless they travel in another type.
        if self.communicate in {None, self.accumulate}:
            return widened
        return _BYTES[self.communicate] * self.num_params + widened

    def host_working(self, offloaded: int) -> int:
        """Return the bytes of host buffers for a number of offloaded bytes."""
        if self.offload_optimizer == "nvme":
            largest = self.largest if self.stage == 3 else self.bucket
            return int(min(1.0, _BUCKETS_PAGED * largest / max(self.num_params, 1)) * offloaded)
        if not self.updates_remotely:
            return 0
        # A copy of each gradient, and the updated weights in the type of the device.
        if self.stage == 3:
            return (4 + 4) * self.shard
        return (_BYTES[self.accumulate] + _BYTES[self.precision]) * self.shard + self._widened()

    def _widened(self) -> int:
        """Bytes of 16-bit gradients that the update converts to fp32, one bucket at a time."""
        if _BYTES[self.accumulate] == 4:
            return 0
        numel = self.num_params if self.optimizer in WHOLE else self.bucket
        return 4 * (-(-numel // self.world_size) if self.stage else numel)


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
        names = ", ".join(MOMENTS)
        problems.append(f"optimizer: must be one of {names}, got {optimizer!r}")
    if problems:
        raise ConfigError("memory estimate", problems)
