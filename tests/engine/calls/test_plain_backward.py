"""``loss.backward()``, as in plain torch: engines take the gradients that come back to them."""

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.engine.flat.test_core_cases import closing, inputs, make, mlp
from tests.engine.ranks import run_on_ranks
from zerolab.errors import EngineError


class Told(nn.Module):
    """Returns a loss beside what it was made of, at several depths."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp(seed=1)

    def forward(self, x: Tensor) -> dict[str, Any]:
        logits = self.inner(x)
        return {"loss": logits.pow(2).mean(), "logits": logits, "more": (None, [logits * 3])}


def loss_of(found: dict[str, Any]) -> Tensor:
    return found["loss"] + found["logits"].abs().mean() + found["more"][1][0].mean()


def accumulated(stage: int) -> float:
    """Gap to plain torch, with two micro-batches a step."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    plain = Told()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    engine = make(Told(), stage, "SGD", 0.5, gradient_accumulation_steps=2)
    with closing(engine):
        for step in range(6):
            parts = inputs(step, ranks)
            for part in parts:
                (loss_of(plain(part)) / ranks / 2).backward()
            loss_of(engine(parts[rank])).backward()
            if engine.step().updated:
                optimizer.step()
                optimizer.zero_grad()
        assert engine.global_steps == 3
        return gap(engine, plain)


def adversaries(stage: int) -> float:
    """Gap to plain torch of two networks: one's loss comes through the other."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    nets = [nn.Linear(8, 8), mlp(seed=2)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    copies = [nn.Linear(8, 8), mlp(seed=2)]
    copies[0].load_state_dict(nets[0].state_dict())
    engines = [make(net, stage, "SGD", 0.1) for net in copies]

    def once(forger: Any, judge: Any, parts: list[Tensor], step: Any) -> None:
        judge.zero_grad()
        for part in parts:
            (judge(part).pow(2).mean() / len(parts)).backward()
            ((judge(forger(part).detach()) - 1).pow(2).mean() / len(parts)).backward()
        step(1)
        forger.zero_grad()
        for part in parts:
            asked = part.clone().requires_grad_()
            torch.autograd.grad(judge(asked).sum(), asked)  # writes no gradient, and counts as none
            (judge(forger(part)).mean() / len(parts)).backward()
        step(0)

    with closing(*engines):
        for number in range(3):
            parts = inputs(number, ranks)
            once(*nets, parts, lambda who: optimizers[who].step())
            once(*engines, [parts[rank]], lambda who: engines[who].step())
        return max(gap(engine, net) for engine, net in zip(engines, nets, strict=True))


def gap(engine: Any, plain: nn.Module) -> float:
    expected = dict(plain.named_parameters())
    return max((w - expected[name]).abs().max().item() for name, w in engine.stage.full_weights())


def at_every_stage() -> dict[str, float]:
    runs = {"accumulated": accumulated, "adversaries": adversaries}
    return {f"{name} at {stage}": run(stage) for name, run in runs.items() for stage in range(4)}


@pytest.mark.processes
def test_plain_backward_trains_as_plain_torch_at_every_stage() -> None:
    for found in run_on_ranks(at_every_stage, 2):
        assert {name for name, value in found.items() if not value < 1e-6} == set()


def test_a_plain_backward_that_would_lose_something_is_refused() -> None:
    halves = make(mlp(), 1, fp16={"enabled": True})
    with pytest.raises(
        EngineError, match="with fp16 the loss must be multiplied by the loss scale"
    ):
        halves(torch.ones(2, 8)).float().mean().backward()
    halves.backward(halves(torch.ones(2, 8)).float().mean())
    assert halves.step().grad_norm is not None
    engine = make(nn.Sequential(mlp(), _Unused()), 1)
    outputs = engine(torch.ones(2, 8))
    penalty = engine.module[1].weight.norm()  # made last, so autograd goes there first
    with pytest.raises(EngineError, match=r"came to a parameter before .* engine.backward\(loss\)"):
        (outputs.mean() + penalty).backward()
    engine.backward(engine(torch.ones(2, 8)).mean())
    engine.step()
    two = [make(mlp(), 1, gradient_accumulation_steps=2), make(nn.Linear(4, 4), 1)]
    with pytest.raises(EngineError, match="comes through two engines, and one of them"):
        two[1](two[0](torch.ones(2, 8))).mean().backward()
    for each in (halves, engine, *two):
        each.close()


class _Unused(nn.Linear):
    """Has a parameter that only the loss takes."""

    def __init__(self) -> None:
        super().__init__(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_another_engines_announced_loss_is_dropped_as_before() -> None:
    judge, forger = make(mlp(), 1), make(nn.Linear(8, 8), 1)
    for announced in (forger.backward, lambda loss: forger.scale(loss).backward()):
        announced(judge(forger(torch.ones(2, 8))).mean())
        assert forger.step().updated
        with pytest.raises(EngineError, match=r"step\(\) without backward\(\)"):
            judge.step()
    judge.close()
    forger.close()


def test_a_step_line_has_no_loss_where_none_was_told(caplog: pytest.LogCaptureFixture) -> None:
    engine = make(mlp(), 0, steps_per_print=2)
    with caplog.at_level(logging.INFO), closing(engine):
        for _ in range(4):
            engine(torch.ones(2, 8)).mean().backward()
            engine.step()
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 8)).mean())
            engine.step()
    lines = [r.getMessage() for r in caplog.records if "gradient norm" in r.getMessage()]
    assert ["loss " in line for line in lines] == [False, False, True], lines
