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
from zerotrial.engine.tensor.plan import find_layers

RANKS, STEPS = 4, 20
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
    held = sum(p.numel() for group in engine.optimizer.param_groups for p in group["params"])
    lines = train(engine, range(STEPS))
    traffic = dict(engine.divided.line.traffic.elements)
    engine.close()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    # The key's bias has no effect, so that Adam makes steps of what is left by rounding.
    return lines, {k: v for k, v in weights.items() if not k.endswith("qkv.bias")}, held, traffic


def refused() -> dict[str, str]:
    """What is said about models and files that do not fit, by what is wrong."""
    heads = SmallGpt()
    heads.config = torch.nn.Module()
    heads.config.num_key_value_heads = 3
    odd = SmallGpt()
    odd.blocks[0].up = nn.Linear(16, 31)
    tied = {**PLANS["whole"], "wte": "colwise"}
    found = {}
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
        found[what] = str(caught.value)
        after = list(model.parameters())
        assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True)), what
    return found


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
    "head gives, of which each rank has a part": {**PLANS["whole"], "head": "colwise"},
    "blocks.0.qkv: three times as many outputs": {
        **PLANS["whole"],
        "blocks.*.qkv": "colwise",
    },
}
"""Plans that fit the names and not the model, by what is said."""


def told_at_the_first_batch() -> dict[str, str]:
    """What is raised or logged."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zerotrial.engine.tensor").addHandler(handler)
    found = {}
    for words, plan in WRONG.items():
        engine = engine_of(SmallGpt(), 2, 0, plan)
        try:
            engine(tokens_of(0)[:1, :-1])
        except EngineError as error:
            said.append(str(error))
        found[words] = "\n".join(said)
        said.clear()
        engine.close()
    return found


def everything() -> Any:
    return (
        {case: ran(*case) for case in CASES},
        refused(),
        different_batches(),
        told_at_the_first_batch(),
    )


@pytest.fixture(scope="module")
def answers() -> list[Any]:
    return run_on_ranks(everything, RANKS)


@pytest.fixture(scope="module")
def expected() -> Any:
    return reference(STEPS)


pytestmark = pytest.mark.processes


@pytest.mark.parametrize("case", CASES, ids=str)
def test_losses_norms_and_weights_are_those_of_one_process(
    answers: list[Any], expected: Any, case: tuple[int, int, str]
) -> None:
    lines, model = expected
    for runs, *_ in answers:
        found, weights = runs[case][:2]
        for got, wanted in zip(found, lines, strict=True):
            assert got == pytest.approx(wanted, abs=1e-5)
        for name, weight in weights.items():
            wanted = model.get_parameter(name).detach()
            torch.testing.assert_close(weight, wanted, rtol=1e-4, atol=1e-4)


def test_a_rank_keeps_its_part_of_what_is_cut_and_all_of_the_rest(answers: list[Any]) -> None:
    whole = sum(p.numel() for p in SmallGpt().parameters())
    # Two norms and two biases of rowwise layers in the block; positions; the last norm.
    uncut = 4 * 16 + 2 * 16 + 8 * 16 + 2 * 16
    for runs, *_ in answers:
        assert runs[4, 1, "sequence"][2] == uncut + (whole - uncut) // 4


def test_elements_moved_are_those_of_the_formula(answers: list[Any]) -> None:
    micro_batches, samples, tokens, hidden, vocabulary, layers = STEPS * 4, 2, 8, 16, 32, 1
    activation, logits = samples * tokens * hidden, samples * tokens * vocabulary
    for runs, *_ in answers:
        moved = runs[2, 0, "whole"][3]
        # Two sums a block forward, two backward, embedding and head one each; logits are gathered.
        assert moved["all_reduce"] == micro_batches * 2 * activation * (4 * layers + 2)
        assert moved["all_gather"] == micro_batches * logits
        formula = tensor_traffic(activation, layers, micro_batches, 2, logits=logits)
        assert moved["all_reduce"] + moved["all_gather"] == formula


def test_what_does_not_fit_is_refused_and_the_model_is_left_as_it_was(answers: list[Any]) -> None:
    for _, found, *_ in answers:
        assert "must divide the model's num_key_value_heads, got 2 with 3 heads" in found["heads"]
        assert "blocks.0.up: weight must be a multiple of 2 ranks long" in found["odd"]
        assert "blocks.0.down" not in found["odd"]
        assert "cuts wte.weight along dimension" in found["tied"]
        assert "only nn.Linear and nn.Embedding can be cut, got LayerNorm" in found["norm"]
        assert "must update each element by itself" in found["lamb"]


def test_ranks_of_one_model_that_read_different_batches_are_told(answers: list[Any]) -> None:
    for _, _, text, _ in answers:
        assert "must read the same micro-batch" in text


def test_a_plan_that_fits_the_names_alone_is_told_at_the_first_batch(answers: list[Any]) -> None:
    for words, said in answers[0][-1].items():
        assert words in said
        assert len(said.splitlines()) == 1, said


def layers_of(plan: Any, model: nn.Module | None = None) -> tuple[dict[str, str], list[str]]:
    config = TensorParallelConfig.model_validate({"size": 2, "plan": plan})
    layers, problems = find_layers(model or SmallGpt(), config)
    return {layer.name: layer.plan.style for layer in layers}, problems


def test_a_pattern_that_fits_no_layer_is_told_with_the_closest() -> None:
    _, problems = layers_of({"blocks.*.qkw": "colwise"})
    (line,) = problems
    assert "'blocks.*.qkw' fits no layer; the closest is 'blocks." in line


def test_two_patterns_that_disagree_about_a_layer_are_told() -> None:
    _, problems = layers_of({"blocks.0.up": "colwise", "blocks.*.up": "rowwise"})
    assert problems == [
        "tensor_parallel.plan: blocks.0.up fits 'blocks.0.up' and 'blocks.*.up'; keep one of the "
        "patterns"
    ]


class Other:
    """A style of torch's that is not known here."""

    __module__ = "torch.distributed.tensor.parallel.style"


