"""An engine of a real DeepSpeed, where one is installed, in our loop."""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerotrial
from tests.trial.helpers import LineTrial, fit, last_checkpoint, make_settings, make_spec, metrics
from zerolab.contract.spec import ENV_RUN_SPEC, RunSpec, write_run_spec
from zerolab.storage.store import CheckpointStore
from zerotrial.engine.checkpoint.deepspeed.convert import import_deepspeed

deepspeed = pytest.importorskip("deepspeed", reason="DeepSpeed is an extra; it needs a compiler")

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 1},
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
}


class DeepSpeedTrial(LineTrial):
    def __init__(self, context: Any) -> None:
        self.context = context
        self.samples, self.seen = 22, []
        model = nn.Linear(1, 1)
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=CONFIG
        )
        self.engine = context.wrap_model_engine(engine)

    def loss(self, batches: Iterator[Any]) -> Any:
        x, y, _ = next(batches)
        return (self.engine(x.bfloat16()).float() - y).square().mean()

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        loss = self.loss(dataloader_iter)
        self.engine.backward(loss)
        self.engine.step()
        return loss

    def evaluate_batch(self, dataloader_iter):
        return {"validation_loss": self.loss(dataloader_iter)}


@pytest.fixture
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    here = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**here, "MASTER_PORT": "0", "GLOO_SOCKET_IFNAME": "lo"}.items():
        monkeypatch.setitem(os.environ, name, value)
    dist.init_process_group("gloo")
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_one_rank")
def test_a_deepspeed_engine_trains_is_recorded_and_goes_on(tmp_path: Path) -> None:
    fit(make_spec(tmp_path), DeepSpeedTrial, make_settings(4))
    latest = last_checkpoint(tmp_path)
    fit(make_spec(tmp_path, latest=latest), DeepSpeedTrial, make_settings(6))
    training = metrics(tmp_path, "training")
    assert sorted(training) == [1, 2, 3, 4, 5, 6]
    assert {"loss", "learning_rate", "grad_norm", "loss_scale"} <= set(training[6])
    assert training[6]["loss"] < training[1]["loss"]


MODEL = """
    import os, signal, torch, zerotrial
    from torch import nn

    if os.environ["ENGINE_OF"] == "deepspeed":  # gloo alone: its own kernel compiles for minutes
        import deepspeed
        from deepspeed.accelerator import get_accelerator

        builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
        if builder is not None:
            deepspeed.ops.__compatible_ops__[builder.NAME] = False

    class MyTrial(zerotrial.ZeroTrial):
        def __init__(self, context):
            self.context = context
            hparams = context.get_hparams()
            self.kill_at = hparams["kill_at"]
            config = zerotrial.overwrite_deepspeed_config(
                hparams["deepspeed_config"], hparams.get("overwrite_deepspeed_args", {})
            )
            model = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.3), nn.Linear(4, 1))
            self.engine = context.wrap_model_engine(
                zerotrial.initialize(model=model, config=config)[0]
            )

        def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
            if batch_idx == self.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            x = next(dataloader_iter)
            loss = (self.engine(x) - 3 * x).square().mean()
            self.engine.backward(loss)
            self.engine.step()
            return loss

        def evaluate_batch(self, dataloader_iter):
            x = next(dataloader_iter)
            return {"validation_loss": (self.engine(x) - 3 * x).square().mean()}

        def build_training_data_loader(self):
            points = torch.arange(22.0)[:, None] / 22
            return zerotrial.DataLoader(points, batch_size=2, shuffle=True)

        build_validation_data_loader = build_training_data_loader
"""
ENGINE = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1, "torch_adam": True}},
}
ONLY_THEIRS = {"zero_optimization": {"zero_hpz_partition_size": 1}}


def rank(path: Path, backend: str, latest: Any = None, kill_at: int = -1, **more: Any) -> Any:
    """Run a rank in a process of its own; returns the spec and the exit code."""
    config = {
        "entrypoint": "model:MyTrial",
        "searcher": {"metric": "validation_loss", "max_length": {"batches": 6}},
        "scheduling_unit": 1,
        "min_checkpoint_period": {"batches": 3},
    }
    hparams = {"deepspeed_config": ENGINE, "kill_at": kill_at, **more}
    spec = make_spec(path, hparams, latest, config=config)
    fields = {name: getattr(spec, name) for name in spec.__struct_fields__}
    spec = RunSpec(**{**fields, "backend": backend})
    (Path(spec.model_dir) / "model.py").write_text(textwrap.dedent(MODEL))
    write_run_spec(spec, path / "spec.json")
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    environment |= {ENV_RUN_SPEC: str(path / "spec.json"), "ENGINE_OF": backend}
    ended = subprocess.run(
        [sys.executable, "-m", "zerotrial.process.harness"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return spec, ended.returncode, ended.stderr


def losses(path: Path) -> dict[int, float]:
    return {steps: values["loss"] for steps, values in metrics(path, "training").items()}


def test_a_trial_of_backend_deepspeed_is_killed_resumed_and_imported(tmp_path: Path) -> None:
    theirs = {"overwrite_deepspeed_args": ONLY_THEIRS}
    _, code, told = rank(tmp_path / "ours", "zerolab")
    assert code == 0, told
    whole, code, told = rank(tmp_path / "whole", "deepspeed", **theirs)
    assert code == 0, told
    _, code, told = rank(tmp_path / "cut", "deepspeed", kill_at=4, **theirs)
    assert code == -signal.SIGKILL, told
    latest = last_checkpoint(tmp_path / "cut")
    assert latest is not None
    assert latest.steps_completed == 3
    _, code, told = rank(tmp_path / "cut", "deepspeed", latest, **theirs)
    assert code == 0, told
    assert sorted(losses(tmp_path / "whole")) == [1, 2, 3, 4, 5, 6]
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    first = losses(tmp_path / "whole")[1]  # the same weights, data and random numbers
    assert first == pytest.approx(losses(tmp_path / "ours")[1], rel=1e-5)

    final = last_checkpoint(tmp_path / "whole")
    with CheckpointStore.of_run(whole).restore_path(final.uuid) as path:
        import_deepspeed(path, tmp_path / "imported", tag="model0")
        saved = torch.load(path / "model0" / "mp_rank_00_model_states.pt", weights_only=False)
    model = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.3), nn.Linear(4, 1))
    engine = zerotrial.initialize(model=model, config=ENGINE)[0]
    engine.load_checkpoint(str(tmp_path / "imported"), tag="model0")
    for name, weight in saved["module"].items():
        assert torch.equal(engine.full(name), weight)
    assert engine.global_steps == 6
