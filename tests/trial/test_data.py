"""Data loading: samples of each batch and rank, across restarts and world sizes."""

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from zerolab.errors import ConfigError, TrialError
from zerotrial import DataLoader, data_length
from zerotrial.data.batch_iterators import make_batch_iterator
from zerotrial.data.loader import EpochPlan


class Numbers(torch.utils.data.Dataset):
    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        return index


class Noise(Numbers):
    """Data set whose samples draw random numbers from every global generator."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, random.random(), np.random.random(), torch.rand(()).item()])


def draw(loader, count, *, rank=0, replicas=1, accumulation=1, state=None, seed=3, checked=True):
    batch_iterator = make_batch_iterator(
        loader, seed=seed, rank=rank, replicas=replicas, accumulation=accumulation, checked=checked
    )
    if state is not None:
        batch_iterator.restore(state)
    return [torch.as_tensor(next(batch_iterator)).tolist() for _ in range(count)], batch_iterator


def batches(n, micro, replicas, accumulation, count, state=None, **options):
    """Return all ranks' samples of each batch, in order, and the state afterwards."""
    per_rank = []
    for rank in range(replicas):
        loader = DataLoader(Numbers(n), batch_size=micro, **options)
        drawn, batch_iterator = draw(
            loader,
            count * accumulation,
            rank=rank,
            replicas=replicas,
            accumulation=accumulation,
            state=state,
        )
        per_rank.append(drawn)
    result = []
    for batch in range(count):
        step = range(batch * accumulation, (batch + 1) * accumulation)
        result.append([x for m in step for rank in range(replicas) for x in per_rank[rank][m]])
    return result, batch_iterator.state()


sizes = st.sampled_from([(1, 1, 4), (1, 4, 1), (2, 1, 2), (2, 2, 1), (4, 1, 1), (1, 2, 2)])


@given(st.integers(1, 60), sizes, sizes, st.integers(0, 20), st.booleans())
def test_batch_samples_are_equal_for_any_rank_count(
    n: int, old_shape: tuple, new_shape: tuple, cut: int, shuffle: bool
) -> None:
    expected, _ = batches(n, 4, 1, 1, cut + 12, shuffle=shuffle)
    first, state = batches(n, *old_shape, cut, shuffle=shuffle)
    second, _ = batches(n, *new_shape, 12, state=state, shuffle=shuffle)
    assert first + second == expected


