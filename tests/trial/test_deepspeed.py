"""A real DeepSpeed engine in our loop, beside ours; its checkpoints are imported.

DeepSpeed must not lie in the environment itself, where ours stands in for it: where it does not,
pip puts it into a folder of its own, which only the processes started here look into.
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
from zerotrial.engine.checkpoint.deepspeed.convert import import_deepspeed

pytestmark = [pytest.mark.processes, pytest.mark.slow]

VERSION = "0.19.8"
WITH_IT = ("hjson", "einops", "ninja", "py-cpuinfo", "msgpack")
"""What it imports; the rest is here, and another torch must not come."""


@pytest.fixture(scope="session")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with DeepSpeed in it; nothing where this Python has it. Else skips."""
    return folder_with(
        tmp_path_factory,
        [f"deepspeed=={VERSION}", *WITH_IT],
        _problem,
        here=lambda: importlib.util.find_spec("deepspeed") is not None,
        options=["--no-build-isolation"],  # it is built, which compiles nothing
        environment={"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"},
    )


def _problem(place: str) -> str:
    """Why what is there cannot be used, or nothing."""
    if not place and (found := importlib.metadata.version("deepspeed")) != VERSION:
        return f"{found} is installed"
    try:
        run_on_ranks(try_theirs, 1, place)
    except RankError as error:
        return f"it does not train: {str(error)[-500:]}"
    return ""


def load_deepspeed(folder: str) -> Any:
    """Import it in a process of its own; its kernels, which compile for minutes, are left out."""
    sys.path[:0] = [folder] if folder else []
    os.environ.pop(ENV_AS_DEEPSPEED, None)
    os.environ["DS_ACCELERATOR"] = "cpu"
    for name, value in (("RANK", dist.get_rank()), ("WORLD_SIZE", dist.get_world_size())):
        os.environ[name] = str(value)
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    import deepspeed

    deepspeed.ops.__compatible_ops__ = {}
    return deepspeed


def try_theirs(folder: str) -> None:
    """One step, with nothing of ours in it: what fails here fails for a reason of this machine."""
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


def engine_of_theirs(stage: int, seed: int = 0, **more: Any) -> Any:
    torch.manual_seed(seed)
    config = {
        "train_batch_size": SAMPLES,
        "train_micro_batch_size_per_gpu": SAMPLES // dist.get_world_size(),
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "optimizer": {**ADAM, "params": {**ADAM["params"], "torch_adam": True}},
        "scheduler": WARMUP,
        **more,
    }
    import deepspeed

    model = Net()
    parameters = [p for p in model.parameters() if p.requires_grad]
    return deepspeed.initialize(model=model, model_parameters=parameters, config=config)[0]


def steps_of_theirs(engine: Any, count: int) -> list[list[float]]:
    """As ``checkpointing.train`` does it; of each step this rank's loss, the norm and the rate."""
    found = []
    for _ in range(count):
        generator = torch.Generator().manual_seed(1000 + engine.global_steps)
        batch = torch.randn(SAMPLES, 6, generator=generator)[dist.get_rank() :: 2]
        loss = engine(batch)
        engine.backward(loss)
        engine.step()
        norm = engine.get_global_grad_norm()
        found.append([loss.item(), float("nan" if norm is None else norm), engine.get_lr()[0]])
    return found


def steps_of_ours(engine: Any, count: int) -> list[list[float]]:
    found = []
    for _ in range(count):
        (loss,) = train(engine, 1)
        found.append([loss, engine.get_global_grad_norm(), engine.get_lr()[0]])
    return found


def beside_theirs(folder: str, place: str) -> dict[str, Any]:
    """On each of two ranks: ours and theirs from the same start; theirs is saved."""
    load_deepspeed(folder)
    found: dict[str, Any] = {}
    found["expected"] = steps_of_ours(make_engine(2, optimizer=ADAM, scheduler=WARMUP), 5)
    for stage in (0, 1, 2, 3):
        engine = engine_of_theirs(stage)
        found[f"steps {stage}"] = steps_of_theirs(engine, 5)
        engine.save_checkpoint(f"{place}/theirs{stage}")
        found[f"probe {stage}"] = probe(engine)
    return found


def test_deepspeed_trains_alike_and_is_imported(theirs: str, tmp_path: Path) -> None:
    for found in run_on_ranks(beside_theirs, 2, theirs, str(tmp_path)):
        expected = torch.tensor(found["expected"])
        for stage in (0, 1, 2, 3):
            columns = [0, 2] if stage == 0 else [0, 1, 2]  # at stage 0 it tells no norm
            got = torch.tensor(found[f"steps {stage}"])
            torch.testing.assert_close(got[:, columns], expected[:, columns], rtol=2e-5, atol=1e-6)
    for stage in (0, 1, 2, 3):
        import_deepspeed(tmp_path / f"theirs{stage}", tmp_path / f"ours{stage}")
        engine = make_engine(0, seed=9, optimizer=ADAM, scheduler=WARMUP)
        engine.load_checkpoint(str(tmp_path / f"ours{stage}"))
        assert engine.global_steps == 5
        assert found[f"probe {stage}"] == pytest.approx(probe(engine), rel=2e-5)


# -- in a trial -----------------------------------------------------------------------------------


class HandMadeTrial(LineTrial):
    """An engine that the trial itself has from ``deepspeed.initialize``."""

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


def train_by_hand(folder: str, place: str) -> tuple[dict[int, Any], dict[int, Any]]:
    """Metrics by batch of a whole run, and of one that was cut after the third."""
    load_deepspeed(folder)
    whole, cut = Path(place) / "whole", Path(place) / "cut"
    fit(make_spec(whole), HandMadeTrial, make_settings(6))
    fit(make_spec(cut), HandMadeTrial, make_settings(3))
    fit(make_spec(cut, latest=last_checkpoint(cut)), HandMadeTrial, make_settings(6))
    return metrics(whole, "training"), metrics(cut, "training")


def test_trial_resumes_its_own_deepspeed_engine(theirs: str, tmp_path: Path) -> None:
    ((whole, cut),) = run_on_ranks(train_by_hand, 1, theirs, str(tmp_path))
    assert sorted(whole) == [1, 2, 3, 4, 5, 6]
    assert {"loss", "learning_rate", "grad_norm", "loss_scale"} <= set(whole[6])
    assert [cut[n]["loss"] for n in cut] == [whole[n]["loss"] for n in whole]