def test_a_model_may_give_a_plan_of_torchs_own_styles() -> None:
    model = SmallGpt()
    model.tensor_parallel_plan = lambda: {
        "blocks.*.norm?": SequenceParallel(),
        "blocks.*.up": ColwiseParallel(input_layouts=Shard(1)),
        "blocks.*.down": RowwiseParallel(output_layouts=Shard(1)),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    config = TensorParallelConfig(size=2)
    layers, problems = find_layers(model, config)
    found = {layer.name: layer.plan for layer in layers}
    assert problems == []
    assert (found["blocks.0.up"].input, found["blocks.0.up"].output) == ("sequence", "split")
    assert (found["blocks.0.down"].input, found["blocks.0.down"].output) == ("split", "sequence")
    assert found["head"].output == "replicate"
    for said, style in {
        "got Shard(dim=0): activations": PrepareModuleInput(
            input_layouts=Shard(0), desired_input_layouts=Replicate()
        ),
        "got Partial(): a sum is": PrepareModuleOutput(
            output_layouts=Partial(), desired_output_layouts=Replicate()
        ),
        "or a PrepareModule style, got Other": Other(),
    }.items():
        model.tensor_parallel_plan = lambda style=style: {"blocks.0": style}
        _, problems = find_layers(model, config)
        assert said in problems[0]


def test_a_model_without_a_plan_is_told_how_to_write_one() -> None:
    _, problems = layers_of("auto")
    assert "SmallGpt has neither tensor_parallel_plan() nor a tp_plan" in problems[0]


def test_one_process_is_not_cut() -> None:
    from zerotrial.engine.tensor.model_sharding import divide

    model = SmallGpt()
    divided = divide(model, TensorParallelConfig(), Mesh(), torch.device("cpu"))
    assert divided.cuts == {}
