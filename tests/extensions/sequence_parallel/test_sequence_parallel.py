"""Tokens divided over ranks, against plain torch with whole samples in one process."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import zerotrial
from tests.engine.ranks import run_on_ranks
from zerolab.errors import ConfigError, EngineError
from zerotrial.extensions.sequence_parallel.attention import DistributedAttention

TOKENS, STEPS, TOLERANCE = 8, 3, 1e-5


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    inner = (x.transpose(1, 2) for x in (query, key, value))
    return functional.scaled_dot_product_attention(*inner, is_causal=True).transpose(1, 2)


class Small(nn.Module):
    """One block of attention, which gets this rank's tokens and their positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(16, 16), nn.Embedding(TOKENS, 16)
        self.norm = nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48, bias=False), nn.Linear(16, 16)
        self.head = nn.Linear(16, 16)
        self.attention = DistributedAttention(_attend)

    def forward(self, tokens: Tensor, targets: Tensor, places: Tensor) -> Tensor:
        x = self.embed(tokens) + self.places(places)
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3, 4, 4))
        x = x + self.out(self.attention(*qkv.unbind(2)).flatten(2))
        return functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def _small() -> nn.Module:
    torch.manual_seed(0)
    return Small()


def _library_model(**changes: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attn_implementation": "eager"}
    config = transformers.LlamaConfig(**{"vocab_size": 32, **sizes, **heads, **changes})
    return transformers.LlamaForCausalLM(config)


def _batch(step: int, replica: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + replica)
    return torch.randint(1, 16, (2, TOKENS + 1), generator=generator)


def _engine(model: nn.Module, stage: int, size: int = 2, **more: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage},
        "sequence_parallel_size": size,
    }
    return zerotrial.initialize(model=model, config=config, device="cpu", **more)[0]


def _loss(model: Any, batch: Tensor, rank: int, ranks: int) -> Any:
    """Loss of this rank's tokens for a small model, of the full batch for a library's."""
    if isinstance(getattr(model, "module", model), Small):
        part = slice(rank * TOKENS // ranks, (rank + 1) * TOKENS // ranks)
        places = torch.arange(TOKENS)[part]
        return model(batch[:, :-1][:, part], batch[:, 1:][:, part], places)
    labels, mask = batch[:, :TOKENS].clone(), torch.ones(2, TOKENS, dtype=torch.long)
    labels[1, TOKENS - 3 :], mask[1, TOKENS - 3 :] = -100, 0  # ranks have unequal numbers of labels
    return model(input_ids=batch[:, :TOKENS], attention_mask=mask, labels=labels).loss


def _train_engines(ranks: int, stages: Sequence[int]) -> dict[str, Any]:
    actual: dict[str, Any] = {}
    for kind, build in (("small", _small), ("library", _library_model)):
        for stage in stages:
            engine = _engine(build(), stage)
            axis = engine.mesh.sequence
            losses = []
            for step in range(STEPS):
                batch = _batch(step, engine.mesh.replica)
                loss = _loss(engine, batch, axis.rank, axis.size)
                engine.backward(loss)
                engine.step()
                total = loss.detach().clone()
                dist.all_reduce(total)
                losses.append(float(total) / ranks)
            weights = {name: weight.clone() for name, weight in engine.stage.full_weights()}
            sizes = engine.batch.train, engine.mesh.replicas
            actual[f"{kind} {stage}"] = losses, engine.get_global_grad_norm(), weights, sizes
            engine.close()
    actual["errors"] = _errors()
    return actual


def _errors() -> list[str]:
    messages = []

    def refused(model: Any, **more: Any) -> None:
        with pytest.raises(ConfigError) as caught:
            _engine(model, 1, **more)
        messages.extend(caught.value.problems)

    refused(nn.Linear(2, 2))
    refused(_library_model(num_attention_heads=1, num_key_value_heads=1))
    refused(_small(), mesh_param=(1, 4))
    refused(_small(), mpu=object())
    engine = _engine(_library_model(), 1, 1, mesh_param=[1, 2])
    assert engine.mesh.sequence.size == 2
    for batch in (
        {"input_ids": torch.ones(2, 7, dtype=torch.long)},
        {"input_ids": torch.ones(1, 2, dtype=torch.long), "attention_mask": torch.tensor([[0, 1]])},
        {"input_ids": torch.ones(1, 2, dtype=torch.long), "output_attentions": True},
    ):
        with pytest.raises(EngineError) as caught:
            engine(**batch)
        messages.append(str(caught.value))
    engine.close()
    engine = _engine(_library_model(), 1)
    with pytest.raises(EngineError, match="must read the same micro-batch"):
        engine(input_ids=torch.full((1, 2), dist.get_rank()))
    engine.close()
    plain = engine.module(input_ids=torch.ones(1, 3, dtype=torch.long))  # attends as before
    assert plain.logits.shape == (1, 3, 32)
    return messages


def _train_plainly(kind: str, replicas: int) -> tuple[list[float], float, dict[str, Tensor]]:
    model = _small() if kind == "small" else _library_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    losses, norm = [], 0.0
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = sum((_loss(model, _batch(step, r), 0, 1) for r in range(replicas)), torch.zeros(()))
        (loss / replicas).backward()
        losses.append(loss.item() / replicas)
        gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        norm = torch.cat(gradients).norm().item()
        optimizer.step()
    return losses, norm, {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("ranks", "stages"), [(2, range(4)), pytest.param(4, (3,), marks=pytest.mark.soak)]
)
def test_divided_tokens_train_like_whole_samples(ranks: int, stages: Sequence[int]) -> None:
    pytest.importorskip("transformers")
    actual, *others = run_on_ranks(_train_engines, ranks, ranks, stages)
    for kind in ("small", "library"):
        losses, norm, weights = _train_plainly(kind, ranks // 2)
        for stage in stages:
            got = actual[f"{kind} {stage}"]
            assert got[0] == pytest.approx(losses, rel=TOLERANCE), (kind, stage)
            assert got[1] == pytest.approx(norm, rel=TOLERANCE), (kind, stage)
            for name, weight in weights.items():
                torch.testing.assert_close(got[2][name], weight, rtol=0, atol=TOLERANCE)
            assert got[3] == (ranks, ranks // 2)
    assert all(other["errors"] == actual["errors"] for other in others)
    kinds, heads, mesh, mpu, length, mask, named = actual["errors"]
    assert kinds.startswith("must be 1, because Linear has no attention over divided tokens")
    assert heads == (
        "must divide the numbers of attention heads and of key-value heads, 1 and 1, got 2"
    )
    assert mesh == (
        "mesh_param: must be (data-parallel size, sequence-parallel size) with "
        "sequence_parallel_size 2, got (1, 4)"
    )
    assert mpu == "sequence_parallel_size: must be 1 with an mpu, got 2"
    assert "must divide the number of tokens, 7, got 2" in length
    assert "padding on the right" in mask
    assert "output_attentions" in named
