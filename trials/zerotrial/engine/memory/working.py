"""The working set: what a rank holds beyond the model states, while a step runs."""

from __future__ import annotations

from zerotrial.engine.memory.asked import BYTES, WHOLE, Asked

__all__ = ["host_working", "working"]

_TRANSPORTS = 2  # buckets of stage 2 under way
_REDUCED_ON_CPU = 3  # blocks of stage 3 that ranks of one host reduce at once
_PAGED = 4  # buckets of states in memory that are read, updated and written, and one to use again


def working(asked: Asked) -> int:
    """Bytes on the device.

    Stages 0 and 1 reduce gradients where they lie, unless they travel in another type. Stage 2 has
    two buckets under way, or the only one; at stages 0 to 2 the optimizer widens gradients of 16
    bits, one bucket at a time. Stage 3 has two gathered blocks and the gradients of one, as
    computed and as summed, and the blocks that the file keeps whole. Ranks of one host on CPU
    reduce more than one block at a time, and keep their shards once more, in the type that forward
    computes in, where the others read them.
    """
    width = BYTES[asked.precision]
    if asked.stage == 3:
        blocks = width * (3 * asked.largest + asked.kept_whole)
        if asked.device == "cpu" and asked.world_size > 1:
            reduced = _REDUCED_ON_CPU * BYTES[asked.sent or asked.kept] * asked.largest
            published = 0 if asked.offload_param == "nvme" else width * asked.shard
            return blocks + reduced + published
        return blocks + 4 * asked.largest
    widened = 0 if asked.crosses else _widened(asked)
    if asked.stage == 2 and asked.world_size > 1:
        count = min(_TRANSPORTS, -(-asked.num_params // max(asked.bucket_numel, 1)))
        sent = BYTES[asked.sent or asked.precision]
        return count * sent * asked.bucket_numel + widened
    apart = 0 if asked.sent in {None, asked.kept} else BYTES[asked.sent] * asked.num_params
    return apart + widened


def _widened(asked: Asked) -> int:
    """Bytes of gradients in the type of the masters, below stage 3; none where they have it."""
    if BYTES[asked.kept] == 4:
        return 0
    return 4 * (asked.owned if asked.optimizer in WHOLE else asked.owned_bucket)


def host_working(asked: Asked, away: int) -> int:
    """Bytes of the host's memory beyond the model states.

    Files are read and written through a few buckets. States in the host's memory get a copy of each
    gradient, and give back weights of the device's type.

    Args:
        asked: What is asked.
        away: Bytes of the offloaded states.
    """
    if asked.offload_optimizer == "nvme":
        largest = asked.largest if asked.stage == 3 else asked.bucket_numel
        share = min(1.0, _PAGED * largest / max(asked.num_params, 1))
        return int(share * away)
    if asked.offload_optimizer == "none" or not asked.crosses:
        return 0
    if asked.stage == 3:
        return (4 + 4) * asked.shard
    return (BYTES[asked.kept] + BYTES[asked.precision]) * asked.shard + _widened(asked)
