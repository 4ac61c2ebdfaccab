"""``p.grad`` between ``backward`` and ``step``, against plain torch in one process."""

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import zerotrial
from tests.engine.ranks import RankError, run_on_ranks
from zerolab.errors import EngineError
from zerotrial.engine import Engine

SAMPLES, STEPS = 8, 4


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 9), nn.Linear(9, 3)
        self.scale = nn.Parameter(torch.tensor(1.2))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.second(torch.tanh(self.first(x))) * self.scale * self.frozen).square().mean()


def clip_norm(model: Any) -> Any:
    return float(clip_grad_norm_(model.parameters(), 0.01))


def clip_value(model: Any) -> Any:
    clip_grad_value_(model.parameters(), 0.003)
    return 0.0


def multiply(model: Any) -> Any:
    model.second.weight.grad.mul_(0.5)
    return model.second.weight.grad.norm().item()


def replace(model: Any) -> Any:
    model.first.weight.grad = torch.full_like(model.first.weight, 0.25)
    model.scale.grad = model.scale.grad * 2
    return model.first.weight.grad.sum().item()


def zero(model: Any) -> Any:
    model.first.weight.grad.zero_()
    return 0.0


def drop(model: Any) -> Any:
    model.first.weight.grad = None
    del model.scale.grad
    return model.first.weight.grad is None and model.frozen.grad is None


def drop_all(model: Any) -> Any:
    model.zero_grad()
    return 0.0


def twice(model: Any) -> Any:
    clip_norm(model)
    model.first.bias.grad.add_(0.5)
    return clip_norm(model)


EDITS: dict[str, Callable[[Any], Any]] = {
    edit.__name__: edit
    for edit in (clip_norm, clip_value, multiply, replace, zero, drop, drop_all, twice)
}


def inputs(step: int) -> Tensor:
    return torch.randn(SAMPLES, 5, generator=torch.Generator().manual_seed(step))


def plain(edit: str, accumulation: int) -> tuple[list[Any], dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    rank_results = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in inputs(step).chunk(accumulation):
            (model(part) / accumulation).backward()
        rank_results.append(EDITS[edit](model) if step != 1 else 0.0)
        optimizer.step()
    return rank_results, {name: p.detach() for name, p in model.named_parameters()}


def make_engine(stage: int, accumulation: int = 1, **more: Any) -> Engine:
    torch.manual_seed(0)
    return zerotrial.initialize(
        model=Model(),
        config={
            "train_batch_size": SAMPLES,
            "gradient_accumulation_steps": accumulation,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.1}},
            "zero_optimization": {"stage": stage, "reduce_bucket_size": 40},
            **more,
        },
    )[0]


def train(engine: Engine, edit: str, accumulation: int) -> list[Any]:
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    rank_results = []
    for step in range(STEPS):
        for part in inputs(step).chunk(accumulation):
            engine.backward(engine(part.chunk(ranks)[rank]))
            if (
                part is not inputs(step).chunk(accumulation)[-1]
                and not engine.is_gradient_accumulation_boundary()
            ):
                engine.step()
        rank_results.append(EDITS[edit](engine.module) if step != 1 else 0.0)
        assert engine.step().updated
        assert engine.module.first.weight.grad is None
    return rank_results


def every_edit() -> dict[Any, Any]:
    results = {}
    for stage in (0, 1, 2):
        for edit in EDITS:
            accumulation = 2 if edit in {"twice", "multiply", "drop"} else 1
            engine = make_engine(stage, accumulation)
            rank_results = train(engine, edit, accumulation)
            weights = {name: engine.full(name) for name, _ in engine.module.named_parameters()}
            results[stage, edit, accumulation] = rank_results, weights
            engine.close()
    return results


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.soak)])
def test_edited_gradients_count_as_in_plain_torch(ranks: int) -> None:
    rank_results = run_on_ranks(every_edit, ranks) if ranks > 1 else [every_edit()]
    for (stage, edit, accumulation), (gradients, weights) in (
        i for a in rank_results for i in a.items()
    ):
        expected_told, expected = plain(edit, accumulation)
        assert gradients == pytest.approx(expected_told, rel=1e-4), (stage, edit)
        for name, value in expected.items():
            gap = float((weights[name] - value).abs().max())
            assert gap < 2e-5, (stage, edit, name, gap)