@given(st.integers(1, 50), st.booleans())
def test_epoch_covers_all_samples_and_fills_last_batch(n: int, shuffle: bool) -> None:
    count = -(-n // 4)
    drawn, _ = batches(n, 2, 2, 1, 2 * count, shuffle=shuffle)
    for epoch in (drawn[:count], drawn[count:]):
        flat = [x for batch in epoch for x in batch]
        assert len(flat) == 4 * count
        assert set(flat[:n]) == set(range(n))
        assert flat[n:] == [flat[i % n] for i in range(n, 4 * count)]


def test_epoch_order_depends_on_seed() -> None:
    loader = DataLoader(Numbers(20), batch_size=20, shuffle=True)
    (first, second), _ = draw(loader, 2)
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second
    torch.manual_seed(99)
    assert draw(loader, 2)[0] == [first, second]
    assert draw(loader, 1, seed=4)[0] != [first]


@pytest.mark.parametrize(
    ("n", "micro", "accumulation", "replicas", "drop_last", "expected"),
    [
        (100, 5, 1, 1, False, 20),
        (103, 4, 1, 1, False, 26),  # the last micro-batch is partial
        (100, 4, 2, 1, False, 13),  # 25 micro-batches do not divide by 2
        (100, 4, 2, 1, True, 12),
        (103, 4, 2, 2, False, 7),
        (103, 4, 2, 2, True, 6),
        (3, 4, 2, 2, False, 1),
    ],
)
def test_epoch_length(n, micro, accumulation, replicas, drop_last, expected) -> None:
    assert EpochPlan(n, micro, accumulation, replicas, drop_last).batches == expected


def test_too_few_samples_raise() -> None:
    with pytest.raises(ConfigError, match=r"at least 16 sample\(s\) .* got 10"):
        EpochPlan(10, 4, 2, 2, drop_last=True)
    with pytest.raises(ConfigError, match=r"at least 1 sample\(s\)"):
        EpochPlan(0, 4, 1, 1)


def test_user_sampler_order_is_shared_by_ranks() -> None:
    weights = torch.utils.data.WeightedRandomSampler([1.0] * 12, num_samples=12)
    loader = DataLoader(Numbers(12), batch_size=6, sampler=weights)
    rank_0, _ = draw(loader, 2, rank=0, replicas=2)
    rank_1, _ = draw(loader, 2, rank=1, replicas=2)
    expected, _ = draw(DataLoader(Numbers(12), batch_size=12, sampler=weights), 2)
    assert [a + b for a, b in zip(rank_0, rank_1, strict=True)] == expected
    assert expected[0] != expected[1]


def test_batch_sampler_batches_go_to_ranks_in_turn() -> None:
    batch_sampler = [[0], [1, 2], [3, 4, 5], [6], [7, 8]]
    loader = DataLoader(Numbers(9), batch_sampler=batch_sampler)
    assert draw(loader, 3, rank=0, replicas=2)[0] == [[0], [3, 4, 5], [7, 8]]
    assert draw(loader, 3, rank=1, replicas=2)[0] == [[1, 2], [6], [0]]


@given(st.integers(1, 30), st.integers(1, 4), st.integers(1, 5), st.booleans())
def test_validation_covers_each_sample_once(n, replicas, size, shuffle) -> None:
    loader = DataLoader(Numbers(n), batch_size=size, shuffle=shuffle)
    seen, lengths = [], []
    for rank in range(replicas):
        shard = loader.validation_loader(seed=1, rank=rank, replicas=replicas)
        local_batches = [batch.tolist() for batch in shard]
        assert local_batches == [batch.tolist() for batch in shard]  # same at the next validation
        assert len(local_batches) == len(shard)
        lengths.append(len(local_batches))
        seen += [x for batch in local_batches for x in batch]
    assert sorted(seen) == list(range(n))
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.processes
def test_worker_seeds_are_reproducible() -> None:
    def noise(workers, count, rank=0, state=None):
        loader = DataLoader(Noise(16), batch_size=2, num_workers=workers)
        return draw(loader, count, rank=rank, replicas=2, state=state)

    one_worker, _ = noise(1, 6)
    two_workers, _ = noise(2, 6)
    other_rank, _ = noise(1, 6, rank=1)
    _, batch_iterator = noise(1, 3)
    resumed, _ = noise(2, 3, state=batch_iterator.state())
    assert two_workers == one_worker
    assert one_worker[3:] == resumed
    numbers = [x for batch in one_worker + other_rank for sample in batch for x in sample[1:]]
    assert len(set(numbers)) == len(numbers)


def test_loader_does_not_change_global_random_state() -> None:
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    draw(DataLoader(Numbers(8), batch_size=2, shuffle=True), 9)
    assert torch.rand(1) == expected


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


@pytest.mark.parametrize("cut", [0, 1, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("kind", ["torch", "stream", "stateful", "generator"])
def test_other_loaders_resume_their_position(kind: str, cut: int) -> None:
    def loader():
        torch.manual_seed(5)  # trials are built under the trial's seed
        if kind == "torch":
            return torch.utils.data.DataLoader(Numbers(10), batch_size=3, shuffle=True)
        if kind == "stream":
            return torch.utils.data.DataLoader(Stream(), batch_size=3)
        if kind == "stateful":
            return StatefulDataLoader(Numbers(10), batch_size=3, shuffle=True)
        return [[0, 1], [2, 3], [4, 5], [6]]

    expected, _ = draw(loader(), 13, checked=False)
    first, batch_iterator = draw(loader(), cut, checked=False)
    resumed = loader()
    torch.manual_seed(6)
    second, _ = draw(resumed, 13 - cut, checked=False, state=batch_iterator.state())
    assert first + second == expected
    if kind in ("torch", "stateful"):
        assert expected[:4] != expected[4:8]  # reshuffled


def test_torch_loader_is_rejected_with_remedy() -> None:
    plain = torch.utils.data.DataLoader(Numbers(4))
    with pytest.raises(TrialError, match=r"context\.disable_dataset_reproducibility_checks\(\)"):
        draw(plain, 1)
    assert draw(plain, 1, checked=False)[0] == [[0]]
    with pytest.raises(TrialError, match=r"must return a zerotrial.DataLoader, got builtins.int"):
        draw(3, 1)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    for checked in (True, False):
        with pytest.raises(TrialError, match=r"build_training_data_loader: must return .*StepLR"):
            draw(torch.optim.lr_scheduler.StepLR(optimizer, 1), 1, checked=checked)


def test_empty_loader_is_rejected() -> None:
    with pytest.raises(TrialError, match="must give at least one micro-batch, got an empty"):
        draw([], 1, checked=False)

    class Endless:
        def __iter__(self) -> Iterator[int]:
            return iter(())

    with pytest.raises(TrialError, match="returned no micro-batch"):
        draw(Endless(), 1, checked=False)


def test_position_of_other_loader_kind_is_rejected() -> None:
    _, plain = draw([[1]], 1, checked=False)
    with pytest.raises(TrialError, match="another kind"):
        draw(DataLoader(Numbers(4)), 1, state=plain.state())
    _, stateful = draw(StatefulDataLoader(Numbers(4)), 1)
    with pytest.raises(TrialError, match="saved by 1 data-parallel ranks"):
        draw(StatefulDataLoader(Numbers(4)), 1, replicas=2, state=stateful.state())


def test_conflicting_arguments_raise() -> None:
    with pytest.raises(ValueError, match=r"iterable-style Stream.*StatefulDataLoader"):
        DataLoader(Stream())
    with pytest.raises(ValueError, match="batch_size: must be >= 1"):
        DataLoader(Numbers(3), batch_size=0)
    with pytest.raises(ValueError, match="batch_sampler: excludes"):
        DataLoader(Numbers(3), batch_size=2, batch_sampler=[[0]])
    with pytest.raises(ValueError, match="sampler: must have a length"):
        DataLoader(Numbers(3), sampler=(i for i in range(3)))


def test_loader_outside_a_trial_behaves_like_torch() -> None:
    loader = DataLoader(Numbers(5), batch_size=2)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4]]
    assert len(loader) == 3


def test_data_length_of_nested_batches() -> None:
    assert data_length(torch.zeros(3, 2)) == 3
    assert data_length({"x": [np.zeros((4, 1)), 0]}) == 4
    with pytest.raises(TypeError, match="get_batch_length"):
        data_length("text")
