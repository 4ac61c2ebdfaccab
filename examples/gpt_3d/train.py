"""A small GPT on pipeline stages x replicas x cut matrices, from its latest checkpoint on.

Each optimizer step takes the same text, so that the losses are the same on every layout, and a
checkpoint of one resumes in any other.
"""

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import zerotrial
from zerotrial.engine.pipeline import LayerSpec, PipelineModule

HIDDEN, HEAD, LENGTH, BLOCKS, VOCABULARY = 64, 16, 32, 4, 128
SAMPLES, MICRO = 16, 2

PLAN = {
    "layers.*.qkv": {"style": "colwise", "blocks": 3},
    "layers.*.proj": "rowwise",
    "layers.*.up": "colwise",
    "layers.*.down": "rowwise",
    "layers.*.logits": {"style": "colwise", "output": "replicate"},
}
"""How the matrices are cut: see docs/concepts/tensor_parallel.md."""


class Embedding(nn.Module):
    """Characters and their places."""

    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(VOCABULARY, HIDDEN)
        self.places = nn.Embedding(LENGTH, HIDDEN)

    def forward(self, text: Tensor) -> Tensor:
        """(B, T) -> (B, T, H)."""
        places = torch.arange(text.shape[1], device=text.device).expand_as(text)
        hidden: Tensor = self.characters(text) + self.places(places)
        return hidden


class Block(nn.Module):
    """Attention with as many heads as this rank has, and a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.proj = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, H) -> (B, T, H)."""
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in parts)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return out


class Head(nn.Module):
    """What comes next."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.logits = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, H) -> (B, T, V)."""
        logits: Tensor = self.logits(self.norm(x))
        return logits


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over all characters."""
    return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def batch_of(step: int, text: Tensor, engine: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this replica's micro-batches of one step; the step's number alone says which text."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(0, len(text) - LENGTH - 1, (SAMPLES,), generator=generator)
    rows = torch.stack([text[at : at + LENGTH + 1] for at in starts.tolist()])
    replicas, replica = engine.mesh.data.size, engine.mesh.data.rank
    for micro in rows.split(MICRO)[replica::replicas]:
        yield micro[:, :-1], micro[:, 1:]


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0, help="set by a launcher")
    parser.add_argument("--pipe", type=int, default=1, help="pipeline stages")
    parser.add_argument("--tensor", type=int, default=1, help="ranks that each matrix is cut over")
    parser.add_argument("--stage", type=int, default=1, help="of ZeRO, over the replicas")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"))
    args = parser.parse_args()

    torch.manual_seed(0)
    layers = [LayerSpec(Embedding), *[LayerSpec(Block)] * BLOCKS, LayerSpec(Head)]
    model = PipelineModule(layers, num_stages=args.pipe, loss_fn=loss_of)
    config: dict[str, Any] = {
        "train_batch_size": SAMPLES,
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
        "zero_optimization": {"stage": args.stage},
    }
    if args.tensor > 1:
        config["tensor_parallel"] = {"size": args.tensor, "plan": PLAN}
    engine, *_ = zerotrial.initialize(model=model, config=config)
    chief = int(os.environ.get("RANK", "0")) == 0
    if (args.checkpoints / "latest").is_file():
        engine.load_checkpoint(args.checkpoints)
    text = torch.tensor(list(Path(__file__).read_bytes()), dtype=torch.long) % VOCABULARY
    while engine.global_steps < args.steps:
        loss = engine.train_batch(batch_of(engine.global_steps, text, engine))
        if chief:
            print(f"step {engine.global_steps}: loss {float(loss):.4f}", flush=True)
    engine.save_checkpoint(args.checkpoints)
    engine.close()


if __name__ == "__main__":
    main()
