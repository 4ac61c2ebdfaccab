"""Frozen weights keep their precision in any compute precision."""

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor, nn

import zerotrial
from tests.engine.ranks import run_on_ranks
from zerotrial.engine import Engine
from zerotrial.extensions.deepspeed_api.names.zero_to_fp32 import (
    get_fp32_state_dict_from_zero_checkpoint,
)


class Model(nn.Module):
    """A frozen layer in fp32, one in bf16, a frozen scalar, a trained head."""

    def __init__(self, fill: float | None = None) -> None:
        super().__init__()
        self.base = nn.Linear(5, 7)
        self.low = nn.Linear(7, 7).to(torch.bfloat16)
        self.scale = nn.Parameter(torch.tensor(0.123456789))
        self.head = nn.Linear(7, 2)
        for frozen in (self.base, self.low, self.scale):
            frozen.requires_grad_(requires_grad=False)
        if fill is not None:
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.fill_(fill)

    def forward(self, x: Tensor) -> Tensor:
        x = self.base(x) * self.scale
        return self.head(self.low(x.to(self.low.weight.dtype))).float().square().mean()


FROZEN = ("base.weight", "base.bias", "low.weight", "low.bias", "scale")


def initial_state() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: value.clone() for name, value in Model().state_dict().items()}


def make_engine(stage: int, precision: str, model: nn.Module | None = None) -> Engine:
    torch.manual_seed(0)
    return zerotrial.initialize(
        model=model or Model(),
        config={
            "train_batch_size": 4,
            precision: {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
            "zero_optimization": {"stage": stage},
        },
    )[0]


def train(engine: Engine) -> None:
    x = torch.ones(4 // engine.dp_world_size, 5)
    engine.backward(engine(x))
    engine.step()


def same(actual: dict[str, Tensor], expected: dict[str, Tensor], what: Any) -> None:
    for name in FROZEN:
        assert torch.equal(actual[name].float(), expected[name].float()), (what, name)


def save_and_load(stage: int, precision: str, directory: str) -> None:
    original = initial_state()
    engine = make_engine(stage, precision)
    train(engine)
    weights = {name: engine.full(name) for name, _ in engine.module.named_parameters()}
    same(weights, original, "full")
    tag = f"{stage}{precision}{engine.world_size}"
    engine.save_checkpoint(directory, tag=tag)
    engine.export(f"{directory}/{tag}.safetensors")
    exported = safetensors.torch.load_file(f"{directory}/{tag}.safetensors")
    assert {value.dtype for value in exported.values()} == {torch.float32}
    same(exported, original, "export")
    with safe_open(f"{directory}/{tag}/module-000.safetensors", framework="pt") as file:
        dtypes = {key.split("@")[0]: file.get_tensor(key).dtype for key in file.keys()}  # noqa: SIM118
    assert dtypes["base.weight"] == torch.float32
    assert dtypes["low.weight"] == torch.bfloat16
    single = get_fp32_state_dict_from_zero_checkpoint(directory, tag)
    assert {value.dtype for value in single.values()} == {torch.float32}
    same(single, original, "get_fp32")
    engine.close()
    engine = make_engine(3 - stage, precision, Model(fill=0.5))
    engine.load_checkpoint(directory, tag=tag)
    same({n: engine.full(n) for n in FROZEN}, original, "loaded")
    with torch.no_grad():
        engine.module.base.bias.zero_()
    zeroed = original | {"base.bias": torch.zeros(7)}
    same({n: engine.full(n) for n in FROZEN}, zeroed, "written")
    engine.module.load_state_dict(original)
    same({n: engine.full(n) for n in FROZEN}, original, "load_state_dict")
    engine.set_full("base.weight", original["base.weight"] / 3)
    same(
        {n: engine.full(n) for n in FROZEN},
        original | {"base.weight": original["base.weight"] / 3},
        "set_full",
    )
    engine.close()


def every_case(directory: str) -> None:
    for stage in (0, 1, 2, 3):
        for precision in ("bf16", "fp16"):
            save_and_load(stage, precision, directory)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.soak), 4])
def test_frozen_weights_keep_their_precision(ranks: int, tmp_path: Path) -> None:
    if ranks == 1:
        every_case(str(tmp_path))
    else:
        run_on_ranks(every_case, ranks, str(tmp_path))
