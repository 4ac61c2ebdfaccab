"""Matrices cut over ranks: the same losses as one process, at every stage and layout."""

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

import zerotrial
from benchmarks.formulas import tensor_traffic
from tests.engine.ranks import run_on_ranks
from tests.engine.tensor_models import CONFIG, PLANS, SmallGpt, loss_of, reference, tokens_of, train
from zerolab.config.engine.parallel import TensorParallelConfig
from zerolab.errors import ConfigError, EngineError
from zerotrial.engine.mesh import Mesh
from zerotrial.extensions.tensor_parallel.plan import find_layers

RANKS, STEPS = 4, 6
CASES = [
    (2, 0, "whole"),
    (2, 1, "sequence"),
    (2, 2, "whole"),
    (2, 3, "sequence"),
    (4, 1, "sequence"),
]
"""Tensor-parallel ranks of four, stage, plan."""


def engine_of(model: nn.Module, tensor: int, stage: int, plan: Any, **more: Any) -> Any:
    config = {
        **CONFIG,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 700},
        "tensor_parallel": {"size": tensor, "plan": plan},
        **more,
    }
    return zerotrial.initialize(model=model, config=config)[0]


def ran(tensor: int, stage: int, plan: str) -> Any:
    model = SmallGpt(torch.distributed.get_rank())  # the first rank's values count
    engine = engine_of(model, tensor, stage, PLANS[plan])
    numel = sum(p.numel() for group in engine.optimizer.param_groups for p in group["params"])
    lines = train(engine, range(STEPS))
    traffic = dict(engine.divided.ranks.traffic.elements)
    engine.close()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    # The key's bias has no effect, so Adam steps on its rounding errors.
    return lines, {k: v for k, v in weights.items() if not k.endswith("qkv.bias")}, numel, traffic


def refused() -> dict[str, str]:
    """Return the errors for invalid models and configurations, by problem."""
    heads = SmallGpt()
    heads.config = torch.nn.Module()
    heads.config.num_key_value_heads = 3
    odd = SmallGpt()
    odd.blocks[0].up = nn.Linear(16, 31)
    tied = {**PLANS["whole"], "wte": "colwise"}
    errors = {}
    for what, model, plan, more in (
        ("heads", heads, PLANS["whole"], {}),
        ("odd", odd, PLANS["whole"], {}),
        ("tied", SmallGpt(), tied, {}),
        ("norm", SmallGpt(), {"norm": "colwise"}, {}),
        ("lamb", SmallGpt(), PLANS["whole"], {"optimizer": {"type": "LAMB"}}),
    ):
        before = [p.clone() for p in model.parameters()]
        with pytest.raises(ConfigError) as caught:
            engine_of(model, 2, 1, plan, **more)
        errors[what] = str(caught.value)
        after = list(model.parameters())
        assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True)), what
    return errors


def different_batches() -> str:
    engine = engine_of(SmallGpt(), 2, 0, PLANS["whole"])
    with pytest.raises(EngineError) as caught:
        loss_of(engine, tokens_of(torch.distributed.get_rank())[:1])
    engine.close()
    return str(caught.value)


WRONG = {
    "blocks.0.down reads 64 features, got 32, a rank's part": {"blocks.*.up": "colwise"},
    "blocks.0.down is rowwise and reads a rank's 32 features, got all 64": {
        "blocks.*.down": "rowwise"
    },
    "output of head, of which each rank has a part": {**PLANS["whole"], "head": "colwise"},
    "blocks.0.qkv: three times as many outputs": {
        **PLANS["whole"],
        "blocks.*.qkv": "colwise",
    },
}
"""Plans that fit the names and not the model, by what is said."""


