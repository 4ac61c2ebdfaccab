"""A model with tied layers as a pipeline and as plain torch, its data, and its training."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import zerotrial
from zerotrial.extensions.pipeline import LayerSpec, PipelineModule, TiedLayerSpec

__all__ = ["CLIP", "batches", "build", "config_of", "engine_of", "layers", "loss_of", "reference"]

WORDS, WIDTH, LENGTH, BLOCKS = 11, 16, 5, 6
SAMPLES, MICRO, CLIP, LR = 16, 2, 0.5, 1e-2


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.mix(self.norm(x)))


class Plain(nn.Module):
    """The same model without anything of ours."""

    def __init__(self) -> None:
        super().__init__()
        names = {str(i + 1): Block(WIDTH) for i in range(BLOCKS)}
        self.layers = nn.ModuleDict({"0": nn.Embedding(WORDS, WIDTH), **names})

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.layers["0"](tokens)
        for index in range(BLOCKS):
            x = self.layers[str(index + 1)](x)
        weight = self.layers["0"].weight
        assert isinstance(weight, Tensor)
        return x @ weight.t()


def _logits(embedding: nn.Embedding, x: Tensor) -> Tensor:
    return x @ embedding.weight.t()


def layers() -> list[Any]:
    return [
        TiedLayerSpec("words", nn.Embedding, WORDS, WIDTH),
        *[LayerSpec(Block, WIDTH) for _ in range(BLOCKS)],
        TiedLayerSpec("words", nn.Embedding, WORDS, WIDTH, forward_fn=_logits),
    ]


def loss_of(output: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.float().reshape(-1, WORDS), labels.reshape(-1))


def build(stages: int, **options: Any) -> PipelineModule:
    torch.manual_seed(0)
    return PipelineModule(layers(), num_stages=stages, loss_fn=loss_of, **options)


def config_of(stage: int, schedule: str = "1f1b", **more: Any) -> dict[str, Any]:
    return {
        "train_batch_size": SAMPLES,
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.01}},
        "zero_optimization": {"stage": stage},
        "pipeline": {"schedule": schedule},
        **more,
    }


def engine_of(stages: int, stage: int, schedule: str = "1f1b", chunks: int = 1, **more: Any) -> Any:
    config = config_of(stage, schedule, **more)
    return zerotrial.initialize(model=build(stages, chunks=chunks), config=config)[0]


def full_batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    shape = (SAMPLES, LENGTH)
    tokens = torch.randint(0, WORDS, shape, generator=generator)
    return tokens, torch.randint(0, WORDS, shape, generator=generator)


def batches(step: int, engine: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """One batch's micro-batches of this rank's replica."""
    replicas, replica = engine.mesh.data.size, engine.mesh.data.rank
    tokens, labels = full_batch(step)
    size = engine.batch.micro
    for index in range(replica, SAMPLES // size, replicas):
        part = slice(index * size, (index + 1) * size)
        yield tokens[part], labels[part]


def reference(steps: int) -> tuple[list[float], list[float], dict[str, Tensor], float]:
    """Losses, norms (in fp64), weights and a loss of evaluation, of plain torch."""
    model = Plain()
    model.load_state_dict(build(1).state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    losses, norms = [], []
    for step in range(steps):
        tokens, labels = full_batch(step)
        total = 0.0
        for start in range(0, SAMPLES, MICRO):
            part = slice(start, start + MICRO)
            loss = loss_of(model(tokens[part]), labels[part]) * MICRO / SAMPLES
            loss.backward()
            total += float(loss.detach())
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = float(sum(g.double().square().sum() for g in gradients) ** 0.5)
        for gradient in gradients:
            gradient.mul_(min(1.0, CLIP / (norm + 1e-6)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        norms.append(norm)
    tokens, labels = full_batch(steps)
    with torch.no_grad():
        last = float(loss_of(model(tokens), labels))
    return losses, norms, {n: p.detach() for n, p in model.named_parameters()}, last
