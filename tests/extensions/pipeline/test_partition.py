"""Partitioning of a model into pipeline stages."""

import itertools

import pytest
import torch
from torch import nn

from zerolab.errors import ConfigError
from zerotrial.extensions.pipeline import LayerSpec, TiedLayerSpec, partition


def heaviest(weights: list[float], boundaries: list[int]) -> float:
    pairs = itertools.pairwise(boundaries)
    return max(sum(weights[start:stop]) for start, stop in pairs)


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [
        (8, 2, [0, 4, 8]),
        (7, 3, [0, 3, 5, 7]),
        (4, 4, [0, 1, 2, 3, 4]),
        (5, 1, [0, 5]),
    ],
)
def test_uniform_partition(layers: int, stages: int, expected: list[int]) -> None:
    assert partition([1.0] * layers, stages, "uniform") == expected


@pytest.mark.parametrize(
    ("weights", "stages", "expected"),
    [
        ([5, 1, 1, 1, 4, 4], 3, [0, 2, 5, 6]),
        ([1, 1, 1, 1], 2, [0, 2, 4]),
        ([10, 1, 1, 1, 1, 1], 2, [0, 1, 6]),
        ([0, 0, 9, 0], 2, [0, 2, 4]),
        ([3, 3, 3, 3, 3], 2, [0, 2, 5]),
    ],
)
def test_heaviest_stage_is_minimal(weights: list[float], stages: int, expected: list[int]) -> None:
    boundaries = partition(weights, stages)
    assert heaviest(weights, boundaries) == heaviest(weights, expected)
    assert len(boundaries) == stages + 1
    assert all(a < b for a, b in itertools.pairwise(boundaries))


def test_no_partition_has_a_lighter_heaviest_stage() -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        weights = torch.randint(0, 20, (7,), generator=generator).tolist()
        best = min(heaviest(weights, [0, a, b, 7]) for a in range(1, 6) for b in range(a + 1, 7))
        assert heaviest(weights, partition(weights, 3)) == best


class Tape(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        BUILT.append(self.weight.device.type)


BUILT: list[str] = []


def test_parameters_are_counted_without_memory() -> None:
    BUILT.clear()
    specs = [LayerSpec(Tape, 4), LayerSpec(Tape, 1), LayerSpec(Tape, 1), LayerSpec(Tape, 2)]
    assert partition(specs, 2, "parameters") == partition(specs, 2, "best") == [0, 1, 4]
    assert set(BUILT) == {"meta"}


def test_type_matches_part_of_the_name() -> None:
    layers = [nn.Embedding(2, 2), nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), torch.relu]
    assert partition(layers, 2, "type:linear")[1] in {2, 3}
    tied = [TiedLayerSpec("a", nn.Linear, 2, 2), nn.ReLU(), LayerSpec(nn.Linear, 2, 2)]
    assert partition(tied, 2, "type:^Linear$")[1] in {1, 2}


class Slow(nn.Module):
    def __init__(self, times: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(192) / 192)
        self.times = times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = x @ self.weight
        return x


def test_time_isolates_a_slow_layer() -> None:
    layers = [LayerSpec(Slow, times) for times in (1, 1, 1, 1, 1, 60)]
    assert partition(layers, 2, "time", sample=torch.ones(64, 192)) == [0, 5, 6]


@pytest.mark.parametrize(
    ("layers", "stages", "method", "message"),
    [
        ([1.0, 2.0], 3, "parameters", "must be at most the 2 layers, got 3"),
        ([1.0], 0, "uniform", "num_stages: must be at least 1, got 0"),
        ([nn.ReLU()], 1, "fastest", "must be uniform, parameters, time or type:REGEX"),
        ([nn.ReLU()], 1, "type:linear", "must match a layer's class, of ReLU"),
        ([nn.ReLU()], 1, "type:(", "no regular expression"),
        ([nn.ReLU()], 1, "time", "needs sample"),
    ],
)
def test_invalid_partition_is_refused(
    layers: list[object], stages: int, method: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=None) as caught:
        partition(layers, stages, method)  # type: ignore[arg-type]
    assert message in str(caught.value)