def first_batch_errors() -> dict[str, str]:
    """Return the error or warning."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zerotrial.extensions.tensor_parallel").addHandler(handler)
    errors = {}
    for expected, plan in WRONG.items():
        engine = engine_of(SmallGpt(), 2, 0, plan)
        try:
            engine(tokens_of(0)[:1, :-1])
        except EngineError as error:
            messages.append(str(error))
        errors[expected] = "\n".join(messages)
        messages.clear()
        engine.close()
    return errors


def all_cases() -> Any:
    return (
        {case: ran(*case) for case in CASES},
        refused(),
        different_batches(),
        first_batch_errors(),
    )


@pytest.fixture(scope="module")
def results() -> list[Any]:
    return run_on_ranks(all_cases, RANKS)


@pytest.fixture(scope="module")
def expected() -> Any:
    return reference(STEPS)


pytestmark = pytest.mark.processes


@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_matches_one_process(
    results: list[Any], expected: Any, case: tuple[int, int, str]
) -> None:
    lines, model = expected
    for runs, *_ in results:
        actual, weights = runs[case][:2]
        for loss, expected_loss in zip(actual, lines, strict=True):
            assert loss == pytest.approx(expected_loss, abs=1e-5)
        for name, weight in weights.items():
            reference = model.get_parameter(name).detach()
            torch.testing.assert_close(weight, reference, rtol=1e-4, atol=1e-4)


def test_rank_keeps_its_part_of_sharded_matrices(results: list[Any]) -> None:
    numel = sum(p.numel() for p in SmallGpt().parameters())
    # Two norms and two biases of rowwise layers in the block; positions; the last norm.
    uncut = 4 * 16 + 2 * 16 + 8 * 16 + 2 * 16
    for runs, *_ in results:
        assert runs[4, 1, "sequence"][2] == uncut + (numel - uncut) // 4


def test_traffic_matches_formula(results: list[Any]) -> None:
    micro_batches, samples, tokens, hidden, vocabulary, layers = STEPS * 4, 2, 8, 16, 32, 1
    activation, logits = samples * tokens * hidden, samples * tokens * vocabulary
    for runs, *_ in results:
        moved = runs[2, 0, "whole"][3]
        # Two sums a block forward, two backward, embedding and head one each; logits are gathered.
        assert moved["all_reduce"] == micro_batches * 2 * activation * (4 * layers + 2)
        assert moved["all_gather"] == micro_batches * logits
        formula = tensor_traffic(activation, layers, micro_batches, 2, logits=logits)
        assert moved["all_reduce"] + moved["all_gather"] == formula


def test_invalid_plan_leaves_the_model_unchanged(results: list[Any]) -> None:
    for _, errors, *_ in results:
        assert "must divide the model's num_key_value_heads, got 2 with 3 heads" in errors["heads"]
        assert "blocks.0.up: weight must be a multiple of 2 ranks long" in errors["odd"]
        assert "blocks.0.down" not in errors["odd"]
        assert "cuts wte.weight along dimension" in errors["tied"]
        assert "only nn.Linear and nn.Embedding can be sharded, got LayerNorm" in errors["norm"]
        assert "must be elementwise" in errors["lamb"]


def test_different_batches_are_refused(results: list[Any]) -> None:
    for _, _, text, _ in results:
        assert "must read the same micro-batch" in text


def test_wrong_plan_is_reported_at_first_batch(results: list[Any]) -> None:
    for expected, message in results[0][-1].items():
        assert expected in message
        assert len(message.splitlines()) == 1, message


def layers_of(plan: Any, model: nn.Module | None = None) -> tuple[dict[str, str], list[str]]:
    config = TensorParallelConfig.model_validate({"size": 2, "plan": plan})
    layers, problems = find_layers(model or SmallGpt(), config)
    return {layer.name: layer.plan.style for layer in layers}, problems


def test_unmatched_pattern_names_the_closest() -> None:
    _, problems = layers_of({"blocks.*.qkw": "colwise"})
    (line,) = problems
    assert "'blocks.*.qkw' fits no layer; the closest is 'blocks." in line


def test_conflicting_patterns_are_refused() -> None:
    _, problems = layers_of({"blocks.0.up": "colwise", "blocks.*.up": "rowwise"})
    assert problems == [
        "tensor_parallel.plan: blocks.0.up fits 'blocks.0.up' and 'blocks.*.up'; keep one of the "
        "patterns"
    ]


class Other:
    """Unsupported parallel style of torch."""

    __module__ = "torch.distributed.tensor.parallel.style"


def test_plan_of_torch_styles() -> None:
    model = SmallGpt()
    model.tensor_parallel_plan = lambda: {
        "blocks.*.norm?": SequenceParallel(),
        "blocks.*.up": ColwiseParallel(input_layouts=Shard(1)),
        "blocks.*.down": RowwiseParallel(output_layouts=Shard(1)),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    config = TensorParallelConfig(size=2)
    layers, problems = find_layers(model, config)
    plans = {layer.name: layer.plan for layer in layers}
    assert problems == []
    assert (plans["blocks.0.up"].input, plans["blocks.0.up"].output) == ("sequence", "split")
    assert (plans["blocks.0.down"].input, plans["blocks.0.down"].output) == ("split", "sequence")
    assert plans["head"].output == "replicate"
    for expected, style in {
        "got Shard(dim=0): activations": PrepareModuleInput(
            input_layouts=Shard(0), desired_input_layouts=Replicate()
        ),
        "got Partial(): a rowwise": PrepareModuleOutput(
            output_layouts=Partial(), desired_output_layouts=Replicate()
        ),
        "or a PrepareModule style, got Other": Other(),
    }.items():
        model.tensor_parallel_plan = lambda style=style: {"blocks.0": style}
        _, problems = find_layers(model, config)
        assert expected in problems[0]


def test_model_without_plan_is_refused() -> None:
    _, problems = layers_of("auto")
    assert "SmallGpt has neither tensor_parallel_plan() nor a tp_plan" in problems[0]


def test_one_process_is_not_sharded() -> None:
    from zerotrial.extensions.tensor_parallel.model_sharding import shard_model

    model = SmallGpt()
    divided = shard_model(model, TensorParallelConfig(), Mesh(), torch.device("cpu"))
    assert divided.cuts == {}
