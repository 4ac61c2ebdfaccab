"""Experts divided over ranks: the same losses and weights as plain torch in one process."""

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional

import zerotrial
from tests.engine.ranks import run_on_ranks
from tests.engine.tensor_models import CONFIG, SAMPLES, TOKENS, reference, train
from zerolab.errors import ConfigError, EngineError
from zerotrial.extensions.tensor_parallel.plan import find_layers

LIBRARY = importlib.util.find_spec("transformers") is not None
needs_library = pytest.mark.skipif(not LIBRARY, reason="the extra 'transformers' is not installed")

STAGES = (0, 1, 2, 3)
KINDS: dict[str, dict[str, Any]] = {
    "Mixtral": {"experts_implementation": "eager"},
    "Qwen3Moe": {"experts_implementation": "grouped_mm", "moe_intermediate_size": 8},
    "GptOss": {"experts_implementation": "batched_mm", "rope_parameters": {"rope_type": "default"}},
    "DeepseekV3": {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
}
"""The three implementations of a forward; norms of heads; biases and transposed matrices; a dense
layer, shared experts and attention that is not divided."""

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 16,
    "num_experts_per_tok": 2,
}
LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


class OfLibrary(nn.Module):
    """Model that returns only logits."""

    def __init__(self, kind: str, **changes: Any) -> None:
        import transformers

        super().__init__()
        torch.manual_seed(0)
        heads = {"head_dim": 4} if kind != "DeepseekV3" else dict.fromkeys(LATENT, 4)
        count = {"DeepseekV3": "n_routed_experts", "Qwen3Moe": "num_experts"}
        options = {**SIZES, **heads, count.get(kind, "num_local_experts"): 4, **KINDS[kind]}
        config = getattr(transformers, f"{kind}Config")(**{**options, **changes})
        self.causal = getattr(transformers, f"{kind}ForCausalLM")(config)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.causal(input_ids=tokens, use_cache=False).logits
        return logits


