"""How many bytes a rank needs, before it is started.

P parameters in 16 bits with Adam on N ranks, bytes for each parameter and rank:

======  ==============  =============  ==============  =========  ==========  ==============
stage   parameters      gradients      master          moments    together    accumulation
======  ==============  =============  ==============  =========  ==========  ==============
0       2               2              4               8          16          2
1       2               2              4/N             8/N        4 + 12/N    2
2       2               2/N            4/N             8/N        2 + 14/N    2/N
3       (the master)    4/N            4/N             8/N        16/N        none
======  ==============  =============  ==============  =========  ==========  ==============

Stage 3 keeps no 16-bit shard: it casts its fp32 shard while it gathers, and its gradients are
fp32, so that the sum is the same. *Accumulation* comes on top where 16-bit gradients are summed in
fp32. A gradient of 16 bits lives only until it is added, so that this costs 2 bytes and not 4.

In fp32 the parameters are their own master, and so are the shards of stage 3. Offloading does not
move them: on a GPU the optimizer works on a copy of them elsewhere; on a CPU it works on them where
they are, and only the moments go to files. Optimizers that look at whole parameters (LAMB, Muon)
have a copy at stage 3 in any case, see :mod:`zerotrial.engine.stage3.update`.

Beside these model states a rank needs room that the formula does not name, the *working set*:
buckets under way, at stage 3 the blocks that are gathered at the moment, and in the host's memory
what is under way between the device, host and files. Activations are not counted: they depend on
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
Device = Literal["cuda", "cpu"]

MOMENTS = {"adam": 2, "lamb": 2, "lion": 1, "muon": 1, "adagrad": 1, "momentum": 1, "sgd": 0}
"""Optimizer states for each parameter, each in fp32, by kind of optimizer; Muon's of a matrix."""

WHOLE = frozenset({"lamb", "muon"})
"""Kinds of optimizers that update whole parameters."""

DEFAULT_BUCKET_NUMEL = 500_000_000
"""Elements in a bucket when the config does not say; never more than the model."""

_BYTES: dict[Precision, int] = {"fp32": 4, "bf16": 2, "fp16": 2}
_TRANSPORTS = 2  # buckets of stage 2 under way
_REDUCED_ON_CPU = 3  # blocks of stage 3 that ranks of one host reduce at once
_PAGED = 4  # buckets of states in memory that are read, updated and written, and one to use again


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
    precision: Precision = "bf16",
    *,
    optimizer: str = "adam",
    grad_accum_dtype: Precision | None = None,
    communication_data_type: Precision | None = None,
    bucket_numel: int = DEFAULT_BUCKET_NUMEL,
    device: Device = "cuda",
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
        grad_accum_dtype: In which gradients are summed over micro-batches; None: as backward makes
            them. Stage 3 always keeps them in fp32.
        communication_data_type: In which gradients travel; None: as they are kept, at stage 2 as
            backward makes them.
        bucket_numel: Elements in one bucket of gradients or weights under way.
        device: What trains. On ``cpu`` device and host are one memory, and ``offload_optimizer:
            cpu`` moves nothing.

    Returns:
        Bytes for one rank; fractions are rounded up.

    Raises:
        ConfigError: If the stage does not exist, or does not offload what is asked.
    """
    _check(num_params, world_size, stage, offload_optimizer, offload_param, optimizer)
    asked = _Asked(
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
        device,
    )
    width, kept = _BYTES[precision], _BYTES[asked.kept]
    owned = asked.shard if stage else num_params
    summed = num_params if stage < 2 else asked.shard
    parameters = width * num_params if stage < 3 else 0
    gradients = min(width, kept) * summed if stage < 3 else 4 * summed
    accumulation = max(kept - width, 0) * summed if stage < 3 else 0
    master = 0 if precision == "fp32" and stage < 3 else 4 * owned
    moments = 4 * MOMENTS[optimizer] * owned
    if asked.copied:
        master = 4 * asked.shard
        parameters = parameters or 4 * asked.shard

    states = parameters + gradients + accumulation + master + moments
    away = moments if asked.in_place else master + moments
    disk = away if offload_optimizer == "nvme" else 0
    host = away if offload_optimizer == "cpu" else 0
    if offload_param == "cpu":
        host = states - disk
    return MemoryEstimate(
        stage=stage,
        world_size=world_size,
        offload_optimizer=offload_optimizer,
        offload_param=offload_param,
        parameters=parameters,
        gradients=gradients,
        accumulation=accumulation,
        master=master,
        moments=moments,
        working=_working(asked),
        host_working=_host_working(asked, away),
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
    grad_accum_dtype: Precision | None = None,
    communication_data_type: Precision | None = None,
    bucket_numel: int = DEFAULT_BUCKET_NUMEL,
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
        bucket_numel: Elements in one bucket.
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
            grad_accum_dtype=grad_accum_dtype,
            communication_data_type=communication_data_type,
            bucket_numel=bucket_numel,
            device=device,
        )


@dataclass(frozen=True)
class _Asked:
    """The arguments of :func:`estimate`, and what follows from them."""

    num_params: int
    largest: int
    world_size: int
    stage: int
    offload_optimizer: Place
    offload_param: Place
    precision: Precision
    optimizer: str
    kept: Precision
    """Type of the gradients that are kept, below stage 3."""
    sent: Precision | None
    bucket_numel: int
    device: Device

    @property
    def shard(self) -> int:
        """Elements of a rank's part."""
        return -(-self.num_params // self.world_size)

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


def _working(asked: _Asked) -> int:
    """Bytes beyond the model states.

    Stages 0 and 1 reduce gradients where they lie, unless they travel in another type. Stage 2 has
    two buckets under way, stage 3 two gathered blocks and the gradients of one, as computed and as
    summed. Ranks of one host on CPU reduce more than one block at a time, and keep their shards
    once more, in the type that forward computes in, where the others read them.
    """
    width = _BYTES[asked.precision]
    if asked.stage == 3:
        blocks = 3 * width * asked.largest
        if asked.device == "cpu" and asked.world_size > 1:
            reduced = _REDUCED_ON_CPU * _BYTES[asked.sent or asked.kept] * asked.largest
            return blocks + reduced + width * asked.shard
        return blocks + 4 * asked.largest
    if asked.stage == 2:
        return _TRANSPORTS * _BYTES[asked.sent or asked.precision] * asked.bucket_numel
    return 0 if asked.sent in {None, asked.kept} else _BYTES[asked.sent] * asked.num_params


def _host_working(asked: _Asked, away: int) -> int:
    """Bytes of the host's memory beyond the model states.

    Files are read and written through a few buckets. States in the host's memory get a copy of each
    gradient, and give back weights of the device's type.
    """
    if asked.offload_optimizer == "nvme":
        largest = asked.largest if asked.stage == 3 else asked.bucket_numel
        share = min(1.0, _PAGED * largest / max(asked.num_params, 1))
        return int(share * away)
    if asked.offload_optimizer == "none" or not asked.crosses:
        return 0
    if asked.stage == 3:
        return (4 + 4) * asked.shard
    return (_BYTES[asked.kept] + _BYTES[asked.precision]) * asked.shard


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
