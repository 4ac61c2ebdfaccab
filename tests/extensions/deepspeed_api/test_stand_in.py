"""Imports of the replacement of deepspeed by scripts."""

import contextlib
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from zerolab.contract.spec import ENV_AS_DEEPSPEED
from zerolab.errors import ConfigError
from zerotrial.extensions.deepspeed_api.initialize import initialize
from zerotrial.extensions.deepspeed_api.names.root import tp_model_init
from zerotrial.extensions.deepspeed_api.parameter_access import GatheredParameters
from zerotrial.extensions.pipeline import PipelineModule

pytestmark = pytest.mark.processes

CHILD = (
    "import importlib.util as u; print('child', type(u.find_spec('deepspeed').loader).__module__)"
)

SCRIPT = f"""
import importlib.metadata, importlib.util, subprocess, sys
print("script", sys.argv[1:], __name__, importlib.metadata.version("deepspeed"), flush=True)
subprocess.run([sys.executable, "-c", {CHILD!r}])
"""

OURS = "child zerotrial.extensions.deepspeed_api.finder"


def run(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "zerotrial.extensions.deepspeed_api", *arguments]
    env = {k: v for k, v in os.environ.items() if k != ENV_AS_DEEPSPEED} | more
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def test_script_and_its_children_find_the_replacement(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run(str(tmp_path / "script.py"), "--lr", "1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["script ['--lr', '1'] __main__ 0.19.8", OURS]


def test_real_installation_is_replaced_only_on_request(tmp_path: Path) -> None:
    (tmp_path / "real" / "deepspeed").mkdir(parents=True)
    (tmp_path / "real" / "deepspeed" / "__init__.py").write_text("__version__ = 'real'\n")
    (tmp_path / "script.py").write_text(SCRIPT)
    path = str(tmp_path / "real")
    refused = run(str(tmp_path / "script.py"), PYTHONPATH=path)
    assert refused.returncode == 2
    assert "deepspeed: must not be installed" in refused.stderr
    assert str(tmp_path / "real" / "deepspeed") in refused.stderr
    assert f"{ENV_AS_DEEPSPEED}=force" in refused.stderr
    assert "Traceback" not in refused.stderr
    forced = run(str(tmp_path / "script.py"), PYTHONPATH=path, **{ENV_AS_DEEPSPEED: "force"})
    assert forced.returncode == 0, forced.stderr
    assert OURS in forced.stdout


def test_invalid_variable_ends_the_process(tmp_path: Path) -> None:
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").write_text("__version__ = 'real'\n")
    done = subprocess.run(
        [sys.executable, "-c", "print('ran')"],
        env=os.environ | {ENV_AS_DEEPSPEED: "1", "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "deepspeed: must not be installed" in done.stderr


def test_missing_script_is_named() -> None:
    done = run("nowhere.py")
    assert done.returncode == 2
    assert "nowhere.py: there is no such file; usage:" in done.stderr


def moved(model: nn.Module, file: dict[str, Any], stage: int = 0, *, bf16: bool = False) -> Any:
    """The engine, and how far one step of SGD with a gradient of norm 1000 moves its weight."""
    with torch.no_grad():
        next(model.parameters()).zero_()
    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": bf16},
    }
    engine = initialize(model=model, config=config | file)[0]
    tensor = torch.ones(1, 1)
    if isinstance(model, PipelineModule):
        engine.train_batch(iter([(tensor, tensor)]))
    else:
        engine.backward(1000 * engine(tensor).sum())
        engine.step()
    weight = engine.full(next(iter(engine.full_state_dict())))
    engine.close()
    return engine, -weight.item()


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("bf16", [False, True])
def test_default_clipping_matches_deepspeed(
    stage: int, bf16: bool, caplog: pytest.LogCaptureFixture
) -> None:
    for file, limit in (({}, 1.0), ({"gradient_clipping": 0}, 0.0), ({"gradient_clipping": 2}, 2)):
        caplog.clear()
        engine, distance = moved(nn.Linear(1, 1, bias=False), file, stage, bf16=bf16)
        assert distance == pytest.approx(limit or 1000, rel=1e-2)
        assert engine.gradient_clipping() == limit
        assert ("gradient_clipping: is missing" in caplog.text) == (not file)


def test_loss_scale_attribute_has_current_and_configured_value(tmp_path: Path) -> None:
    def build(fp16: dict[str, Any]) -> Any:
        file = {"train_batch_size": 1, "optimizer": {"type": "Adam"}, "fp16": fp16}
        return initialize(model=nn.Linear(1, 1), config=file)[0]

    engine = build({"enabled": True, "initial_scale_power": 4, "hysteresis": 1})
    outer = nn.Sequential(engine).eval()  # a module of the script's own keeps the engine
    assert [name for name, _ in outer.named_parameters()] == ["0.weight", "0.bias"]
    assert not engine.module.training
    engine.train()
    optimizer = engine.optimizer
    assert (engine.loss_scale, engine.loss_scale()) == (16, 0)
    assert (optimizer.cur_scale, optimizer.loss_scale, optimizer.overflow) == (16, 16, False)
    assert engine.load_checkpoint(tmp_path) == (None, None)
    engine.save_checkpoint(tmp_path)
    engine.backward(engine(torch.ones(1, 1)).sum() * torch.inf)
    engine.step()
    assert (optimizer.cur_scale, optimizer.loss_scale, optimizer.overflow) == (8, 8, True)
    engine.load_checkpoint(tmp_path)
    assert (engine.loss_scale, optimizer.cur_scale, optimizer.overflow) == (16, 16, False)
    assert pickle.loads(pickle.dumps(engine.loss_scale))() == 0
    engine.close()
    engine = build({"enabled": True, "loss_scale": 128})
    assert engine.loss_scale() == engine.loss_scale == engine.optimizer.cur_scale == 128
    engine.close()


@pytest.mark.parametrize("stage", [0, 3])
def test_pipeline_reports_the_loss_scale_of_each_batch(stage: int) -> None:
    file = {
        "train_batch_size": 1,
        "optimizer": {"type": "Adam"},
        "fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1},
        "zero_optimization": {"stage": stage},
    }
    model = PipelineModule([nn.Linear(1, 1)], 1, loss_fn=lambda out, label: (out * label).sum())
    engine = initialize(model=model, config=file)[0]
    optimizer, tensor = engine.optimizer, torch.ones(1, 1)
    for label, scale, overflow in ((tensor * torch.inf, 8, True), (tensor, 8, False)):
        engine.train_batch(iter([(tensor, label)]))
        assert (optimizer.cur_scale, optimizer.loss_scale) == (scale, scale)
        assert optimizer.overflow is overflow
    engine.close()


def test_pipeline_engine_clips_in_the_replacement() -> None:
    def loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return 1000 * (output * label).sum()

    _, distance = moved(PipelineModule([nn.Linear(1, 1, bias=False)], 1, loss_fn=loss), {})
    assert distance == pytest.approx(1, rel=1e-2)


def test_parameters_of_several_engines_gather_in_creation_order() -> None:
    engines, opened = [], []
    for number in range(12):
        model = nn.Linear(1, 1)
        engine = initialize(model=model, config={"train_batch_size": 1})[0]

        def gathered(names: Any, number: int = number, **_: Any) -> Any:
            opened.append(number)
            return contextlib.nullcontext(names)

        engine.gathered = gathered  # type: ignore[method-assign]
        engines.append(engine)
    with GatheredParameters([p for item in reversed(engines) for p in item.module.parameters()]):
        assert opened == list(range(12))  # the addresses of objects have another one on each rank
    for item in engines:
        item.close()


@pytest.mark.parametrize("size", [0, -1, "two", None])
def test_model_is_sharded_over_a_divisor_of_the_ranks(size: Any) -> None:
    with pytest.raises(ConfigError, match=rf"tp_size: must be a whole number .*, got {size!r}"):
        tp_model_init(nn.Linear(2, 2), size)


@pytest.mark.parametrize("bf16", [False, True])
def test_earlier_references_are_full_and_writes_to_them_persist(bf16: bool) -> None:
    model = nn.Linear(2, 2)
    config = {
        "train_batch_size": 1,
        "bf16": {"enabled": bf16},
        "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3},
    }
    engine = initialize(model=model, config=config)[0]
    references = list(model.parameters())
    with torch.no_grad(), GatheredParameters(references, modifier_rank=0):
        model.weight.fill_(3)
    assert engine.full("weight").tolist() == [[3, 3], [3, 3]]
    with GatheredParameters(references, modifier_rank=0):
        references[0].data.zero_()
    assert engine.full("weight").tolist() == [[0, 0], [0, 0]]
    engine.close()
