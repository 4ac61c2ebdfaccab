"""Formulas of traffic and pipeline bubbles, checked by hand."""

import pytest

from benchmarks.formulas import bubble, data_traffic, pipe_traffic, tensor_traffic


@pytest.mark.parametrize(("stages", "micro", "share"), [(1, 4, 0), (2, 1, 1 / 2), (4, 12, 1 / 5)])
def test_bubble_of_1f1b(stages: int, micro: int, share: float) -> None:
    assert bubble(micro, stages) == pytest.approx(share)


def test_axis_of_one_rank_has_no_traffic() -> None:
    assert data_traffic(1000, 3, 4, 1) == tensor_traffic(10, 2, 4, 1) == pipe_traffic(10, 4, 1) == 0


@pytest.mark.parametrize(
    ("stages", "chunks", "passes"), [(2, 1, 1), (4, 1, 2), (2, 2, 3), (4, 2, 4)]
)
def test_pipe_traffic_of_two_stages(stages: int, chunks: int, passes: int) -> None:
    assert pipe_traffic(10, 4, stages, chunks) == passes * 40  # like `engine.traffic`
    assert [data_traffic(1000, stage, 4, 2) for stage in range(4)] == [2000, 2000, 5000, 12_000]
