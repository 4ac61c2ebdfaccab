"""Models of a library, recomputed activations and killed runs, with cut matrices."""

import gc
import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import zerotrial
from tests.engine.ranks import run_on_ranks
from tests.engine.tensor_models import (
    CONFIG,
    PLANS,
    SmallGpt,
    Tutorial,
    loss_of,
    reference,
    tokens_of,
    train,
)
from zerolab.config.engine.parallel import TensorParallelConfig
from zerotrial.extensions.activation_storage import StoredTensor
from zerotrial.extensions.tensor_parallel.plan import find_layers
from zerotrial.extensions.tensor_parallel.plan_validation import undeclared_blocks

LIBRARY = importlib.util.find_spec("transformers") is not None
needs_library = pytest.mark.skipif(not LIBRARY, reason="the extra 'transformers' is not installed")


KINDS = ("Llama", "Qwen2", "Gemma2", "Phi3")
"""Grouped heads and a tied head; biases; norms on both sides; query, key, value in one matrix."""


class OfLibrary(torch.nn.Module):
    """Model that returns only logits."""

    def __init__(self, kind: str) -> None:
        import transformers

        super().__init__()
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=4,
            max_position_embeddings=16,
            pad_token_id=0,
            tie_word_embeddings=True,
            attn_implementation="eager",
        )
        self.causal = getattr(transformers, f"{kind}ForCausalLM")(config)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.causal(input_ids=tokens, use_cache=False).logits


def engine_of(model: torch.nn.Module, plan: Any, **more: Any) -> Any:
    config = {
        **CONFIG,
        "zero_optimization": {"stage": 1},
        "tensor_parallel": {"size": 2, "plan": plan},
        **more,
    }
    return zerotrial.initialize(model=model, config=config)[0]


def of_library(kind: str) -> Any:
    engine = engine_of(OfLibrary(kind), "auto")
    lines = train(engine, range(4))
    cut = sorted(engine.divided.cuts)
    engine.close()
    return lines, cut


