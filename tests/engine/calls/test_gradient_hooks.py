"""Hooks on gradients see the full gradient at every stage, as in plain torch."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerotrial
from tests.engine.ranks import run_on_ranks

SAMPLES, STEPS = 8, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.weight = self.inner.weight

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


class Model(nn.Module):
    """Model with a tied embedding, blocks that are separate units, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(0.8))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x) * self.scale
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def tokens(step: int) -> Tensor:
    return torch.randint(11, (SAMPLES, 4), generator=torch.Generator().manual_seed(step))


def mask_rows(gradient: Tensor) -> Tensor:
    assert gradient.shape == (11, 6)
    mask = torch.ones(11, 1, dtype=gradient.dtype)
    mask[:7] = 0
    return gradient * mask


def halve(parameter: Tensor) -> None:
    assert parameter.grad.shape == (6, 6)
    parameter.grad.mul_(0.5)


def register(model: nn.Module, seen: list[str]) -> list[Any]:
    return [
        model.embed.weight.register_hook(mask_rows),
        model.blocks[1].weight.register_hook(lambda g: g * 0),
        model.blocks[0].weight.register_post_accumulate_grad_hook(halve),
        model.blocks[2].weight.register_hook(lambda g: seen.append("before")),
        model.blocks[2].weight.register_hook(lambda g: 2 * g),
        model.scale.register_hook(lambda g: g * 3),
        model.scale.register_post_accumulate_grad_hook(lambda p: seen.append("after")),
    ]


def plain(when: str, accumulation: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    handles: list[Any] = []
    for step in range(STEPS):
        if step == (when == "later"):
            handles = register(model, [])
        if step == 2:
            for handle in handles:
                handle.remove()
        optimizer.zero_grad()
        for part in tokens(step).chunk(accumulation):
            # An engine's post-accumulate hook sees the gradient of one backward.
            before = {p: p.grad for p in model.parameters()}
            optimizer.zero_grad()
            (model(part) / accumulation).backward()
            for p, old in before.items():
                p.grad = p.grad if old is None else p.grad + old
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def train(stage: int, when: str, accumulation: int, **more: Any) -> dict[str, Tensor]:
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(0)
    model, seen = Model(), list[str]()
    handles = register(model, seen) if when == "before" else []
    engine = zerotrial.initialize(
        model=model,
        config={
            "train_batch_size": SAMPLES,
            "gradient_accumulation_steps": accumulation,
            "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
            "zero_optimization": {"stage": stage},
            **more,
        },
    )[0]
    for step in range(STEPS):
        if step == (when == "later") and when != "before":
            handles = register(engine.module, seen)
        if step == 2:
            assert seen.count("before") == seen.count("after") > 0
            seen.clear()
            for handle in handles:
                handle.remove()
        for index, part in enumerate(tokens(step).chunk(accumulation)):
            if index:
                engine.step()
            engine.backward(engine(part.chunk(ranks)[rank]))
        engine.step()
    assert not seen
    weights = {name: engine.full(name) for name, _ in engine.module.named_parameters()}
    again = engine.module.embed.weight.register_hook(lambda g: seen.append("again"))
    engine.close()
    model(tokens(0)).backward()
    assert seen == ["again"]
    again.remove()
    return weights


CASES = [("before", 1), ("before", 2), ("after", 2), ("later", 1)]


def every_case() -> dict[Any, dict[str, Tensor]]:
    return {(s, *case): train(s, *case) for s in (0, 1, 2, 3) for case in CASES}


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.soak)])
def test_gradient_hooks_change_full_gradients(ranks: int) -> None:
    results = run_on_ranks(every_case, ranks) if ranks > 1 else [every_case()]
    expected = {case: plain(*case) for case in CASES}
    for (stage, *case), weights in (item for result in results for item in result.items()):
        for name, value in expected[tuple(case)].items():
            gap = float((weights[name] - value).abs().max())
            assert gap < 1e-5, (stage, case, name, gap)


@pytest.mark.parametrize("stage", [0, 3])
def test_gradient_hooks_run_in_bf16(stage: int) -> None:
    train(stage, "before", 2, bf16={"enabled": True})


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_post_accumulate_hook_may_take_the_gradient(stage: int) -> None:
    """An optimizer in the backward sets ``p.grad`` to None; the engine then has none."""
    torch.manual_seed(0)
    model = Model()

    def take(parameter: Tensor) -> None:
        parameter.grad = None

    model.blocks[0].weight.register_post_accumulate_grad_hook(take)
    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_optimization": {"stage": stage},
    }
    engine = zerotrial.initialize(model=model, config=config)[0]
    engine.module.blocks[1].weight.register_post_accumulate_grad_hook(take)
    before = {name: engine.full(name) for name, _ in engine.module.named_parameters()}
    for _ in range(2):
        engine.backward(engine(tokens(0)[:1]))
        engine.step()
    for name, value in before.items():
        is_consumed = name in {"blocks.0.weight", "blocks.1.weight"}
        assert torch.equal(value, engine.full(name)) == is_consumed, name
    engine.close()
