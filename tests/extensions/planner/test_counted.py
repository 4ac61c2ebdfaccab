"""Traffic of the data and pipe axes: the formulas equal the counters of real runs."""

from typing import Any

import pytest
import torch
from torch import nn

import zerotrial
from benchmarks.formulas import data_traffic, pipe_traffic
from tests.engine.pipelines import LENGTH, MICRO, SAMPLES, WIDTH, batches, config_of
from tests.engine.ranks import run_on_ranks
from zerolab.config.engine.reader import load_engine_config
from zerotrial.engine.builder.environment import planning
from zerotrial.engine.module.replicated_parameters import choose_replicated
from zerotrial.engine.module.units import plan_units
from zerotrial.engine.stage3.prefetch import in_forward_order, kept_to_backward
from zerotrial.extensions.pipeline import LayerSpec, PipelineModule
from zerotrial.extensions.planner.model_profile import profile_model
from zerotrial.extensions.planner.plan import bucket_of

pytestmark = pytest.mark.processes

WORDS, BLOCKS = 16, 6  # divisible by 2 and 4: padding is communicated, too


def squared(output: torch.Tensor, _labels: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def counted(stages: int, stage: int) -> dict[str, Any]:
    """Train two batches on 4 ranks; return a rank's traffic of the second, and its sizes."""
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
    counted_values = {
        "moved": {axis: total - before[axis] for axis, total in engine.traffic.items()},
        "own": sum(p.numel() for p in engine.module.parameters()),
        "micro_batches": engine.gradient_accumulation_steps(),
        "at": engine.mesh.pipe.rank,
    }
    engine.close()
    return counted_values


def largest_buckets(stage: int, optimizer: str, buckets: dict[str, int]) -> tuple[int, int]:
    """Return the largest bucket of this rank, and that of the plan, for 2 pipeline stages."""
    zero = {"stage": stage, **buckets}
    config = config_of(stage, zero_optimization=zero, optimizer={"type": optimizer})

    def build() -> PipelineModule:
        layers = [LayerSpec(nn.Linear, WIDTH, WIDTH, bias=False) for _ in range(BLOCKS)]
        return PipelineModule(layers, num_stages=2, loss_fn=squared)

    with planning(lambda *_: None):
        profile = profile_model(build(), load_engine_config(config), None, None)
    engine: Any = zerotrial.initialize(model=build(), config=config)[0]
    largest = max(bucket.numel for bucket in engine.stage.buckets)
    engine.close()
    return largest, bucket_of(profile, 2, "cpu", stage, "none")


@pytest.mark.parametrize("buckets", [{}, {"reduce_bucket_size": 2 * WIDTH**2}])
@pytest.mark.parametrize("optimizer", ["AdamW", "LAMB"])
@pytest.mark.parametrize("stage", [0, 1])
def test_plan_counts_buckets_of_pipeline_stage(
    stage: int, optimizer: str, buckets: dict[str, int]
) -> None:
    for largest, planned in run_on_ranks(largest_buckets, 4, stage, optimizer, buckets):
        assert planned == largest


CASES = [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2), (4, 0)]
"""Pipeline stages and ZeRO stage; the other ranks of 4 are replicas."""


class Blocks(nn.Module):
    """Units at stage 3: the blocks, and the root with the embedding and the norm."""

    def __init__(self, *, frozen: int = 0) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
        self.small = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        for block in self.blocks[:frozen]:
            block.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for part in (*self.blocks, *self.small):
            x = part(x)
        return x.square().mean()


AT_3: dict[str, dict[str, Any]] = {
    "as it is": {},
    "some kept to backward": {"stage3_max_live_parameters": 2 * WIDTH * WIDTH + WORDS * WIDTH},
    "small ones replicated": {"stage3_param_persistence_threshold": WIDTH + 1},
    "all replicated": {"stage3_param_persistence_threshold": 10**6},
    "hybrid": {"mics_shard_size": 2},
    "some frozen": {},
}


def counted_at_3(case: str) -> tuple[int, int]:
    """Return counted and planned traffic of a stage-3 step with 2 micro-batches."""
    torch.manual_seed(0)
    model = Blocks(frozen=2 if case == "some frozen" else 0)
    config = load_engine_config(
        {
            "train_micro_batch_size_per_gpu": MICRO,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
            "zero_optimization": {"stage": 3, **AT_3[case]},
        }
    )
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model.parameters()) - trained
    zero = config.zero_optimization
    replicated = choose_replicated(model, zero)
    order = in_forward_order(model, plan_units(model, ignored=replicated))
    gathered = kept_to_backward(order, zero) | {order[0]}  # the root stays gathered
    elements = {
        "frozen": frozen,
        "to_backward": sum(unit.numel for unit in gathered),
        "replicated": sum(p.numel() for p in replicated),
    }
    engine: Any = zerotrial.initialize(model=model, config=config)[0]
    before = 0
    for micro_batch in range(4):
        if micro_batch == 2:
            before = engine.stage.traffic.total
        engine.backward(engine(torch.arange(MICRO * LENGTH).view(MICRO, LENGTH) % WORDS))
        engine.step()
    moved = engine.stage.traffic.total - before
    engine.close()
    return moved, data_traffic(trained, 3, 2, 4, shard=zero.shard_ranks, **elements)


def every_case() -> Any:
    return (
        {case: counted(*case) for case in CASES},
        {case: counted_at_3(case) for case in AT_3},
    )


@pytest.fixture(scope="module")
def results() -> list[Any]:
    return run_on_ranks(every_case, 4)


def test_planned_stage_3_traffic_matches_ranks(results: list[Any]) -> None:
    for _, counted_values in results:
        assert {case: moved for case, (moved, _) in counted_values.items()} == {
            case: planned for case, (_, planned) in counted_values.items()
        }
        assert len({planned for _, planned in counted_values.values()}) == len(AT_3)


def test_planned_traffic_matches_ranks(results: list[Any]) -> None:
    for result, _ in results:
        for (stages, stage), counted_values in result.items():
            replicas, micro_batches = 4 // stages, counted_values["micro_batches"]
            assert micro_batches == SAMPLES // MICRO // replicas
            data = data_traffic(counted_values["own"], stage, micro_batches, replicas)
            assert counted_values["moved"]["data"] == data, (stages, stage, counted_values)
            # Traffic of an inner rank, if there is one: the first and the last send half.
            sent = pipe_traffic(MICRO * LENGTH * WIDTH, micro_batches, stages)
            ends = stages > 2 and counted_values["at"] in {0, stages - 1}
            assert counted_values["moved"]["pipe"] == (sent // 2 if ends else sent), (
                stages,
                stage,
                counted_values,
            )
