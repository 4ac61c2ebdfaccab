"""Samplers that repeat, shard, skip and shuffle."""

import pytest

from zerotrial import samplers


def test_samplers() -> None:
    shuffled = samplers.ReproducibleShuffleSampler(range(6), seed=1)
    first, second = list(shuffled), list(shuffled)
    assert sorted(first) == sorted(second) == list(range(6))
    assert first != second
    repeated = samplers.RepeatSampler(samplers.ReproducibleShuffleSampler(range(6), seed=1))
    endless = iter(repeated)
    assert [next(endless) for _ in range(12)] == first + second
    assert len(repeated) == 6
    shards = [samplers.DistributedSampler(range(7), 3, rank) for rank in range(3)]
    assert [list(shard) for shard in shards] == [[0, 3, 6], [1, 4], [2, 5]]
    assert [len(shard) for shard in shards] == [3, 2, 2]
    skipping = samplers.SkipBatchSampler([[0], [1], [2]], 2)
    assert (list(skipping), list(skipping)) == ([[2]], [[0], [1], [2]])
    with pytest.raises(ValueError, match="rank: must be"):
        samplers.DistributedBatchSampler([[0]], 2, 2)
    with pytest.raises(ValueError, match="skip: must be >= 0"):
        samplers.SkipSampler([0], -1)
