"""DeepSpeed's engine in the training loop, compared with Zerolab's; import of its checkpoints.

If DeepSpeed is not installed, pip installs it into a separate folder, which only the processes
started here import from. In the environment itself, Zerolab's module has this name.
"""

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.engine.checkpointing import SAMPLES, Net, make_engine, probe, train
from tests.engine.ranks import RankError, run_on_ranks
from tests.libraries import folder_with
from tests.trial.helpers import (
    LineTrial,
    fit,
    last_checkpoint,
    make_settings,
    make_spec,
    metrics,
)
from zerolab.contract.spec import (
    ENV_AS_DEEPSPEED,
)
from zerotrial.extensions.deepspeed_api.checkpoint_import.convert import import_deepspeed

pytestmark = [pytest.mark.processes, pytest.mark.slow]

VERSION = "0.19.8"
DEPENDENCIES = ("hjson", "einops", "ninja", "py-cpuinfo", "msgpack")
"""DeepSpeed's dependencies that are not installed; pip must not install another torch."""


@pytest.fixture(scope="session")
def deepspeed_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder with DeepSpeed, empty string if it is installed; skips if neither is possible."""
    return folder_with(
        tmp_path_factory,
        [f"deepspeed=={VERSION}", *DEPENDENCIES],
        _find_problem,
        is_installed=lambda: importlib.util.find_spec("deepspeed") is not None,
        options=["--no-build-isolation"],  # a source build that compiles nothing
        environment={"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"},
    )


def _find_problem(directory: str) -> str:
    """Return why the installed DeepSpeed is unusable; empty if it is usable."""
    if not directory and (installed := importlib.metadata.version("deepspeed")) != VERSION:
        return f"{installed} is installed"
    try:
        run_on_ranks(train_one_step, 1, directory)
    except RankError as error:
        return f"it does not train: {str(error)[-500:]}"
    return ""


def load_deepspeed(folder: str) -> Any:
    """Import DeepSpeed in this process without its kernels, which compile for minutes."""
    sys.path[:0] = [folder] if folder else []
    os.environ.pop(ENV_AS_DEEPSPEED, None)
    os.environ["DS_ACCELERATOR"] = "cpu"
    for name, value in (("RANK", dist.get_rank()), ("WORLD_SIZE", dist.get_world_size())):
        os.environ[name] = str(value)
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    import deepspeed

    deepspeed.ops.__compatible_ops__ = {}
    return deepspeed


def train_one_step(folder: str) -> None:
    """Train one step with DeepSpeed only; a failure is a problem of this machine."""
    deepspeed = load_deepspeed(folder)
    model = nn.Linear(1, 1)
    config = {
        "train_batch_size": 1,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    }
    engine = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())[
        0
    ]
    engine.backward(engine(torch.ones(1, 1)).sum())
    engine.step()


# -- stages, on two ranks --------------------------------------------------------------------------

ADAM: dict[str, Any] = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}}
WARMUP = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": 0.001, "warmup_max_lr": 0.02, "warmup_num_steps": 10},
}


def make_deepspeed_engine(stage: int, seed: int = 0, **overrides: Any) -> Any:
    torch.manual_seed(seed)
    config = {
        "train_batch_size": SAMPLES,
        "train_micro_batch_size_per_gpu": SAMPLES // dist.get_world_size(),
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "optimizer": {**ADAM, "params": {**ADAM["params"], "torch_adam": True}},
        "scheduler": WARMUP,
        **overrides,
    }
    import deepspeed

    model = Net()
    parameters = [p for p in model.parameters() if p.requires_grad]
    return deepspeed.initialize(model=model, model_parameters=parameters, config=config)[0]


def train_deepspeed(engine: Any, count: int) -> list[list[float]]:
    """Train as ``checkpointing.train``; return loss, gradient norm and learning rate per step."""
    results = []
    for _ in range(count):
        generator = torch.Generator().manual_seed(1000 + engine.global_steps)
        batch = torch.randn(SAMPLES, 6, generator=generator)[dist.get_rank() :: 2]
        loss = engine(batch)
        engine.backward(loss)
        engine.step()
        norm = engine.get_global_grad_norm()
        results.append([loss.item(), float("nan" if norm is None else norm), engine.get_lr()[0]])
    return results


def train_zerolab(engine: Any, count: int) -> list[list[float]]:
    results = []
    for _ in range(count):
        (loss,) = train(engine, 1)
        results.append([loss, engine.get_global_grad_norm(), engine.get_lr()[0]])
    return results


def train_both(folder: str, directory: str) -> dict[str, Any]:
    """Train both engines from the same weights on each of two ranks; save DeepSpeed's."""
    load_deepspeed(folder)
    results: dict[str, Any] = {}
    results["expected"] = train_zerolab(make_engine(2, optimizer=ADAM, scheduler=WARMUP), 5)
    for stage in (0, 1, 2, 3):
        engine = make_deepspeed_engine(stage)
        results[f"steps {stage}"] = train_deepspeed(engine, 5)
        engine.save_checkpoint(f"{directory}/theirs{stage}")
        results[f"probe {stage}"] = probe(engine)
    return results


