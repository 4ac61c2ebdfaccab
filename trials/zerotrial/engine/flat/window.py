"""What waits between two accumulation boundaries at stages 0 to 2, for checkpoints.

N ranks, S elements in a rank's shard of a bucket.
"""

from collections.abc import Iterator, Sequence

from zerotrial.engine.flat.gradients import Gradients
from zerotrial.engine.flat.layout import Bucket, Slot
from zerotrial.engine.seams import GradientSource, Piece

__all__ = ["gathered_pieces", "resume_gathered", "slots_within"]


def slots_within(bucket: Bucket, span: slice) -> Iterator[tuple[Slot, int, int]]:
    """Yield parameters that have elements in ``span``, and from where to where in the bucket."""
    for slot in bucket.slots:
        start, stop = max(slot.start, span.start), min(slot.stop, span.stop)
        if start < stop:
            yield slot, start, stop


def gathered_pieces(
    gradients: Gradients, buckets: Sequence[Bucket], owned: Sequence[slice], rank: int
) -> Iterator[Piece]:
    """See :meth:`zerotrial.engine.seams.Stage.gradient_pieces`.

    Args:
        gradients: Settled.
        buckets: Of the stage.
        owned: For each bucket, the elements of which this rank has the average: S or, where every
            rank has all, N * S, of which it yields its shard.
        rank: This one's.
    """
    for bucket, held in zip(buckets, owned, strict=True):
        average = gradients.averaged(bucket.index)
        if average is not None:
            for slot, start, stop in slots_within(bucket, bucket.shard(rank)):
                values = average[start - held.start : stop - held.start]
                place = (start - slot.start, stop - slot.start)
                yield Piece(slot.name, slot.parameter.shape, *place, {"gradient": values})
        for index, share in gradients.shares(bucket.index).items():
            slot = bucket.slots[index]
            yield Piece(slot.name, slot.parameter.shape, 0, slot.numel, {"share": share})


def resume_gathered(
    gradients: Gradients,
    buckets: Sequence[Bucket],
    owned: Sequence[slice],
    source: GradientSource,
) -> None:
    """See :meth:`zerotrial.engine.seams.Stage.resume_gradients`.

    Args:
        gradients: Of which none is held.
        buckets: Of the stage.
        owned: See :func:`gathered_pieces`.
        source: What to go on with.
    """
    for bucket, held in zip(buckets, owned, strict=True):
        if source.has_averages:
            room = gradients.average_room(bucket.index)
            for slot, start, stop in slots_within(bucket, held):
                part = room[start - held.start : stop - held.start]
                source.read_average(slot.name, start - slot.start, part)
        if source.has_shares:
            for index, slot in enumerate(bucket.slots):
                if source.read_share(slot.name, gradients.share_room(bucket.index, index)):
                    gradients.keep_share(bucket.index, index)
