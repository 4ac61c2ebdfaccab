"""A pipeline trains as one process does: every schedule, with replicas, at every ZeRO stage."""

import time
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zerotrial
from benchmarks import pipeline as benchmark
from tests.engine.pipelines import (
    BLOCKS,
    MICRO,
    SAMPLES,
    WIDTH,
    WORDS,
    batches,
    build,
    config_of,
    engine_of,
    layers,
    loss_of,
    reference,
)
from tests.engine.ranks import run_on_ranks
from zerolab.errors import ConfigError, EngineError
from zerotrial.extensions.pipeline import (
    LayerSpec,
    PipeDataParallelTopology,
    PipelineModule,
    ProcessTopology,
    TiedLayerSpec,
)
from zerotrial.extensions.pipeline.stage import ZeroStage
from zerotrial.extensions.pipeline.transfer import parts_of

pytestmark = pytest.mark.processes

RANKS, STEPS, ACCUMULATION = 4, 6, 4

LAYOUTS = [
    (1, 1, "1f1b", 1),
    (1, 3, "1f1b", 1),
    (2, 0, "1f1b", 1),
    (2, 1, "1f1b", 1),
    (2, 2, "gpipe", 1),
    (4, 1, "1f1b", 1),
    (4, 0, "gpipe", 1),
    (2, 1, "interleaved", 2),
    (4, 1, "interleaved", 2),
    (2, 2, "zero-bubble", 2),
    (4, 1, "zero-bubble", 1),
]
"""Pipeline stages, ZeRO stage, schedule, chunks on each rank; the other ranks are replicas."""


def train(stages: int, stage: int, schedule: str, chunks: int) -> dict[str, Any]:
    micro = SAMPLES * stages // RANKS // ACCUMULATION
    engine = engine_of(stages, stage, schedule, chunks, train_micro_batch_size_per_gpu=micro)
    losses, norms = [], []
    for step in range(STEPS):
        losses.append(float(engine.train_batch(batches(step, engine))))
        norms.append(engine.get_global_grad_norm())
    results = {
        "losses": losses,
        "norms": norms,
        "evaluated": float(engine.eval_batch(batches(STEPS, engine))),
        "weights": {name: weight.clone() for name, weight in engine.stage.full_weights()},
        "own": sorted(engine.module.layers),
        "counted": (engine.global_steps, engine.micro_steps, engine.global_samples),
        "traffic": engine.traffic,
    }
    engine.close()
    return results


def refusals() -> dict[str, str]:
    """Return this rank's errors for invalid calls and batches."""
    torch.manual_seed(0)
    topology = PipeDataParallelTopology(num_pp=2, num_dp=2)  # instead of num_stages
    by_topology = PipelineModule(layers(), topology=topology, loss_fn=loss_of)
    engine: Any = zerotrial.initialize(model=by_topology, config=config_of(1))[0]
    errors = {"topology": str(engine.num_stages)}
    calls: dict[str, Callable[[], Any]] = {
        "forward": lambda: engine(torch.zeros(1)),
        "backward": lambda: engine.backward(torch.zeros(1)),
        "step": engine.step,
        "module": lambda: engine.module(torch.zeros(1)),
        "no pair": lambda: engine.train_batch(iter([torch.zeros(1)] * 4)),
        "shapes": lambda: engine.train_batch(
            iter([(torch.zeros(n, 5).long(), torch.zeros(n, 5).long()) for n in (2, 2, 2, 1)])
        ),
        "no data": lambda: engine.train_batch(None),
    }
    for name, call in calls.items():
        with pytest.raises(EngineError) as caught:
            call()
        errors[name] = str(caught.value)
    few = list(batches(0, engine))[:3]
    with pytest.raises(StopIteration):
        engine.train_batch(iter(few))
    after = float(engine.train_batch(batches(0, engine)))
    engine.close()
    errors["after"] = str(after)
    for name, config in {
        "stage 3": config_of(3),
        "interleaved": config_of(1, "interleaved"),
        "stages": config_of(1, pipeline={"stages": 4}),
    }.items():
        with pytest.raises(ConfigError) as refused:
            zerotrial.initialize(model=build(2), config=config)
        errors[name] = str(refused.value)
    idle = [LayerSpec(nn.Linear, 2, 2), LayerSpec(nn.ReLU)]
    model = PipelineModule(idle, num_stages=2, partition_method="uniform")
    with pytest.raises(ConfigError) as refused:
        zerotrial.initialize(model=model, config=config_of(1))
    errors["idle"] = str(refused.value)
    with pytest.raises(ConfigError) as refused:
        PipelineModule(layers(), num_stages=3)
    errors["ranks"] = str(refused.value)
    return errors


