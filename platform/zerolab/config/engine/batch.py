"""Batch sizes of an optimizer step and the rule between them."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["BatchSizes", "keep_batch", "keep_planned_batch", "planned_size", "resolve_batch_sizes"]


@dataclass(frozen=True)
class BatchSizes:
    """Consistent numbers of samples and micro-batches of an optimizer step.

    Args:
        train: Samples in one optimizer step, over all data-parallel ranks.
        micro: Samples in one micro-batch on one rank.
        accumulation_steps: Micro-batches in one optimizer step.
        dp_world_size: Data-parallel ranks.

    Example:
        >>> zerolab.config.BatchSizes(32, micro=4, accumulation_steps=2, dp_world_size=4).train
        32
    """

    train: int
    """Samples in one optimizer step, over all data-parallel ranks."""
    micro: int
    """Samples in one micro-batch on one rank."""
    accumulation_steps: int
    """Micro-batches in one optimizer step."""
    dp_world_size: int
    """Data-parallel ranks."""


def _nearest(value: int, unit: int) -> str:
    lower = value // unit * unit
    return f"{lower} or {lower + unit}" if lower else f"{unit}"


def resolve_batch_sizes(
    train: int | None, micro: int | None, steps: int | None, dp_world_size: int
) -> BatchSizes | str:
    """Derive the missing sizes, or return the problem in one line.

    Args:
        train: Samples in one optimizer step, or None.
        micro: Samples in one micro-batch on one rank, or None.
        steps: Micro-batches in one optimizer step, or None.
        dp_world_size: Data-parallel ranks.

    Returns:
        The sizes, or the problem as text.
    """
    ranks = dp_world_size
    if train is None:
        if micro is None:
            return "train_batch_size: set it or train_micro_batch_size_per_gpu, both are missing"
        return BatchSizes(micro * (steps or 1) * ranks, micro, steps or 1, ranks)
    if micro is None:
        steps = steps or 1
        unit, what = steps * ranks, f"accumulation steps x data-parallel ranks = {steps} x {ranks}"
    else:
        unit, what = micro * ranks, f"micro-batch x data-parallel ranks = {micro} x {ranks}"
        if steps is not None and train != unit * steps:
            return (
                "train_batch_size: must be micro-batch x accumulation steps x data-parallel ranks "
                f"= {micro} x {steps} x {ranks} = {unit * steps}, got {train}; "
                "leave one of the three out and it is derived"
            )
    if train % unit:
        return (
            f"train_batch_size: must be a multiple of {what} = {unit}, got {train}; "
            f"the nearest is {_nearest(train, unit)}"
        )
    other = train // unit
    return BatchSizes(train, micro or other, other if micro else steps or 1, ranks)


def keep_batch(planned: BatchSizes, dp_world_size: int) -> BatchSizes | str:
    """Divide the same batch among another number of ranks.

    Args:
        planned: The sizes for the ranks that the trial was configured for.
        dp_world_size: Available data-parallel ranks.

    Returns:
        The sizes, or the problem as text, with the numbers of ranks that are possible.
    """
    steps, remainder = divmod(planned.train, planned.micro * dp_world_size)
    if remainder == 0:
        return BatchSizes(planned.train, planned.micro, steps, dp_world_size)
    micro_batches = planned.train // planned.micro
    possible = [
        str(ranks) for ranks in range(1, planned.dp_world_size + 1) if micro_batches % ranks == 0
    ]
    return (
        f"train_batch_size: {planned.train} samples in micro-batches of {planned.micro} cannot be "
        f"shared by {dp_world_size} data-parallel ranks; {', '.join(possible)} of them can"
    )


_process_entries: list[tuple[int, int]] = []


@contextlib.contextmanager
def keep_planned_batch(planned: int, ranks: int) -> Iterator[None]:
    """Make engines of this process keep the batch of another number of ranks.

    Args:
        planned: Ranks that the trial was configured for.
        ranks: Ranks that it has.
    """
    entry = (planned, ranks)
    _process_entries.append(entry)
    try:
        yield
    finally:
        _process_entries[:] = [item for item in _process_entries if item is not entry]


def planned_size(dp_world_size: int) -> int:
    """Return the data-parallel size whose batch is kept; by default the size itself."""
    planned, ranks = _process_entries[-1] if _process_entries else (1, 1)
    return dp_world_size * planned // ranks
