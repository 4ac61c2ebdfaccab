"""``compile: {enabled: true}`` changes the speed of a model, not its results."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine.stage3_models import Language, make_batches
from zerolab.config import load_engine_config
from zerotrial.engine import initialize
from zerotrial.engine.module.compilation import compile_blocks, strip_compiled
from zerotrial.extensions.deepspeed_api.names.zero_to_fp32 import (
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)

# Warnings of torch's compiler, not of this project.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
]


def losses(model: nn.Module, config: dict[str, Any]) -> list[float]:
    content = {"train_batch_size": 2, "optimizer": {"type": "AdamW"}, **config}
    engine, *_ = initialize(model=model, config=content)
    values = []
    for ((batch,),) in make_batches(3, 1, 1):
        loss = engine(*batch)
        engine.backward(loss)
        engine.step()
        values.append(loss.item())
    engine.close()
    return values


def language() -> nn.Module:
    torch.manual_seed(5)
    return Language(width=16, blocks=2)


def test_blocks_or_the_full_model_are_compiled() -> None:
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


def test_losses_agree_with_recomputation() -> None:
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
def test_losses_agree_with_generated_kernels(
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
    expected = [step(plain, batch) for batch in (first, second, third)]
    names = plain.full_state_dict().keys()
    plain.close()
    actual = []
    for index, (make, batch) in enumerate(
        [(compiled, first), (language, second), (compiled, third)]
    ):
        engine = begin(make())
        if index:
            engine.load_checkpoint(tmp_path)
        actual.append(step(engine, batch))
        engine.save_checkpoint(tmp_path)
        assert engine.full_state_dict().keys() == names
        engine.close()
    assert actual == pytest.approx(expected, rel=1e-6)


class Wrapper(nn.Module):
    """Names parameters as ``torch.compile`` does; the engine leaves it in place."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._orig_mod = inner

    def forward(self, *inputs: Any) -> Any:
        return self._orig_mod(*inputs)


def wrapped() -> nn.Module:
    model: Any = language()
    model.blocks[1] = Wrapper(model.blocks[1])
    model.blocks[0].requires_grad_(requires_grad=False)
    return Wrapper(model)


@pytest.fixture(scope="module")
def old_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """A checkpoint with ``_orig_mod.`` in its names, and its weights by plain names."""
    folder = tmp_path_factory.mktemp("old")
    engine = initialize(model=wrapped(), config=CONFIG)[0]
    for ((batch,),) in make_batches(2, 1, 1):
        engine.backward(engine(*batch))
        engine.step()
    engine.save_checkpoint(folder)
    weights = engine.full_state_dict()
    engine.export(folder / "weights.safetensors")
    engine.close()
    text = next(folder.glob("*/manifest.json")).read_text()
    assert "_orig_mod.blocks.1._orig_mod." in text
    return folder, {name.replace("_orig_mod.", ""): value for name, value in weights.items()}


CONFIG: dict[str, Any] = {"train_batch_size": 2, "optimizer": {"type": "AdamW"}}


def check_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=0, atol=0)


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("make", [language, model_compiled])
def test_old_names_of_compiled_models_load_into_engine(
    stage: int, make: Any, old_checkpoint: tuple[Path, dict[str, Tensor]]
) -> None:
    torch.compiler.reset()
    folder, expected = old_checkpoint
    model = make()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("blocks.0." not in name)
        nn.init.zeros_(parameter)
    config = {**CONFIG, "zero_optimization": {"stage": stage}}
    engine = initialize(model=model, config=config)[0]
    engine.load_checkpoint(folder)
    check_equal(engine.full_state_dict(), expected)
    assert engine.full("head.weight", "exp_avg").abs().sum() > 0
    for ((batch,),) in make_batches(1, 1, 1):
        engine.backward(engine(*batch))
        engine.step()
    old = {f"_orig_mod.{name}": value for name, value in expected.items()}
    engine.module.load_state_dict(old)
    check_equal(engine.full_state_dict(), expected)
    engine.close()


@pytest.mark.parametrize("make", [language, model_compiled])
def test_old_names_of_compiled_models_load_without_engine(
    make: Any, old_checkpoint: tuple[Path, dict[str, Tensor]]
) -> None:
    folder, expected = old_checkpoint
    check_equal(get_fp32_state_dict_from_zero_checkpoint(folder), expected)
    model = load_state_dict_from_zero_checkpoint(make(), folder)
    check_equal({strip_compiled(name): v for name, v in model.state_dict().items()}, expected)


def test_old_names_of_compiled_models_fill_model_at_stage_3(
    old_checkpoint: tuple[Path, dict[str, Tensor]],
) -> None:
    folder, expected = old_checkpoint
    config = {**CONFIG, "zero_optimization": {"stage": 3}}
    file = folder / "weights.safetensors"
    engine = initialize(model=language(), config=config, weights=file)[0]
    check_equal(engine.full_state_dict(), expected)
    engine.close()
