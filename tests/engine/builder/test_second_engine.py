"""Second ``initialize`` of a model, as when a notebook cell is run twice."""

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

import zerotrial
from tests.engine.ranks import run_on_ranks
from zerolab.errors import ConfigError, EngineError

pytestmark = pytest.mark.processes

STAGES = (0, 1, 2, 3)
LR = 0.05


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).tanh()


class Net(nn.Module):
    """Rows that two ranks cannot share evenly, tied weights, a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 7)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.tied = nn.Linear(7, 7, bias=False)
        self.again = nn.Linear(7, 7, bias=False)
        self.again.weight = self.tied.weight
        self.scale = nn.Linear(7, 1, bias=False).requires_grad_(requires_grad=False)
        self.tied.weight.mark = "kept"

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.scale(self.again(self.tied(hidden).tanh())).square().mean()


def config(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "zero_optimization": {"stage": stage},
        **more,
    }


def inputs(step: int) -> Tensor:
    return torch.randn(2, 5, generator=torch.Generator().manual_seed(step))


def train(engine: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = engine(inputs(step))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def plain(model: nn.Module, steps: range) -> list[float]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)
    losses = []
    for step in steps:
        loss = model(inputs(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_plain(model: nn.Module, expected: nn.Module) -> None:
    for module, other in zip(model.modules(), expected.modules(), strict=True):
        assert type(module) is type(other)
        assert not isinstance(module, FSDPModule)
        assert vars(module).keys() == vars(other).keys()
        for hooks in ("_forward_hooks", "_forward_pre_hooks", "_state_dict_pre_hooks"):
            assert not getattr(module, hooks)
    assert model.again.weight is model.tied.weight
    assert model.tied.weight.mark == "kept"
    for (name, actual), reference in zip(
        model.named_parameters(), expected.parameters(), strict=True
    ):
        assert type(actual) is nn.Parameter, name
        assert actual.requires_grad == reference.requires_grad, name
        torch.testing.assert_close(actual, reference, rtol=1e-5, atol=1e-6)


def run_twice(first: int, second: int, *, close: bool) -> bool:
    """A cell at one stage, then at another, on one model; all ranks have the same data."""
    model, reference = Net(), Net()
    expected = plain(reference, range(4)) + plain(reference, range(4, 8))
    engine, *_ = zerotrial.initialize(model=model, config=config(first))
    losses = train(engine, range(4))
    if close:
        engine.close()
        engine.close()
        middle = Net()
        plain(middle, range(4))
        assert_plain(model, middle)
        copied = copy.deepcopy(model)  # fully_shard forbids it
        torch.testing.assert_close(copied(inputs(0)), middle(inputs(0)))
        torch.save(model, io.BytesIO())
        torch.testing.assert_close(model(inputs(0)), middle(inputs(0)))
    later, *_ = zerotrial.initialize(model=model, config=config(second))
    losses += train(later, range(4, 8))
    assert losses == pytest.approx(expected, rel=1e-5)
    for call in (lambda: train(engine, range(1)), lambda: engine.stage.tensors_by_kind()):  # noqa: PLW0108
        with pytest.raises(EngineError, match="this engine was closed"):
            call()
    assert engine.get_lr() == [LR]
    later.close()
    assert_plain(model, reference)
    return True


@pytest.mark.parametrize("close", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_second_initialize_of_a_model(stage: int, close: bool) -> None:
    assert run_twice(stage, stage, close=close)


def on_two_ranks() -> list[str]:
    assert dist.get_world_size() == 2
    for first, second in ((0, 3), (3, 1), (3, 3), (2, 2)):
        for close in (False, True):
            run_twice(first, second, close=close)
    return ["done"]


def test_second_initialize_on_ranks_at_another_stage() -> None:
    assert run_on_ranks(on_two_ranks, 2) == [["done"], ["done"]]


@pytest.mark.parametrize(("first", "second"), [(1, 1), (3, 1), (3, 3)])
@pytest.mark.parametrize("kind", ["optimizer", "groups", "generator"])
def test_parameters_taken_before_second_initialize(first: int, second: int, kind: str) -> None:
    model, reference = Net(), Net()
    earlier, *_ = zerotrial.initialize(model=model, config=config(first))
    train(earlier, range(2))
    settings = config(second)
    arguments: dict[str, Any] = {}
    trained = [p for p in model.parameters() if p.requires_grad]
    if kind == "optimizer":
        del settings["optimizer"]
        arguments["optimizer"] = torch.optim.SGD(trained, lr=LR)
    elif kind == "groups":
        arguments["model_parameters"] = [{"params": trained[:1]}, {"params": trained[1:]}]
    else:
        arguments["model_parameters"] = (p for p in model.parameters() if p.requires_grad)
    later, *_ = zerotrial.initialize(model=model, config=settings, **arguments)
    train(later, range(2, 4))
    later.close()
    plain(reference, range(4))
    assert_plain(model, reference)


def test_earlier_engine_reports_its_loss_once(caplog: pytest.LogCaptureFixture) -> None:
    model = Net()
    engine, *_ = zerotrial.initialize(model=model, config=config(1))
    later, *_ = zerotrial.initialize(model=model, config=config(1))
    warnings_logged = [
        r for r in caplog.records if "earlier engine trained this model (Net)" in r.message
    ]
    assert len(warnings_logged) == 1
    with pytest.raises(EngineError, match=r"closed by a later initialize\(\) of its model"):
        train(engine, range(1))
    later.close()


def test_engines_of_different_parameters_coexist() -> None:
    model, reference = Net(), Net()
    parts = [model.first, model.tied]
    engines = [
        zerotrial.initialize(model=model, model_parameters=part.parameters(), config=config(1))[0]
        for part in parts
    ]
    for step in range(3):
        for engine in engines:
            train(engine, range(step, step + 1))
    for step in range(3):
        for part in (reference.first, reference.tied):
            optimizer = torch.optim.SGD(part.parameters(), lr=LR)
            reference.zero_grad()
            reference(inputs(step)).backward()
            optimizer.step()
    for engine in engines:
        engine.close()
    assert_plain(model, reference)


@pytest.mark.parametrize("stage", STAGES)
def test_restored_16_bit_model_stays_in_16_bits(stage: int) -> None:
    model = Net()
    engine, *_ = zerotrial.initialize(model=model, config=config(stage, bf16={"enabled": True}))
    train(engine, range(2))
    inside = model(inputs(0)).item()
    engine.close()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model(inputs(0).bfloat16()).item() == inside


@pytest.mark.parametrize("stage", STAGES)
def test_blocks_recompute_once_after_two_initializes(stage: int) -> None:
    model = Net()
    settings = config(stage, activation_checkpointing={"enabled": True})
    zerotrial.initialize(model=model, config=settings)
    later, *_ = zerotrial.initialize(model=model, config=settings)
    calls = []
    model.blocks[0].inner.register_forward_pre_hook(lambda *_: calls.append(1))
    train(later, range(1))
    assert len(calls) == 2
    later.close()
    assert "forward" not in vars(model.blocks[0])


@pytest.mark.parametrize("stage", STAGES)
def test_refused_configuration_leaves_model_unchanged(stage: int) -> None:
    model = Net()
    bad = config(stage, scheduler={"type": "StepLR", "params": {"no_such": 1}})
    with pytest.raises(ConfigError, match="no_such"):
        zerotrial.initialize(model=model, config=bad)
    assert_plain(model, Net())


def test_close_without_give_back_stays_sharded() -> None:
    model = Net()
    engine, *_ = zerotrial.initialize(model=model, config=config(3))
    engine.close(give_back=False)
    assert isinstance(model, FSDPModule)
