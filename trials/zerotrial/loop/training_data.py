"""What a trial trains on: its feed, and how long an epoch of it is."""

from zerotrial.context import ZeroTrialContext
from zerotrial.data.batch_iterators import EmptyFeed, Feed, make_feed
from zerotrial.loop.settings import FitSettings
from zerotrial.trial import ZeroTrial

__all__ = ["agree_on_epoch_length", "make_training_feed"]


def make_training_feed(trial: ZeroTrial, context: ZeroTrialContext) -> Feed:
    """Build the trial's loader on a rank that reads batches, and feed from it.

    Raises:
        TrialError: If the loader cannot be used.
    """
    if not context.mpu.should_build_data_loader:
        return EmptyFeed()
    loader = trial.build_training_data_loader()
    if loader is None:
        return EmptyFeed()
    return make_feed(
        loader,
        seed=context.get_trial_seed(),
        rank=context.mpu.data_parallel_rank,
        replicas=context.mpu.data_parallel_world_size,
        accumulation=context.get_num_micro_batches_per_slot(),
        checked=context.dataset_checks,
        micro_batch=context.get_train_micro_batch_size_per_gpu(),
    )


def agree_on_epoch_length(
    feed: Feed, settings: FitSettings, context: ZeroTrialContext
) -> int | None:
    """Find the batches of an epoch; None where nobody knows. **Collective**."""
    lengths: list[int | None] = context.distributed.allgather(
        feed.batches_per_epoch, "agreeing on the length of an epoch"
    )
    known = [length for length in lengths if length is not None]
    if known:
        return min(known)
    records = settings.records_per_epoch
    return max(1, records // context.get_global_batch_size()) if records else None
