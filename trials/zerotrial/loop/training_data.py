"""Training data of a trial: its batch iterator and the length of an epoch."""

from zerotrial.context import ZeroTrialContext
from zerotrial.data.batch_iterators import BatchIterator, EmptyBatchIterator, make_batch_iterator
from zerotrial.loop.settings import FitSettings
from zerotrial.trial import ZeroTrial

__all__ = ["agree_on_epoch_length", "make_training_iterator"]


def make_training_iterator(trial: ZeroTrial, context: ZeroTrialContext) -> BatchIterator:
    """Build the trial's loader, and an endless iterator over it.

    Ranks that read no data get an iterator that raises.

    Raises:
        TrialError: If the loader is invalid.
    """
    if not context.mpu.should_build_data_loader:
        return EmptyBatchIterator()
    loader = trial.build_training_data_loader()
    if loader is None:
        return EmptyBatchIterator()
    return make_batch_iterator(
        loader,
        seed=context.get_trial_seed(),
        rank=context.mpu.data_parallel_rank,
        replicas=context.mpu.data_parallel_world_size,
        accumulation=context.get_num_micro_batches_per_slot(),
        checked=context.dataset_checks,
        micro_batch=context.get_train_micro_batch_size_per_gpu(),
    )


def agree_on_epoch_length(
    batches: BatchIterator, settings: FitSettings, context: ZeroTrialContext
) -> int | None:
    """Return the batches of an epoch; None if no rank knows. **Collective**."""
    lengths: list[int | None] = context.distributed.allgather(
        batches.batches_per_epoch, "agreeing on the length of an epoch"
    )
    with_length = [length for length in lengths if length is not None]
    if with_length:
        return min(with_length)
    records = settings.records_per_epoch
    return max(1, records // context.get_global_batch_size()) if records else None