def other_calls(stage: int) -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    engine = make_engine(stage)
    x = inputs(rank)[:2]
    # An edit, then a full gradient, another backward, and a checkpoint's view of it.
    engine.backward(engine(x))
    before = engine.weights.full("first.weight", "gradient")
    engine.module.first.weight.grad.mul_(3)
    edited = engine.weights.full("first.weight", "gradient")
    torch.testing.assert_close(edited, before * 3)
    torch.testing.assert_close(engine.module.first.weight.grad, before * 3)
    engine.module.first.weight.grad.mul_(2)
    engine.backward(engine(x))
    torch.testing.assert_close(engine.module.first.weight.grad, before * 7)
    engine.weights.set_full("first.weight", before, "gradient")
    torch.testing.assert_close(engine.module.first.weight.grad, before)
    engine.zero_grad()
    assert engine.module.first.weight.grad is None
    engine.backward(engine(x))
    copied = copy.deepcopy(engine.module.first)
    assert copied.weight.grad is None
    if stage == 0 and rank == 0:  # one rank may look alone
        assert engine.module.first.weight.grad is not None
    with pytest.raises(EngineError, match="must have the parameter's shape"):
        engine.module.first.weight.grad = torch.ones(2)
    with pytest.raises(TypeError, match="must be a tensor or None, got int"):
        engine.module.first.weight.grad = 5
    norm = float(clip_grad_norm_(engine.parameters(), 1e9))
    assert engine.step().grad_norm == pytest.approx(norm, rel=1e-5)
    engine.close()
    assert engine.module.first.weight.grad is None


def all_other_calls() -> None:
    for stage in (0, 1, 2):
        other_calls(stage)


def test_edited_gradients_meet_other_calls() -> None:
    all_other_calls()
    run_on_ranks(all_other_calls, 2)


def refuse(stage: int, **more: Any) -> None:
    engine = make_engine(stage, **more)
    engine.backward(engine(inputs(0)[:4]))
    for name, parameter in engine.module.named_parameters():
        if name != "frozen":
            with pytest.raises(EngineError, match=r"gradient_clipping.*engine\.weights"):
                clip_grad_norm_([parameter], 1.0)
            with pytest.raises(EngineError, match="gradient_clipping"):
                parameter.grad = parameter.detach() * 2
    engine.step()
    for parameter in engine.module.parameters():
        assert parameter.grad is None
    engine.close()


def refuse_all() -> None:
    refuse(3)
    refuse(3, bf16={"enabled": True})
    refuse(1, fp16={"enabled": True})


def test_gradients_that_cannot_be_read_are_refused() -> None:
    refuse_all()
    run_on_ranks(refuse_all, 2)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_bf16_gradients_are_clipped(accumulation: int) -> None:
    engine = make_engine(2, accumulation, bf16={"enabled": True})
    for index, part in enumerate(inputs(0).chunk(accumulation)):
        if index:
            engine.step()
        engine.backward(engine(part))
    clip_grad_norm_(engine.parameters(), 0.01)
    assert engine.step().grad_norm == pytest.approx(0.01, rel=0.02)
    engine.close()


def test_plain_parameters_keep_torchs_gradients() -> None:
    other = nn.Linear(3, 3)
    engine = make_engine(0)
    other(torch.ones(1, 3)).sum().backward()
    engine.backward(engine(inputs(0)))
    assert other.weight.grad is not None
    other.weight.grad = None
    assert other.weight.grad is None
    engine.close()


def read_on_one_rank() -> None:
    engine = make_engine(2)
    engine.backward(engine(inputs(0)[:4]))
    if dist.get_rank() == 0:
        clip_norm(engine)
    engine.step()


def test_reading_on_one_rank_is_named() -> None:
    with pytest.raises(RankError, match=r"p\.grad"):  # raised on the rank that reads it
        run_on_ranks(read_on_one_rank, 2)


Discard = Callable[[Any], None]


def zero_by_optimizer(model: Any) -> None:
    torch.optim.SGD(model.parameters(), lr=1.0).zero_grad()


DISCARDS: dict[str, Discard] = {
    "module": nn.Module.zero_grad,
    "one layer": lambda model: model.first.zero_grad(),
    "optimizer": zero_by_optimizer,
    "set": lambda model: [setattr(p, "grad", None) for p in model.parameters()] and None,
    "moved": lambda model: model.float(),
}


