"""``compile: {enabled: true}`` changes how fast a model runs, not what it computes."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine.stage3_models import Language, make_batches
from zerolab.config import load_engine_config
from zerotrial.engine import initialize
from zerotrial.engine.module.compiling import compile_blocks

# What torch's own compiler does while it reads a model, and no line of ours.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
]


def losses(model: nn.Module, config: dict[str, Any]) -> list[float]:
    content = {"train_batch_size": 2, "optimizer": {"type": "AdamW"}, **config}
    engine, *_ = initialize(model=model, config=content)
    found = []
    for ((batch,),) in make_batches(3, 1, 1):
        loss = engine(*batch)
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    engine.close()
    return found


def language() -> nn.Module:
    torch.manual_seed(5)
    return Language(width=16, blocks=2)


def test_blocks_are_compiled_and_a_model_without_blocks_whole() -> None:
    on = load_engine_config(
        {"train_batch_size": 1, "compile": {"enabled": True, "backend": "eager"}}
    ).compile
    off = load_engine_config({"train_batch_size": 1}).compile
    assert compile_blocks(language(), on) == ["blocks.0", "blocks.1"]
    assert compile_blocks(nn.Linear(2, 2), on) == [""]
    assert compile_blocks(language(), off) == []


@pytest.mark.parametrize("stage", [1, 3])
def test_losses_agree_at_flat_and_sharded_stages(stage: int) -> None:
    torch.compiler.reset()
    zero: dict[str, Any] = {"zero_optimization": {"stage": stage}}
    compiled = {**zero, "compile": {"enabled": True, "backend": "aot_eager"}}
    assert losses(language(), compiled) == pytest.approx(losses(language(), zero), rel=1e-6)


def test_losses_agree_with_recomputation_on_top() -> None:
    torch.compiler.reset()
    both = {
        "compile": {"enabled": True, "backend": "aot_eager"},
        "activation_checkpointing": {"enabled": True},
    }
    assert losses(language(), both) == pytest.approx(losses(language(), {}), rel=1e-6)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return (self.layer(tokens.float()).relu() - targets).square().mean()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles with g++")
def test_losses_agree_when_kernels_are_generated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no pool of processes
    torch.compiler.reset()

    def small() -> nn.Module:
        torch.manual_seed(5)
        return Small()

    compiled = losses(small(), {"compile": {"enabled": True}})
    assert compiled == pytest.approx(losses(small(), {}), rel=1e-5)


def part_compiled() -> nn.Module:
    model: Any = language()
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
    return model  # type: ignore[no-any-return]


def model_compiled() -> nn.Module:
    model: Any = part_compiled()
    return torch.compile(model, backend="eager")  # type: ignore[no-any-return]


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("compiled", [model_compiled, part_compiled])
def test_compiled_and_plain_models_exchange_checkpoints(
    stage: int, compiled: Any, tmp_path: Path
) -> None:
    torch.compiler.reset()
    config = {
        "train_batch_size": 2,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": stage},
    }

    def begin(model: nn.Module) -> Any:
        return initialize(model=model, config=config)[0]

    def step(engine: Any, batch: Any) -> float:
        loss = engine(*batch)
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    first, second, third = (batch for ((batch,),) in make_batches(3, 1, 1))
    plain = begin(language())
    wanted = [step(plain, batch) for batch in (first, second, third)]
    names = plain.full_state_dict().keys()
    plain.close()
    found = []
    for index, (make, batch) in enumerate(
        [(compiled, first), (language, second), (compiled, third)]
    ):
        engine = begin(make())
        if index:
            engine.load_checkpoint(tmp_path)
        found.append(step(engine, batch))
        engine.save_checkpoint(tmp_path)
        assert engine.full_state_dict().keys() == names
        engine.close()
    assert found == pytest.approx(wanted, rel=1e-6)
