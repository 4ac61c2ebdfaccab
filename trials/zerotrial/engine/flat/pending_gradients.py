"""Accumulated gradients between two boundaries at stages 0 to 2, for checkpoints.

N ranks, S elements in a rank's shard of a bucket.
"""

from collections.abc import Iterator, Sequence

from zerotrial.engine.flat.gradients import Gradients
from zerotrial.engine.flat.layout import Bucket, ParameterSlot
from zerotrial.engine.protocols import GradientSource, Piece

__all__ = ["accumulated_pieces", "resume_accumulated", "slots_within"]


def slots_within(bucket: Bucket, span: slice) -> Iterator[tuple[ParameterSlot, int, int]]:
    """Yield the slots that overlap ``span``, with the overlap's start and stop in the bucket."""
    for slot in bucket.slots:
        start, stop = max(slot.start, span.start), min(slot.stop, span.stop)
        if start < stop:
            yield slot, start, stop


def accumulated_pieces(
    gradients: Gradients,
    buckets: Sequence[Bucket],
    owned: Sequence[slice],
    rank: int,
    *,
    write: bool = False,
) -> Iterator[Piece]:
    """Yield the pieces of :meth:`zerotrial.engine.protocols.Stage.gradient_pieces`.

    Args:
        gradients: Settled gradients.
        buckets: Buckets of the stage.
        owned: For each bucket, the elements whose average this rank has: S, or N * S, of which
            it yields its shard.
        rank: Rank of this process.
        write: Whether to yield everything that this rank has.
    """
    for bucket, owned_span in zip(buckets, owned, strict=True):
        average = gradients.averaged(bucket.index)
        if average is not None:
            yielded = owned_span if write else bucket.shard(rank)
            for slot, start, stop in slots_within(bucket, yielded):
                values = average[start - owned_span.start : stop - owned_span.start]
                span = (start - slot.start, stop - slot.start)
                yield Piece(slot.name, slot.parameter.shape, *span, {"gradient": values})
        for index, share in gradients.unreduced(bucket.index).items():
            slot = bucket.slots[index]
            yield Piece(slot.name, slot.parameter.shape, 0, slot.numel, {"share": share})


def resume_accumulated(
    gradients: Gradients,
    buckets: Sequence[Bucket],
    owned: Sequence[slice],
    source: GradientSource,
) -> None:
    """Restore gradients, see :meth:`zerotrial.engine.protocols.Stage.resume_gradients`.

    Args:
        gradients: Gradients without content.
        buckets: Buckets of the stage.
        owned: See :func:`accumulated_pieces`.
        source: Gradients of the checkpoint.
    """
    for bucket, owned_span in zip(buckets, owned, strict=True):
        buffer = gradients.average_buffer(bucket.index) if source.has_averages else None
        if bucket.tie is not None and bucket.tie.owners.rank > 0:
            continue  # only the first owner restores it, since the owners' gradients are added
        if buffer is not None:
            for slot, start, stop in slots_within(bucket, owned_span):
                target = buffer[start - owned_span.start : stop - owned_span.start]
                source.read_average(slot.name, start - slot.start, target)
        if source.has_shares:
            for index, slot in enumerate(bucket.slots):
                if source.read_share(slot.name, gradients.unreduced_buffer(bucket.index, index)):
                    gradients.mark_unreduced(bucket.index, index)