class Tuples(nn.Module):
    """Layer with two tensors, one without gradient, random numbers and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.2)

    def forward(self, both: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        x, mask = both
        return self.drop(self.norm(self.mix(x))) * mask, mask


class Sleeping(nn.Linear):
    """Slow on one rank at one end of the model, on the others at the other end."""

    def __init__(self, at: str) -> None:
        super().__init__(4, 4)
        first = torch.distributed.get_rank() == 0
        self.seconds = 0.02 if at == ("front" if first else "back") else 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return super().forward(x)


def cut_by_time() -> list[int]:
    layers = [LayerSpec(Sleeping, at) for at in ("front", "", "", "back")]
    sample = torch.ones(1, 4)
    return PipelineModule(layers, 2, partition_method="time", sample=sample).parts


def other_models() -> dict[str, Any]:
    """Tuples between stages, 16 bits, activations computed again, ragged evaluation."""
    results: dict[str, Any] = {}
    for name, more, interval in (
        ("plain", {}, 0),
        ("again", {}, 1),
        ("bf16", {"bf16": {"enabled": True}}, 0),
    ):
        torch.manual_seed(3)
        model = PipelineModule(
            [LayerSpec(Tuples) for _ in range(4)],
            num_stages=2,
            loss_fn=lambda both, y: (both[0].float() - y).square().mean(),
            activation_checkpoint_interval=interval,
        )
        config = config_of(1, **more)
        engine = zerotrial.initialize(model=model, config=config)[0]
        generator = torch.Generator().manual_seed(5)
        x = torch.randn(SAMPLES, 4, generator=generator)
        pairs = [((part, (part > 0).to(torch.int32)), part) for part in x.split(MICRO)]
        torch.manual_seed(9)
        losses = [float(engine.train_batch(iter(pairs[:4]))) for _ in range(3)]
        tracked = {n: int(b) for n, b in engine.module.named_buffers() if b.dtype == torch.long}
        ragged = [(pairs[0][0], pairs[0][1]), ((x[:3], (x[:3] > 0).int()), x[:3])]
        loss, logits = engine.eval_batch(iter(ragged), num_micro_batches=2, return_logits=True)
        results[name] = losses, tracked, float(loss), None if logits is None else len(logits)
        engine.close()
    return results


def measured() -> list[dict[str, Any]]:
    """Run the benchmark with layers of one millisecond; return forwards before each backward."""
    options = Namespace(stages=RANKS, wait_ms=1.0, steps=1)
    forward, backward = ZeroStage.forward_one_chunk, ZeroStage.backward_one_chunk
    order = ""

    def to(stage: ZeroStage, *args: Any, **kwargs: Any) -> Any:
        nonlocal order
        order += "F"
        return forward(stage, *args, **kwargs)

    def fro(stage: ZeroStage, *args: Any, **kwargs: Any) -> None:
        nonlocal order
        order += "B"
        backward(stage, *args, **kwargs)

    ZeroStage.forward_one_chunk = to  # type: ignore[method-assign]
    ZeroStage.backward_one_chunk = fro  # type: ignore[method-assign]
    results = []
    try:
        for name, chunks in benchmark.SCHEDULES.items():
            order = ""
            result = benchmark._measure(name, chunks, ACCUMULATION, options)
            results.append({**result, "ahead": order.index("B")})
    finally:
        ZeroStage.forward_one_chunk = forward  # type: ignore[method-assign]
        ZeroStage.backward_one_chunk = backward  # type: ignore[method-assign]
    return results


def all_cases() -> dict[str, Any]:
    return {
        "trained": {layout: train(*layout) for layout in LAYOUTS},
        "refused": refusals(),
        "others": other_models(),
        "by time": cut_by_time(),
        "measured": measured(),
    }


@pytest.fixture(scope="module")
def rank_results() -> list[dict[str, Any]]:
    return run_on_ranks(all_cases, RANKS)


@pytest.fixture(scope="module")
def plain() -> Any:
    return reference(STEPS)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_training_matches_plain_torch(
    rank_results: list[dict[str, Any]], plain: Any, layout: tuple[int, int, str, int]
) -> None:
    losses, norms, weights, evaluated = plain
    for rank_result in rank_results:
        result = rank_result["trained"][layout]
        assert result["losses"] == pytest.approx(losses, abs=1e-5)
        assert result["norms"] == pytest.approx(norms, rel=1e-5)
        assert result["evaluated"] == pytest.approx(evaluated, abs=1e-5)
        for name, weight in result["weights"].items():
            torch.testing.assert_close(weight, weights[name], rtol=1e-4, atol=1e-5)
    names = {
        name for rank_result in rank_results for name in rank_result["trained"][layout]["weights"]
    }
    assert names == set(weights)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_all_ranks_return_the_same_loss(
    rank_results: list[dict[str, Any]], layout: tuple[int, int, str, int]
) -> None:
    runs = [rank_result["trained"][layout] for rank_result in rank_results]
    assert all(run["losses"] == runs[0]["losses"] for run in runs)
    assert all(run["counted"] == (STEPS, STEPS * ACCUMULATION, STEPS * SAMPLES) for run in runs)


def test_tied_copies_stay_bitwise_equal(rank_results: list[dict[str, Any]]) -> None:
    for layout in LAYOUTS:
        weights_of_ranks = [
            rank_result["trained"][layout]["weights"] for rank_result in rank_results
        ]
        copies = [
            weights["layers.0.weight"]
            for weights in weights_of_ranks
            if "layers.0.weight" in weights
        ]
        assert len(copies) == (4 if layout[0] < 4 else 2)
        assert all(torch.equal(copy, copies[0]) for copy in copies)


def test_rank_builds_only_its_layers(rank_results: list[dict[str, Any]]) -> None:
    built = [rank_result["trained"][4, 1, "1f1b", 1]["own"] for rank_result in rank_results]
    assert built[1] + built[2] == [str(i) for i in range(int(built[1][0]), int(built[2][-1]) + 1)]
    assert "0" in built[0]
    assert "0" in built[3]
    assert sum(len(layers) for layers in built) == BLOCKS + 2
    interleaved = [
        rank_result["trained"][2, 1, "interleaved", 2]["own"] for rank_result in rank_results
    ]
    assert set(interleaved[0]) & set(interleaved[2]) == {"0"}


@pytest.mark.parametrize("layout", [(2, 1, "1f1b", 1), (4, 1, "zero-bubble", 1)], ids=str)
def test_traffic_is_two_activations_per_micro_batch(
    rank_results: list[dict[str, Any]], layout: tuple[int, int, str, int]
) -> None:
    stages = layout[0]
    replicas = RANKS // stages
    activation = SAMPLES // replicas * 5 * WIDTH
    tied = 2 * WORDS * WIDTH // replicas
    for rank, rank_result in enumerate(rank_results):
        sent = rank_result["trained"][layout]["traffic"]
        at = rank // replicas
        inner = at not in {0, stages - 1}
        assert sent["pipe"] == STEPS * activation * (2 if inner else 1)
        assert sent["ties"] == (0 if inner else STEPS * tied)


def test_unsupported_call_names_alternatives(rank_results: list[dict[str, Any]]) -> None:
    for rank_result in rank_results:
        errors = rank_result["refused"]
        for call in ("forward", "backward", "step"):
            assert "call train_batch(data_iter)" in errors[call]
        assert "call train_batch() or eval_batch() of the engine" in errors["module"]


def test_invalid_data_is_refused_on_all_ranks(
    rank_results: list[dict[str, Any]], plain: Any
) -> None:
    for rank_result in rank_results:
        errors = rank_result["refused"]
        assert "must yield pairs of inputs and labels" in errors["no pair"]
        assert "must all have one shape" in errors["shapes"]
        assert "pass data_iter" in errors["no data"]
        assert errors["topology"] == "2"
        assert float(errors["after"]) == pytest.approx(plain[0][0], abs=1e-5)


def test_unsupported_settings_fail_before_building(
    rank_results: list[dict[str, Any]],
) -> None:
    for rank_result in rank_results:
        errors = rank_result["refused"]
        assert "must be 0, 1 or 2 with 2 pipeline stages, got 3" in errors["stage 3"]
        assert "build the PipelineModule with chunks=2" in errors["interleaved"]
        assert "pipeline.stages: must be the PipelineModule's 2, got 4" in errors["stages"]
        assert "pipeline stage 1: has no trained parameters (layers 1 to 1)" in errors["idle"]
        assert (
            "must divide the 4 rank(s), got 3; start 3 ranks or a multiple, or give one of 1, 2, 4"
            in (errors["ranks"])
        )


def test_signature_run_leaves_no_trace(rank_results: list[dict[str, Any]]) -> None:
    for rank_result in rank_results:
        _, tracked, _, _ = rank_result["others"]["plain"]
        assert set(tracked.values()) == {3 * 4}  # batches that the norms have seen


def test_partition_by_time_is_that_of_rank_0(rank_results: list[dict[str, Any]]) -> None:
    (first, *other_ranks) = [rank_result["by time"] for rank_result in rank_results]
    assert other_ranks == [first] * 3


def test_benchmark_has_formulas_of_schedules(rank_results: list[dict[str, Any]]) -> None:
    results = rank_results[0]["measured"]
    # Four stages, four micro-batches: (p - 1) / (c m + p - 1).
    assert {result["schedule"]: result["formula"] for result in results} == {
        "gpipe": 3 / 7,
        "1f1b": 3 / 7,
        "interleaved": 3 / 11,
        "zero-bubble": None,
    }
    assert all(result["sent"] == result["sent_formula"] > 0 for result in results)
    assert all(result["waits"] > 0 for result in results)


def test_schedules_overlap_micro_batches(
    rank_results: list[dict[str, Any]],
) -> None:
    """One after the other, each would be through before the next begins: 1 ahead on all ranks."""
    ahead = [
        {result["schedule"]: result["ahead"] for result in rank_result["measured"]}
        for rank_result in rank_results
    ]
    assert [result["gpipe"] for result in ahead] == [ACCUMULATION] * RANKS
    assert [result["1f1b"] for result in ahead] == [4, 3, 2, 1]
    assert [result["zero-bubble"] for result in ahead] == [4, 3, 2, 1]
    assert [result["interleaved"] for result in ahead] == [
        8,
        8,
        7,
        5,
    ]  # 2 chunks of 4 micro-batches


def test_activations_can_be_recomputed(rank_results: list[dict[str, Any]]) -> None:
    for rank_result in rank_results:
        plain_losses, again = rank_result["others"]["plain"][0], rank_result["others"]["again"][0]
        assert again == pytest.approx(plain_losses, abs=1e-6)
        assert rank_result["others"]["bf16"][0] == pytest.approx(plain_losses, rel=0.05)


def test_evaluation_of_any_shape(rank_results: list[dict[str, Any]]) -> None:
    for rank, rank_result in enumerate(rank_results):
        _, _, loss, outputs = rank_result["others"]["plain"]
        assert loss > 0
        assert outputs == (2 if rank >= 2 else None)


def test_module_in_one_process_is_plain() -> None:
    model = build(1)
    tokens = torch.zeros(1, 5, dtype=torch.long)
    assert model(tokens).shape == (1, 5, WORDS)
    assert "layers.0.weight" in model.state_dict()
    assert not any("chunk" in name for name in model.state_dict())


def test_invalid_layers_are_refused_together() -> None:
    for wrong, expected in (
        ([nn.ReLU], "is the class ReLU; write LayerSpec(ReLU)"),
        ([3], "must be a LayerSpec, torch.nn.Module or function, got int"),
        ([], "must be a list"),
    ):
        with pytest.raises(ConfigError) as caught:
            PipelineModule(wrong, num_stages=1)  # type: ignore[arg-type]
        assert expected in str(caught.value)
    with pytest.raises(ConfigError, match="is missing; give it or topology"):
        PipelineModule(layers())
    with pytest.raises(ConfigError, match="must be the topology's 1, got 2"):
        PipelineModule(layers(), 2, ProcessTopology(["pipe", "data"], [1, 4]))
    with pytest.raises(ConfigError, match="must have a weight 'weight', has none"):
        PipelineModule([TiedLayerSpec("a", nn.ReLU)], num_stages=1)


def test_layer_seeds_are_independent_of_the_generator() -> None:
    torch.manual_seed(1)
    first = PipelineModule(layers(), num_stages=1, seed_layers=True)
    torch.manual_seed(2)
    again = PipelineModule(layers(), num_stages=1, seed_layers=True)
    other = PipelineModule(layers(), num_stages=1, seed_layers=True, base_seed=7)
    assert torch.equal(first.layers["3"].mix.weight, again.layers["3"].mix.weight)
    assert not torch.equal(first.layers["3"].mix.weight, other.layers["3"].mix.weight)
    assert loss_of(first(torch.zeros(1, 5).long()), torch.zeros(1, 5).long()) > 0


def test_unsupported_types_are_refused() -> None:
    assert parts_of(torch.zeros(2))[0].shape == (2,)
    for wrong, expected in (
        (torch.zeros(2, dtype=torch.complex64), "got torch.complex64; pass real"),
        ((torch.zeros(2), None), "a tuple of tensors, got NoneType"),
        ((), "got nothing"),
    ):
        with pytest.raises(EngineError, match=expected):
            parts_of(wrong)