class Experts(nn.Module):
    """Four experts, each with one matrix."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.num_experts = count
        self.weight = nn.Parameter(torch.randn(count, 16, 16) / 4)

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        rows = torch.einsum("nh,nkgh->nkg", hidden, self.weight[index])
        return (rows * weights.unsqueeze(-1)).sum(1)


class Mixture(nn.Module):
    """Two of four experts for every token."""

    def __init__(self, experts: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wte, self.gate = nn.Embedding(32, 16), nn.Linear(16, 4)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 32)
        self.experts = experts or Experts()

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.wte(tokens)
        rows = hidden.flatten(0, 1)
        weights, index = self.route(functional.softmax(self.gate(rows), -1))
        mixed = self.experts(rows, index, weights=weights)
        logits: Tensor = self.head(self.norm(hidden + mixed.view_as(hidden)))
        return logits

    def route(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        weights, index = scores.topk(2, dim=-1)
        return weights, index

    def tensor_parallel_plan(self) -> Mapping[str, str]:
        return {"experts": "experts"}


class Lopsided(Mixture):
    """Every token goes to the experts of the first rank."""

    def route(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        return scores[:, :2], torch.arange(2).expand(len(scores), 2)


class EveryWeight(Mixture):
    """Passes a weight for each expert, as gpt-oss did in early versions."""

    def route(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        return scores, scores.topk(2, dim=-1).indices


def engine_of(model: nn.Module, stage: int, **more: Any) -> Any:
    config = {
        **CONFIG,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 700},
        "tensor_parallel": {"size": 2},
        **more,
    }
    return zerotrial.initialize(model=model, config=config)[0]


def hand_on(directory: str) -> list[tuple[float, float]]:
    """Train a step at each stage, which resumes from the checkpoint of the one before it."""
    lines = []
    for stage in STAGES:
        recomputed = {"activation_checkpointing": {"enabled": True}} if stage == 2 else {}
        engine = engine_of(Mixture(), stage, **recomputed)
        if stage:
            engine.load_checkpoint(directory)
        lines += train(engine, range(stage, stage + 1))
        engine.save_checkpoint(directory)
        assert engine.full("experts.weight", "exp_avg").shape == (4, 16, 16)
        if stage == STAGES[-1]:
            engine.export(f"{directory}/weights.safetensors")
        engine.close()
        assert engine.module.experts.num_experts == 4
    return lines


def train_kind(kind: str) -> Any:
    engine = engine_of(OfLibrary(kind), STAGES[list(KINDS).index(kind)])
    cuts = engine.divided.cuts.items()
    parts = {name: cut.part_shape for name, cut in cuts if ".mlp.experts." in name}
    lines = train(engine, range(2))
    engine.close()
    return lines, parts


def train_lopsided() -> Any:
    engine = engine_of(Lopsided(), 1)
    lines = train(engine, range(3))
    traffic = engine.divided.ranks.traffic.elements["all_reduce"]
    engine.close()
    return lines, traffic


class WithNorm(Experts):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)


def raise_errors() -> dict[str, str]:
    errors = {}
    planned = {
        "experts": "experts",
        "wte": {"style": "replicate", "output": "sequence"},
    }
    cases: dict[str, tuple[Callable[[], nn.Module], Any]] = {
        "count": (lambda: Mixture(Experts(3)), "auto"),
        "kind": (lambda: Mixture(nn.Linear(16, 16)), "auto"),
        "part": (lambda: Mixture(WithNorm()), "auto"),
        "tokens": (Mixture, planned),
        "split": (Mixture, {"experts": {"style": "experts", "output": "split"}}),
    }
    for what, (make, plan) in cases.items():
        with pytest.raises(ConfigError) as caught:
            engine_of(make(), 1, tensor_parallel={"size": 2, "plan": plan})
        (errors[what],) = caught.value.problems
    engine = engine_of(EveryWeight(), 0)
    with pytest.raises(EngineError) as refused:
        engine(torch.zeros(1, 4, dtype=torch.long))
    engine.close()
    errors["weights"] = str(refused.value)
    return errors


def all_cases(directory: str) -> Any:
    return hand_on(directory), train_lopsided(), raise_errors()


def all_kinds() -> Any:
    return {kind: train_kind(kind) for kind in KINDS}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def rank_results(directory: Path) -> list[Any]:
    return run_on_ranks(all_cases, 4, str(directory))


@pytest.fixture(scope="module")
def library_results() -> list[Any]:
    return run_on_ranks(all_kinds, 2)


def assert_equal(lines: Any, expected: Any) -> None:
    assert len(lines) == len(expected)
    for actual, target in zip(lines, expected, strict=True):
        assert actual == pytest.approx(target, abs=1e-5)


@pytest.mark.processes
def test_experts_resume_at_each_stage(rank_results: list[Any], directory: Path) -> None:
    expected, model = reference(len(STAGES), Mixture)
    for lines, *_ in rank_results:
        assert_equal(lines, expected)
    exported = safetensors.torch.load_file(directory / "weights.safetensors")
    assert exported.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(exported[name], value, rtol=1e-4, atol=1e-4)
    single = engine_of(Mixture(), 0, tensor_parallel={"size": 1})
    single.load_checkpoint(directory)
    for name, value in single.module.named_parameters():
        assert torch.equal(value, exported[name])
    single.close()


@needs_library
@pytest.mark.processes
@pytest.mark.parametrize("kind", KINDS)
def test_experts_of_library_match_one_process(library_results: list[Any], kind: str) -> None:
    expected, _ = reference(2, lambda: OfLibrary(kind))
    for results in library_results:
        lines, parts = results[kind]
        assert_equal(lines, expected)
        assert {name.rpartition(".")[2] for name in parts} >= {"gate_up_proj", "down_proj"}
        assert all(shape[0] == 2 for shape in parts.values())


@pytest.mark.processes
def test_rank_without_rows_matches_one_process(rank_results: list[Any]) -> None:
    expected, _ = reference(3, Lopsided)
    rows = SAMPLES // 2 * TOKENS  # of one replica
    for _, (lines, traffic), _ in rank_results:
        assert_equal(lines, expected)
        # The output in forward, tokens and weights in backward; a ring sends each element twice.
        assert traffic == 3 * 2 * rows * (16 + 16 + 2)


@pytest.mark.processes
def test_indivisible_experts_are_errors(rank_results: list[Any]) -> None:
    *_, errors = rank_results[0]
    assert all(result[-1] == errors for result in rank_results)
    assert errors["count"] == (
        "experts: tensor_parallel.size must divide the number of experts, 3, got 2"
    )
    assert "must be one module with num_experts, forward(hidden" in errors["kind"]
    assert errors["part"].startswith("experts.norm: must have a plan")
    assert errors["tokens"].startswith("experts: experts must get all tokens")
    assert errors["split"] == "experts: output: must be replicate with style experts, got split"
    assert "(tokens, k), got [(4, 16), (4, 2), (4, 4)]" in errors["weights"]


@needs_library
def test_plan_with_unknown_expert_style_is_an_error() -> None:
    import transformers

    from zerolab.config.engine.parallel import TensorParallelConfig

    model = OfLibrary("Mixtral").causal
    assert isinstance(model, transformers.MixtralForCausalLM)
    model.model._tp_plan = {"layers.*.mlp": "moe_identity_expert"}
    _, problems = find_layers(model, TensorParallelConfig(size=2))
    (problem,) = problems
    assert problem == (
        "the model's tp_plan: model.layers.*.mlp: the style 'moe_identity_expert' is not "
        "supported; set tensor_parallel.plan to the layers to divide"
    )