def test_deepspeed_trains_alike_and_is_imported(deepspeed_folder: str, tmp_path: Path) -> None:
    for results in run_on_ranks(train_both, 2, deepspeed_folder, str(tmp_path)):
        expected = torch.tensor(results["expected"])
        for stage in (0, 1, 2, 3):
            columns = [0, 2] if stage == 0 else [0, 1, 2]  # DeepSpeed returns no norm at stage 0
            actual = torch.tensor(results[f"steps {stage}"])
            torch.testing.assert_close(
                actual[:, columns], expected[:, columns], rtol=2e-5, atol=1e-6
            )
    for stage in (0, 1, 2, 3):
        import_deepspeed(tmp_path / f"theirs{stage}", tmp_path / f"ours{stage}")
        engine = make_engine(0, seed=9, optimizer=ADAM, scheduler=WARMUP)
        engine.load_checkpoint(str(tmp_path / f"ours{stage}"))
        assert engine.global_steps == 5
        assert results[f"probe {stage}"] == pytest.approx(probe(engine), rel=2e-5)


# -- in a trial -----------------------------------------------------------------------------------


class DeepSpeedEngineTrial(LineTrial):
    """Trial with an engine from ``deepspeed.initialize``."""

    def __init__(self, context: Any) -> None:
        import deepspeed

        self.context = context
        self.samples, self.seen = 22, []
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "zero_optimization": {"stage": 1},
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        }
        model = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.3), nn.Linear(4, 1))
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config
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


def train_and_resume(folder: str, directory: str) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return metrics by batch of an uninterrupted run, and of one resumed after batch 3."""
    load_deepspeed(folder)
    uninterrupted, resumed = Path(directory) / "whole", Path(directory) / "cut"
    fit(make_spec(uninterrupted), DeepSpeedEngineTrial, make_settings(6))
    fit(make_spec(resumed), DeepSpeedEngineTrial, make_settings(3))
    fit(make_spec(resumed, latest=last_checkpoint(resumed)), DeepSpeedEngineTrial, make_settings(6))
    return metrics(uninterrupted, "training"), metrics(resumed, "training")


def test_trial_resumes_its_own_deepspeed_engine(deepspeed_folder: str, tmp_path: Path) -> None:
    ((uninterrupted, resumed),) = run_on_ranks(train_and_resume, 1, deepspeed_folder, str(tmp_path))
    assert sorted(uninterrupted) == [1, 2, 3, 4, 5, 6]
    assert {"loss", "learning_rate", "grad_norm", "loss_scale"} <= set(uninterrupted[6])
    assert [resumed[n]["loss"] for n in resumed] == [
        uninterrupted[n]["loss"] for n in uninterrupted
    ]