class Halves(torch.nn.Module):
    """Blocks whose second one reads a part on each rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wte = torch.nn.Embedding(32, 16)
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(16, 32), torch.nn.Linear(32, 32)])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens)
        for block in self.blocks:
            x = block(x)
        return x


def kept_bytes(
    model: torch.nn.Module, plan: Any, *, divided: bool
) -> tuple[int, list[tuple[float, float]]]:
    """Return the memory kept between forward and backward, and the results of training."""
    options = {"enabled": True, "partition_activations": divided}
    engine = engine_of(model, plan, activation_checkpointing=options)
    loss = loss_of(engine, tokens_of(0)[:4])
    offloaded = [item for item in gc.get_objects() if isinstance(item, StoredTensor)]
    nbytes = sum(item.values.nbytes for item in offloaded)
    engine.backward(loss)
    engine.zero_grad()
    engine.drop_micro_batches()
    lines = train(engine, range(2))
    engine.close()
    return nbytes, lines


def of_torch(stage: int) -> list[tuple[float, float]]:
    engine = engine_of(Tutorial(), "auto", zero_optimization={"stage": stage})
    lines = train(engine, range(4))
    engine.close()
    return lines


def all_cases() -> Any:
    library = {kind: of_library(kind) for kind in KINDS if LIBRARY}
    replicated, sequence = PLANS["whole"], PLANS["sequence"]
    memory = {
        "not": kept_bytes(SmallGpt(blocks=2), replicated, divided=False),
        "divided": kept_bytes(SmallGpt(blocks=2), replicated, divided=True),
        "by tokens": kept_bytes(SmallGpt(blocks=2), sequence, divided=True),
        "halves": kept_bytes(
            Halves(), {"blocks.0": "colwise", "blocks.1": "rowwise"}, divided=True
        ),
    }
    stages = {stage: of_torch(stage) for stage in (0, 1, 3)}
    return library, memory, stages


@pytest.fixture(scope="module")
def rank_results() -> list[Any]:
    return run_on_ranks(all_cases, 2)


@needs_library
@pytest.mark.processes
@pytest.mark.parametrize("kind", KINDS)
def test_library_plan_matches_one_process(rank_results: list[Any], kind: str) -> None:
    expected, _ = reference(4, lambda: OfLibrary(kind))
    for library, *_ in rank_results:
        lines, cut = library[kind]
        for actual, target in zip(lines, expected, strict=True):
            assert actual == pytest.approx(target, abs=1e-5)
        # The embedding follows the head that it is tied to.
        assert "causal.model.embed_tokens.weight" in cut
        assert "causal.model.layers.0.mlp.down_proj.weight" in cut


@pytest.mark.processes
def test_partitioned_activations_halve_memory(
    rank_results: list[Any],
) -> None:
    samples, tokens, hidden, blocks = 4, 8, 16, 2
    expected, _ = reference(2, lambda: SmallGpt(blocks=2))
    half = samples * tokens * hidden * 4 // 2
    for _, results, _ in rank_results:
        nbytes, lines = results["divided"]
        assert nbytes == blocks * half
        assert lines == results["not"][1]
        for line, target in zip(lines, expected, strict=True):
            assert line == pytest.approx(target, abs=1e-5)


@pytest.mark.processes
def test_unequal_activations_are_not_partitioned(
    rank_results: list[Any],
) -> None:
    samples, tokens, hidden = 4, 8, 16
    expected, _ = reference(2, lambda: SmallGpt(blocks=2))
    halves, _ = reference(2, Halves)
    for _, results, _ in rank_results:
        assert results["by tokens"][0] == 0
        assert results["halves"][0] == samples * tokens * hidden * 4 // 2  # the first block's input
        for name, target in (("by tokens", expected), ("halves", halves)):
            for line, same in zip(results[name][1], target, strict=True):
                assert line == pytest.approx(same, abs=1e-5)


@pytest.mark.processes
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_torch_tutorial_plan_matches_one_process(rank_results: list[Any], stage: int) -> None:
    expected, _ = reference(4, Tutorial)
    for *_, stages in rank_results:
        for actual, target in zip(stages[stage], expected, strict=True):
            assert actual == pytest.approx(target, abs=1e-5)


@needs_library
@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "Mistral", "Gemma2", "Phi3", "GPTNeoX"])
def test_plans_of_common_models(kind: str) -> None:
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        pad_token_id=0,
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    layers, problems = find_layers(model, TensorParallelConfig(size=2))
    assert problems == []
    assert {layer.plan.style for layer in layers} >= {"colwise", "rowwise"}


@needs_library
def test_gpt2_fused_qkv_is_warned_about() -> None:
    import transformers

    config = transformers.GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=4)
    model = transformers.GPT2LMHeadModel(config)
    plan = {"transformer.h.*.attn.c_attn": "colwise", "transformer.h.*.mlp.c_fc": "colwise"}
    settings = TensorParallelConfig.model_validate({"size": 2, "plan": plan})
    (line,) = undeclared_blocks(find_layers(model, settings)[0])
    assert "transformer.h.0.attn.c_attn and 1 more: three times as many outputs" in line


def killed(directory: str, kill: int | None) -> Any:
    """Save after every step; end without a word in the middle of one."""
    engine = engine_of(SmallGpt(), PLANS["sequence"])
    if Path(directory, "latest").exists():
        engine.load_checkpoint(directory)
    lines = []
    for step in range(engine.global_steps, 4):
        if step == kill:
            try:
                loss_of(engine, tokens_of(step)[:4])
            finally:  # a rank that exits first closes the connections of the others
                os._exit(9)
        lines += train(engine, range(step, step + 1))
        engine.save_checkpoint(directory)
    engine.close()
    return lines


@pytest.mark.processes
def test_killed_run_resumes_equally(tmp_path: Path) -> None:
    assert run_on_ranks(killed, 2, str(tmp_path), 2, expect_deaths=True) == [None, None]
    expected, _ = reference(4)
    for lines in run_on_ranks(killed, 2, str(tmp_path), None):
        assert len(lines) == 2
        for actual, target in zip(lines, expected[2:], strict=True):
            assert actual == pytest.approx(target, abs=1e-5)
