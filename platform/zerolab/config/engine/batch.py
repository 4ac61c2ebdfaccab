"""The three batch sizes and the one rule that binds them."""

from dataclasses import dataclass

__all__ = ["BatchSizes", "resolve_batch_sizes"]


@dataclass(frozen=True)
class BatchSizes:
    """Samples and micro-batches of one optimizer step, consistent with each other."""

    train: int
    """Samples in one optimizer step, over all data-parallel ranks."""
    micro: int
    """Samples in one micro-batch on one rank."""
    accumulation_steps: int
    """Micro-batches in one optimizer step."""
    dp_world_size: int
    """Data-parallel ranks."""


def _nearest(value: int, unit: int) -> str:
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else f"{unit}"


def resolve_batch_sizes(
    train: int | None, micro: int | None, steps: int | None, dp_world_size: int
) -> BatchSizes | str:
    """Derive the sizes that are not given, or say in one line why that is impossible.

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
