"""``torch.save`` and ``copy.deepcopy`` of a model while an engine trains it."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerotrial
from zerolab.errors import EngineError


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


OPTIONS: list[Any] = [
    {"bf16": {"enabled": True}},
    {"fp16": {"enabled": True}},
    {"activation_checkpointing": {"enabled": True}},
    pytest.param(
        {"activation_checkpointing": {"cpu_checkpointing": True}},
        marks=pytest.mark.needs_extension("activation_storage"),
    ),
    {"compile": {"enabled": True, "backend": "eager"}},
    {
        "activation_checkpointing": {"enabled": True},
        "compile": {"enabled": True, "backend": "eager"},
    },
    {},
]


def pickled(model: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(model))


def saved(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def make(model: nn.Module, stage: int, options: dict[str, Any]) -> Any:
    config = {
        "train_batch_size": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
        **options,
    }
    return zerotrial.initialize(model=model, config=config)[0]


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch.compile looks at inputs
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("by_user", [False, True], ids=["plain", "torch.compile"])
def test_copies_compute_with_their_own_weights(options: dict[str, Any], by_user: bool) -> None:
    model: Any = torch.compile(Model(), backend="eager") if by_user else Model()
    engine = make(model, 1, options)
    x = torch.randn(2, 4)
    engine.backward(engine(x).float().square().mean())  # also between backward and step
    expected = engine.module(x).detach()
    for copied in (copy.deepcopy(engine.module), pickled(engine.module), saved(engine.module)):
        torch.testing.assert_close(copied(x).detach(), expected)
        with torch.no_grad():
            for parameter in copied.parameters():
                parameter.zero_()
        assert not copied(x).any()
    torch.testing.assert_close(engine.module(x).detach(), expected)
    assert not engine.stage.gradients.exposed  # neither copies nor torch.compile have read p.grad
    engine.step()
    engine.close()


def test_sharded_models_cannot_be_pickled() -> None:
    engine = make(Model(), 3, {})
    for how in (copy.deepcopy, pickled, saved):
        with pytest.raises(EngineError, match=r"cannot be copied or pickled.*full_state_dict"):
            how(engine.module)
    engine.close()
    assert saved(engine.module)(torch.ones(2, 4)).shape == (2, 4)
