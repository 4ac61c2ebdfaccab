"""What the planner says of the data and pipe axes is what the counters of a real run count."""

from typing import Any

import pytest
import torch
from torch import nn

import zerotrial
from tests.engine.pipelines import LENGTH, MICRO, SAMPLES, WIDTH, batches, config_of
from tests.engine.ranks import run_on_ranks
from zerotrial.engine.pipeline import LayerSpec, PipelineModule
from zerotrial.plan.layouts import data_traffic, pipe_traffic

pytestmark = pytest.mark.processes

WORDS, BLOCKS = 16, 6  # sizes that 2 and 4 divide: what is padded moves, too


def squared(output: torch.Tensor, _labels: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def counted(stages: int, stage: int) -> dict[str, Any]:
    """Train two batches on 4 ranks; return what a rank moved in the second, and what it has."""
    torch.manual_seed(0)
    layers = [
        LayerSpec(nn.Embedding, WORDS, WIDTH),
        *[LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(BLOCKS - 1)],
    ]
    model = PipelineModule(layers, num_stages=stages, loss_fn=squared, partition_method="uniform")
    engine: Any = zerotrial.initialize(model=model, config=config_of(stage))[0]
    engine.train_batch(batches(0, engine))
    before = dict(engine.traffic)
    engine.train_batch(batches(1, engine))
    found = {
        "moved": {axis: total - before[axis] for axis, total in engine.traffic.items()},
        "own": sum(p.numel() for p in engine.module.parameters()),
        "micro_batches": engine.gradient_accumulation_steps(),
        "at": engine.mesh.pipe.rank,
    }
    engine.close()
    return found


CASES = [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2), (4, 0)]
"""Pipeline stages and ZeRO stage; the other ranks of 4 are replicas."""


def every_case() -> dict[tuple[int, int], dict[str, Any]]:
    return {case: counted(*case) for case in CASES}


def test_the_planners_traffic_is_what_ranks_count() -> None:
    for answer in run_on_ranks(every_case, 4):
        for (stages, stage), found in answer.items():
            replicas, micro_batches = 4 // stages, found["micro_batches"]
            assert micro_batches == SAMPLES // MICRO // replicas
            data = data_traffic(found["own"], stage, micro_batches, replicas)
            assert found["moved"]["data"] == data, (stages, stage, found)
            # The formula is that of a rank between others; the first and the last send half of it.
            sent = pipe_traffic(MICRO * LENGTH * WIDTH, micro_batches, stages)
            ends = stages > 1 and found["at"] in {0, stages - 1}
            assert found["moved"]["pipe"] == (sent // 2 if ends else sent), (stages, stage, found)
