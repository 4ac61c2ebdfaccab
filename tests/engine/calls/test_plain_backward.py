"""``loss.backward()`` as in plain torch: engines collect gradients by hooks."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.engine.flat.test_core_cases import closing, inputs, make, mlp
from tests.engine.ranks import run_on_ranks
from tests.engine.test_recovery import Fails
from zerolab.errors import EngineError


class Stateful(nn.Module):
    """Model that returns a loss, its parts at several depths, and a state for the next forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.back = mlp(seed=1), nn.Linear(4, 8)

    def forward(self, x: Tensor) -> dict[str, Any]:
        logits = self.inner(x)
        loss, more = logits.pow(2).mean(), (None, [logits * 3])
        return {"loss": loss, "logits": logits, "more": more, "state": self.back(logits)}


def loss_of(model: Any, x: Tensor) -> Tensor:
    outputs = model(model(x)["state"])  # gradients leave the model and re-enter it
    penalty = model.back.weight.norm()  # created after the outputs: autograd visits it first
    return outputs["loss"] + outputs["logits"].abs().mean() + outputs["more"][1][0].mean() + penalty


def accumulated(stage: int) -> float:
    """Gap to plain torch, with two micro-batches a step."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    plain = Stateful()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    engine = make(Stateful(), stage, "SGD", 0.5, gradient_accumulation_steps=2)
    with closing(engine):
        for step in range(6):
            parts = inputs(step, ranks)
            for part in parts:
                (loss_of(plain, part) / ranks / 2).backward()
            loss_of(engine, parts[rank]).backward()
            if engine.step().updated:
                optimizer.step()
                optimizer.zero_grad()
        assert engine.global_steps == 3
        return gap(engine, plain)


def adversaries(stage: int) -> float:
    """Return the gap to plain torch of two networks, one in the other's loss."""
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
            inputs = part.clone().requires_grad_()
            torch.autograd.grad(
                judge(inputs).sum(), inputs
            )  # writes no gradient, and counts as none
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


def chained(stage: int) -> float:
    """Return the difference from plain torch of two networks in turn, with separate windows."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    nets, copies = ([nn.Linear(8, 8), mlp(seed=2)] for _ in range(2))
    nets[0].load_state_dict(copies[0].state_dict())
    engines = [
        make(net, stage, lr=0.1, gradient_accumulation_steps=steps)
        for net, steps in zip(copies, (2, 1), strict=True)
    ]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    with closing(*engines):
        for number in range(2):
            parts = inputs(number, ranks)
            for part in parts:
                (nets[1](nets[0](part)).pow(2).mean() / ranks).backward()
            engines[1](engines[0](parts[rank])).pow(2).mean().backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
            for engine in engines:
                engine.step()
        for parameter in nets[0].parameters():
            parameter.grad /= 2
        optimizers[0].step()
        return max(gap(engine, net) for engine, net in zip(engines, nets, strict=True))


class Opaque(nn.Module):
    """Model that returns an opaque object; all of it may be computed again in backward."""

    def __init__(self, *, again: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Identity() if again else nn.Linear(8, 8)
        self.again = again

    def forward(self, x: Tensor) -> SimpleNamespace:
        x = x.clone().requires_grad_()
        for block in self.blocks:
            x = (checkpoint(block, x, use_reentrant=True) if self.again else block(x)).tanh()
        return SimpleNamespace(found=self.head(x))


def unseen(stage: int) -> float:
    """Return the gap to plain torch with hidden outputs, after a failed and repeated backward."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    gaps = []
    for again in (False, True):
        plain, engine = Opaque(again=again), make(Opaque(again=again), stage)
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        fails: Any = Fails.apply
        with closing(engine):
            for step in range(2):
                parts = inputs(step, ranks)
                for part in parts:
                    (plain(plain(part).found).found.pow(2).mean() / ranks).backward()
                optimizer.step()
                optimizer.zero_grad()
                inner = engine(parts[rank]).found
                loss = engine(inner).found.pow(2).mean()
                if not again:
                    with pytest.raises(ValueError, match="in backward"):
                        engine.scale(fails(loss, True)).backward(retain_graph=True)
                    engine.zero_grad()
                loss.backward()
                assert engine.step().updated
            gaps.append(gap(engine, plain))
    return max(gaps)


def at_every_stage() -> dict[str, float]:
    runs = {f.__name__: f for f in (accumulated, adversaries, chained, unseen)}
    return {f"{name} at {stage}": run(stage) for name, run in runs.items() for stage in range(4)}


@pytest.mark.processes
def test_plain_backward_matches_plain_torch() -> None:
    for differences in run_on_ranks(at_every_stage, 2):
        assert {name for name, value in differences.items() if not value < 1e-6} == set()


@pytest.mark.parametrize("stage", [1, 3])
def test_plain_backward_with_fp16_is_refused(stage: int) -> None:
    halves = make(Opaque(), stage, fp16={"enabled": True, "initial_scale_power": 4})
    norms = []
    for refused in (False, True):
        if refused:
            with pytest.raises(EngineError, match="with fp16 the loss must be multiplied"):
                halves(torch.ones(2, 8)).found.float().mean().backward()
        halves.backward(halves(torch.ones(2, 8)).found.float().mean())
        halves.optimizer.param_groups[0]["lr"] = 0.0
        norms.append(halves.step().grad_norm)
    assert norms[0] == norms[1]
    halves.close()


def test_loss_of_another_engine_is_dropped() -> None:
    judge, forger = make(mlp(), 1), make(nn.Linear(8, 8), 1)
    for announced in (forger.backward, lambda loss: forger.scale(loss).backward()):
        announced(judge(forger(torch.ones(2, 8))).mean())
        assert forger.step().updated
        with pytest.raises(EngineError, match=r"step\(\) without backward\(\)"):
            judge.step()
    judge.close()
    forger.close()


def test_progress_line_without_loss(caplog: pytest.LogCaptureFixture) -> None:
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