def plain_discards(how: str, at: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        for index, part in enumerate(inputs(step).chunk(2)):
            (model(part) / 2).backward()
            if step > 0 and index == at:
                DISCARDS[how](model)
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def all_discards(precision: str) -> dict[Any, Any]:
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    more = {"fp32": {}, "fp16": {"fp16": {"enabled": True, "initial_scale_power": 4}}}[precision]
    results = {}
    for stage, how, at in ((s, h, a) for s in (0, 1, 2, 3) for h in DISCARDS for a in (0, 1)):
        engine = make_engine(stage, 2, **more)
        for step in range(STEPS):
            for index, part in enumerate(inputs(step).chunk(2)):
                engine.backward(engine(part.chunk(ranks)[rank]))
                if step > 0 and index == at and (how != "moved" or precision == "fp32"):
                    DISCARDS[how](engine.module)
                engine.step()
        results[stage, how, at] = {n: engine.full(n) for n, _ in engine.module.named_parameters()}
        engine.close()
    return results


@pytest.mark.parametrize(
    ("ranks", "precision"),
    [(1, "fp32"), pytest.param(2, "fp32", marks=pytest.mark.soak), (2, "fp16")],
)
def test_discarded_gradients_do_not_count(ranks: int, precision: str) -> None:
    rank_results = (
        run_on_ranks(all_discards, ranks, precision) if ranks > 1 else [all_discards(precision)]
    )
    for (stage, how, at), weights in (item for a in rank_results for item in a.items()):
        for name, value in plain_discards(how, at).items():
            gap = float((weights[name] - value).abs().max())
            assert gap < (2e-5 if precision == "fp32" else 0.03), (stage, how, at, name, gap)


def read_between_micro_batches() -> dict[Any, Any]:
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    results = {}
    for stage in (0, 1, 2):
        for edit in ("clip_norm", "multiply", "replace", "drop"):
            engine = make_engine(stage, 3, train_batch_size=6)
            rank_results = []
            for step in range(STEPS):
                for index, part in enumerate(inputs(step)[:6].chunk(3)):
                    engine.backward(engine(part.chunk(ranks)[rank]))
                    rank_results.append(EDITS[edit](engine.module))
                    engine.step()
                    if index == 0:
                        rank_results.append(engine.module.second.bias.grad.sum().item())
            weights = {name: engine.full(name) for name, _ in engine.module.named_parameters()}
            results[stage, edit] = rank_results, weights
            engine.close()
    return results


def plain_between_micro_batches(edit: str) -> tuple[list[Any], dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    rank_results = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for index, part in enumerate(inputs(step)[:6].chunk(3)):
            (model(part) / 3).backward()
            rank_results.append(EDITS[edit](model))
            if index == 0:
                rank_results.append(model.second.bias.grad.sum().item())
        optimizer.step()
    return rank_results, {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_between_micro_batches(ranks: int) -> None:
    rank_results = (
        run_on_ranks(read_between_micro_batches, ranks)
        if ranks > 1
        else [read_between_micro_batches()]
    )
    for (stage, edit), (gradients, weights) in (item for a in rank_results for item in a.items()):
        expected_told, expected = plain_between_micro_batches(edit)
        assert gradients == pytest.approx(expected_told, rel=1e-3, abs=1e-6), (stage, edit)
        for name, value in expected.items():
            gap = float((weights[name] - value).abs().max())
            assert gap < 2e-5, (stage, edit, name, gap)


def make_and_close_engines() -> str:
    for stage in (0, 3):
        first, second = make_engine(stage), make_engine(0)
        assert "grad" in vars(nn.Parameter)
        first.close()
        assert "grad" in vars(nn.Parameter)
        second.close()
        assert "grad" not in vars(nn.Parameter)
        assert "grad" not in vars(DTensor)
    engine = make_engine(1)
    del engine
    gc.collect()
    assert "grad" not in vars(nn.Parameter)
    return "restored"


@pytest.mark.processes
def test_attribute_of_the_class_is_restored() -> None:
    assert run_on_ranks(make_and_close_engines, 1) == ["restored"]  # where no other engine exists
