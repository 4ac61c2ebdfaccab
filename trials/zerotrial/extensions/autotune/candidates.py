"""Candidates of a search: engine settings that share a global batch, and their space."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from zerolab.formatting import size_text

__all__ = ["Candidate", "Layout", "LayoutEstimate", "Profile", "Space", "ladder", "make_space"]

_LEAST_BUCKET = 100_000
"""Elements; smaller buckets cost more calls than they overlap."""

_MEASURED_SHARE = 0.95
"""Share of a rank's memory that a measured run may use."""


class Layout(msgspec.Struct, frozen=True, order=True):
    """ZeRO stage and locations of offloaded states."""

    stage: int
    offload_optimizer: str = "none"
    offload_param: str = "none"

    def __str__(self) -> str:
        parts = [f"stage {self.stage}"]
        if self.offload_optimizer != "none":
            parts.append(f"optimizer on {self.offload_optimizer}")
        if self.offload_param != "none":
            parts.append(f"parameters on {self.offload_param}")
        return ", ".join(parts)


class Candidate(msgspec.Struct, frozen=True):
    """Settings that are measured together."""

    micro_batch: int
    accumulation_steps: int
    layout: Layout
    checkpointing: bool = False
    bucket: int | None = None
    """Elements of a bucket: of gradients and weights, at stage 3 of prefetched parameters; None
    keeps the file's."""

    def __str__(self) -> str:
        parts = [f"micro-batch {self.micro_batch} x {self.accumulation_steps}", str(self.layout)]
        if self.checkpointing:
            parts.append("activation checkpointing")
        if self.bucket is not None:
            parts.append(f"buckets of {self.bucket:,}")
        return ", ".join(parts)

    def overrides(self, data_ranks: int) -> dict[str, Any]:
        """Return the keys of the engine file that this candidate sets.

        Args:
            data_ranks: Data-parallel ranks.
        """
        layout = self.layout
        zero: dict[str, Any] = {
            "stage": layout.stage,
            "offload_optimizer": {"device": layout.offload_optimizer},
            "offload_param": {"device": layout.offload_param},
        }
        if self.bucket is not None and layout.stage == 3:
            zero["stage3_prefetch_bucket_size"] = self.bucket
        elif self.bucket is not None:
            zero |= {"reduce_bucket_size": self.bucket, "allgather_bucket_size": self.bucket}
        return {
            "train_batch_size": self.micro_batch * self.accumulation_steps * data_ranks,
            "train_micro_batch_size_per_gpu": self.micro_batch,
            "gradient_accumulation_steps": self.accumulation_steps,
            "zero_optimization": zero,
            "activation_checkpointing": {"enabled": self.checkpointing},
        }


class LayoutEstimate(msgspec.Struct, frozen=True):
    """The planner's estimate for one rank, without activations."""

    layout: Layout
    device_bytes: int
    host_bytes: int = 0


class Profile(msgspec.Struct, frozen=True):
    """Sizes of a model and its machine, from a run that stops before it trains."""

    parameters: int
    largest_block: int
    data_ranks: int
    train_batch: int
    """Samples of an optimizer step, which all candidates keep."""
    device: Literal["cpu", "cuda"]
    device_bytes: int
    """Memory that a rank may use; on a CPU for everything."""
    host_bytes: int
    checkpointing: bool
    """Whether the file turns activation checkpointing on."""
    layouts: tuple[LayoutEstimate, ...]
    """Least communication first."""

    @property
    def run_bytes(self) -> int:
        """Memory of a rank in a measured run: training for longer needs some more."""
        return int(_MEASURED_SHARE * self.device_bytes)

    def problem(self, estimate: LayoutEstimate) -> str | None:
        """Return why a rank has too little memory for a layout; None if it has enough."""
        if estimate.device_bytes > self.device_bytes:
            needs, limit = estimate.device_bytes, self.device_bytes
        elif self.device == "cuda" and estimate.host_bytes > self.host_bytes:
            needs, limit = estimate.host_bytes, self.host_bytes
        else:
            return None
        return f"planner: needs {size_text(needs)} without activations, of {size_text(limit)}"


class Space(msgspec.Struct, frozen=True):
    """Values of each setting."""

    micro_batches: tuple[int, ...]
    """Ascending."""
    samples: int
    """Samples of a data-parallel rank in an optimizer step."""
    layouts: tuple[Layout, ...]
    """Least communication first."""
    checkpointing: tuple[bool, ...] = (False, True)
    buckets: tuple[int, ...] = ()
    """Sizes at stages 0 to 2, in addition to the file's."""
    prefetches: tuple[int, ...] = ()
    """Sizes at stage 3, in addition to the file's."""

    def candidate(
        self,
        micro_batch: int,
        layout: Layout,
        *,
        checkpointing: bool = False,
        bucket: int | None = None,
    ) -> Candidate:
        """Return a candidate with the accumulation steps of its micro-batch."""
        steps = self.samples // micro_batch
        return Candidate(micro_batch, steps, layout, checkpointing, bucket)

    def buckets_of(self, layout: Layout) -> Sequence[int]:
        """Return the sizes of buckets for a layout, in addition to the file's."""
        return self.prefetches if layout.stage == 3 else self.buckets

    def grid(self) -> Iterator[Candidate]:
        """Yield every candidate."""
        for layout in self.layouts:
            for checkpointing in self.checkpointing:
                for bucket in (None, *self.buckets_of(layout)):
                    for micro in self.micro_batches:
                        yield self.candidate(
                            micro, layout, checkpointing=checkpointing, bucket=bucket
                        )


def ladder(samples: int, lowest: int = 1, highest: int | None = None) -> tuple[int, ...]:
    """Return micro-batch sizes that divide the samples of a rank, each about twice the last.

    Args:
        samples: Samples of a data-parallel rank in an optimizer step.
        lowest: Smallest size.
        highest: Largest size; None for all samples.

    Example:
        >>> ladder(24)
        (1, 2, 4, 8, 24)
        >>> ladder(24, highest=12)
        (1, 2, 4, 12)
    """
    top = min(samples, highest or samples)
    sizes = [size for size in range(lowest, top + 1) if samples % size == 0]
    chosen: list[int] = []
    for size in sizes:
        if not chosen or size >= 2 * chosen[-1]:
            chosen.append(size)
    if sizes and chosen[-1] != sizes[-1]:  # the largest size replaces one that is close to it
        chosen[-1:] = [sizes[-1]]
    return tuple(chosen)


def make_space(
    profile: Profile,
    *,
    lowest: int = 1,
    highest: int | None = None,
    only_stage: bool = False,
) -> Space:
    """Return the candidates for a model and its machine.

    Args:
        profile: Sizes of the model.
        lowest: Smallest micro-batch.
        highest: Largest micro-batch.
        only_stage: Keep checkpointing and buckets as they are in the file.
    """
    samples = profile.train_batch // profile.data_ranks
    sizes = ladder(samples, lowest, highest)
    layouts = tuple(estimate.layout for estimate in profile.layouts)
    if only_stage:
        return Space(sizes, samples, layouts, checkpointing=(profile.checkpointing,))
    if profile.data_ranks == 1:  # without collectives buckets have no effect
        return Space(sizes, samples, layouts)
    sizes_of_buckets = {profile.parameters // 16, profile.parameters // 4}
    return Space(
        sizes,
        samples,
        layouts,
        buckets=tuple(sorted(size for size in sizes_of_buckets if size >= _LEAST_BUCKET)),
        prefetches=(0, 2 * profile.largest_block),
    )
