"""Small GPT with tied embeddings, its tensor-parallel plans and a plain training loop."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, parallel
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.nn import functional

__all__ = ["CONFIG", "PLANS", "SmallGpt", "Tutorial", "loss_of", "reference", "tokens_of", "train"]

VOCABULARY, HIDDEN, HEAD, TOKENS = 32, 16, 4, 8
SAMPLES, ACCUMULATION, CLIP, LR = 16, 4, 0.3, 1e-2

CONFIG: dict[str, Any] = {
    "train_batch_size": SAMPLES,
    "gradient_accumulation_steps": ACCUMULATION,
    "gradient_clipping": CLIP,
    "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.01}},
}

_WHOLE: dict[str, Any] = {
    "blocks.*.qkv": {"style": "colwise", "blocks": 3},
    "blocks.*.proj": "rowwise",
    "blocks.*.up": "ColwiseParallel",
    "blocks.*.down": "RowwiseParallel",
    "head": "colwise_gather_output",
}
_SEQUENCE: dict[str, Any] = {
    "wte": {"style": "rowwise", "output": "sequence"},
    "wpe": {"style": "replicate", "output": "sequence"},
    "blocks.*.norm?": "SequenceParallel",
    "blocks.*.qkv": {"style": "colwise", "blocks": 3, "input": "sequence"},
    "blocks.*.proj": {"style": "rowwise", "output": "sequence"},
    "blocks.*.up": {"style": "colwise", "input": "sequence"},
    "blocks.*.down": {"style": "rowwise", "output": "sequence"},
    "norm": "sequence",
    "head": {"style": "colwise", "input": "sequence", "output": "replicate"},
}
PLANS = {"whole": _WHOLE, "sequence": _SEQUENCE}
"""With activations that are whole between layers, and cut along the tokens there."""


class Block(nn.Module):
    """Query, key and value in one matrix; as many heads as the matrix has columns for."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.proj = nn.Linear(HIDDEN, HIDDEN)
        self.norm2 = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in parts)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class SmallGpt(nn.Module):
    """One block, or more; the head is the embedding."""

    def __init__(self, seed: int = 0, blocks: int = 1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.wte = nn.Embedding(VOCABULARY, HIDDEN)
        self.wpe = nn.Embedding(TOKENS, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1]).expand_as(tokens)
        hidden = self.wte(tokens) + self.wpe(places)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


class Attention(nn.Module):
    """With rotated places, as many heads as the matrices have columns for."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (
            nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        q, k, v = (
            w(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        q, k = (heads * places.cos() + heads.flip(-1) * places.sin() for heads in (q, k))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed: Tensor = self.wo(attended.transpose(1, 2).flatten(2))
        return mixed


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(HIDDEN, 2 * HIDDEN, bias=False) for _ in range(2))
        self.w2 = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(functional.silu(self.w1(x)) * self.w3(x))
        return out


class TutorialBlock(nn.Module):
    def __init__(self, *, by_name: bool) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.by_name = by_name

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        if self.by_name:
            x = x + self.attention(x=normed, places=places)
        else:
            x = x + self.attention(normed, places)
        return x + self.feed_forward(self.ffn_norm(x))


class Tutorial(nn.Module):
    """A small Llama under the plan of torch's tutorial; the second block passes it by position."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tok_embeddings = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(TutorialBlock(by_name=by_name) for by_name in (False, True))
        self.norm = nn.RMSNorm(HIDDEN)
        self.output = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tok_embeddings(tokens)
        places = torch.arange(tokens.shape[1]).unsqueeze(-1) / torch.arange(1, HEAD + 1)
        for layer in self.layers:
            hidden = layer(hidden, places)
        logits: Tensor = self.output(self.norm(hidden))
        return logits

    def tensor_parallel_plan(self) -> dict[str, Any]:
        tokens, replicated = Shard(1), Replicate()
        gather = PrepareModuleInput(input_layouts=tokens, desired_input_layouts=replicated)
        both_sides: dict[str, Any] = {
            "layers.1.feed_forward": gather,
            "layers.1.feed_forward.w2": RowwiseParallel(output_layouts=tokens),
        }
        if hasattr(parallel, "PrepareModuleInputOutput"):  # torch 2.8
            both_sides = {
                "layers.1.feed_forward": parallel.PrepareModuleInputOutput(
                    input_layouts=tokens,
                    desired_input_layouts=replicated,
                    output_layouts=replicated,
                    desired_output_layouts=tokens,
                ),
                "layers.1.feed_forward.w2": RowwiseParallel(),
            }
        return {
            "tok_embeddings": RowwiseParallel(input_layouts=replicated, output_layouts=tokens),
            "layers.*.attention_norm": SequenceParallel(),
            "layers.0.attention": PrepareModuleInput(
                input_layouts=(tokens, None), desired_input_layouts=(replicated, None)
            ),
            "layers.1.attention": PrepareModuleInput(
                input_kwarg_layouts={"x": tokens}, desired_input_kwarg_layouts={"x": replicated}
            ),
            "layers.*.attention.w[qkv]": ColwiseParallel(use_local_output=False),
            "layers.*.attention.wo": RowwiseParallel(output_layouts=tokens),
            "layers.*.ffn_norm": SequenceParallel(),
            "layers.0.feed_forward": gather,
            "layers.*.feed_forward.w[13]": ColwiseParallel(),
            "layers.0.feed_forward.w2": RowwiseParallel(output_layouts=tokens),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(input_layouts=tokens, output_layouts=replicated),
            **both_sides,
        }


def tokens_of(step: int) -> Tensor:
    """Return the full batch of one step."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, VOCABULARY, (SAMPLES, TOKENS + 1), generator=generator)


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1])
    return functional.cross_entropy(logits.reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))


def train(engine: Any, steps: range) -> list[tuple[float, float]]:
    """Return the loss of the full batch and the gradient norm of each step."""
    data = engine.mesh.data
    losses = []
    for step in steps:
        total = torch.zeros(())
        for micro in tokens_of(step).chunk(ACCUMULATION):
            loss = loss_of(engine, micro.chunk(data.size)[data.rank])
            engine.backward(loss)
            result = engine.step()
            total += loss.detach() / ACCUMULATION / data.size
        if data.group is not None:
            dist.all_reduce(total, group=data.group)
        losses.append((float(total), result.grad_norm))
    return losses


def reference(
    steps: int, make: Callable[[], nn.Module] = SmallGpt
) -> tuple[list[tuple[float, float]], nn.Module]:
    """Train in one process with plain torch on full batches, with an fp64 norm."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, tokens_of(step))
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = float(sum(g.double().square().sum() for g in gradients) ** 0.5)
        for gradient in gradients:
            gradient.mul_(min(1.0, CLIP / (norm + 1e-6)))
        optimizer.step()
        losses.append((float(loss.detach()), norm))
    return losses, model
