"""What waits between two accumulation boundaries at stages 0 to 2, for checkpoints.

N ranks, S elements in a rank's shard of a bucket.
"""

from collections.abc import Iterator, Sequence

from zerotrial.engine.flat.gradients import Gradients
from zerotrial.engine.flat.layout import Bucket, Place
from zerotrial.engine.protocols import GradientSource, Piece

__all__ = ["gathered_pieces", "places_within", "resume_gathered"]


def places_within(bucket: Bucket, span: slice) -> Iterator[tuple[Place, int, int]]:
    """Yield parameters that have elements in ``span``, and from where to where in the bucket."""
    for place in bucket.places:
        start, stop = max(place.start, span.start), min(place.stop, span.stop)
        if start < stop:
            yield place, start, stop


def gathered_pieces(
    gradients: Gradients,
    buckets: Sequence[Bucket],
    owned: Sequence[slice],
    rank: int,
    *,
    write: bool = False,
) -> Iterator[Piece]:
    """See :meth:`zerotrial.engine.protocols.Stage.gradient_pieces`.

    Args:
        gradients: Settled.
        buckets: Of the stage.
        owned: For each bucket, the elements of which this rank has the average: S or, where every
            rank has all, N * S, of which it yields its shard.
        rank: This one's.
        write: Whether all that this rank has is wanted.
    """
    for bucket, held in zip(buckets, owned, strict=True):
        average = gradients.averaged(bucket.index)
        if average is not None:
            walked = held if write else bucket.shard(rank)
            for place, start, stop in places_within(bucket, walked):
                values = average[start - held.start : stop - held.start]
                span = (start - place.start, stop - place.start)
                yield Piece(place.name, place.parameter.shape, *span, {"gradient": values})
        for index, share in gradients.shares(bucket.index).items():
            place = bucket.places[index]
            yield Piece(place.name, place.parameter.shape, 0, place.numel, {"share": share})


def resume_gathered(
    gradients: Gradients,
    buckets: Sequence[Bucket],
    owned: Sequence[slice],
    source: GradientSource,
) -> None:
    """See :meth:`zerotrial.engine.protocols.Stage.resume_gradients`.

    Args:
        gradients: Of which none is held.
        buckets: Of the stage.
        owned: See :func:`gathered_pieces`.
        source: What to go on with.
    """
    for bucket, held in zip(buckets, owned, strict=True):
        room = gradients.average_room(bucket.index) if source.has_averages else None
        if bucket.tie is not None and bucket.tie.owners.rank > 0:
            continue  # the first owner has all of it; they are added up
        if room is not None:
            for place, start, stop in places_within(bucket, held):
                part = room[start - held.start : stop - held.start]
                source.read_average(place.name, start - place.start, part)
        if source.has_shares:
            for index, place in enumerate(bucket.places):
                if source.read_share(place.name, gradients.share_room(bucket.index, index)):
                    gradients.keep_share(bucket.index, index)
