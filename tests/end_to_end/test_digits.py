"""Digits example on real images: loss curves on several ranks, and after SIGKILL."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from torch.nn import functional

from tests.end_to_end.digits_model import copy_example
from tests.end_to_end.installation import Installation
from tests.waiting import until

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "digits"
BATCHES = 30
BATCH_SIZE = 64

RECORDING = '''
"""The example's trial, which records its initial weights and its samples."""

import threading
from pathlib import Path

import torch
from model_def import DigitsTrial


class RecordedTrial(DigitsTrial):
    def __init__(self, context):
        super().__init__(context)
        self.record = Path(self.hparams.record)
        self.rank = context.distributed.rank
        self.seen = []
        if self.rank == 0:
            torch.save(self.engine.module.state_dict(), self.record / "initial.pt")

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        samples = next(dataloader_iter)
        self.seen.append((batch_idx, *samples))
        if batch_idx == self.hparams.last_batch:
            torch.save(self.seen, self.record / f"rank{self.rank}.pt")
        return super().train_batch(iter([samples]), epoch_idx, batch_idx)


class WaitingTrial(DigitsTrial):
    """Trial whose rank 1 hangs once at batch 23."""

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        waited = Path(self.hparams.record) / "waited"
        here = self.context.distributed.rank == 1 and batch_idx == 23
        if here and self.hparams.wait and not waited.exists():
            waited.touch()
            threading.Event().wait()
        return super().train_batch(dataloader_iter, epoch_idx, batch_idx)
'''


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    with Installation.running(tmp_path_factory.mktemp("digits") / "home", slots=4) as installation:
        yield installation


def submit(
    installation: Installation, folder: Path, entrypoint: str, ranks: int, **hparams: Any
) -> int:
    """Submit the example in fp32 with a fixed global batch size and a report per batch."""
    model = folder / "model"
    copy_example(EXAMPLE, model)
    config = yaml.safe_load((EXAMPLE / "experiment.yaml").read_text())
    config["entrypoint"] = entrypoint
    config["hyperparameters"] |= {
        "overwrite_deepspeed_args": {
            "train_batch_size": BATCH_SIZE,
            "gradient_accumulation_steps": 2,
            "bf16": {"enabled": False},
        },
        "hidden": 32,
        "record": str(folder),
        "last_batch": BATCHES - 1,
        **hparams,
    }
    config["searcher"]["max_length"] = {"batches": BATCHES}
    config |= {
        "resources": {"slots_per_trial": ranks},
        "scheduling_unit": 1,
        "min_validation_period": {"batches": 10},
        "min_checkpoint_period": {"batches": 10},
    }
    return installation.submit(model, config, {"recording.py": RECORDING})


def curve(installation: Installation, experiment_id: int, group: str, name: str) -> dict[int, Any]:
    """Return one metric of the only trial: batch -> value."""
    (trial,) = installation.client.trials(experiment_id)
    curves = installation.client.metrics(trial["id"], group, max_points=1000)
    (points,) = [
        item["points"] for item in curves if (item["group"], item["name"]) == (group, name)
    ]
    assert len(points) == len(dict(points))
    return dict(points)


def plain_losses(folder: Path, ranks: int) -> list[float]:
    """Train in plain torch on the samples that the ranks recorded."""
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    model.load_state_dict(torch.load(folder / "initial.pt"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005, weight_decay=0.01)
    records = [torch.load(folder / f"rank{rank}.pt") for rank in range(ranks)]
    losses = []
    for batch in range(BATCHES):
        parts = [part for record in records for part in record if part[0] == batch]
        for group in optimizer.param_groups:
            group["lr"] = warmup(batch)
        total = 0.0
        for _, pixels, labels in parts:
            loss = functional.cross_entropy(model(pixels), labels) / len(parts)
            loss.backward()
            total += loss.item()
        squares = sum(p.grad.double().square().sum() for p in model.parameters())
        norm = float(squares**0.5)
        for parameter in model.parameters():
            parameter.grad *= min(1.0, 1.0 / (norm + 1e-6))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def warmup(batch: int) -> float:
    """Return the learning rate of a batch: 0 for the first two, as in DeepSpeed's WarmupLR."""
    return 0.005 * min(1.0, max(0, batch - 1) / 20)


@pytest.mark.processes
def test_loss_curve_equals_plain_torch_on_1_2_4_ranks(
    installation: Installation, tmp_path: Path
) -> None:
    experiment_ids = {}
    for ranks in (1, 2, 4):
        (tmp_path / str(ranks)).mkdir()
        folder = tmp_path / str(ranks)
        experiment_ids[ranks] = submit(installation, folder, "recording:RecordedTrial", ranks)
    curves = {}
    for ranks, experiment_id in experiment_ids.items():
        experiment = installation.wait_for(experiment_id)
        assert experiment["state"] == "COMPLETED", installation.lines(experiment_id)[-30:]
        curves[ranks] = curve(installation, experiment_id, "training", "loss")
        assert list(curves[ranks]) == list(range(1, BATCHES + 1))
        expected = plain_losses(tmp_path / str(ranks), ranks)
        assert list(curves[ranks].values()) == pytest.approx(expected, rel=1e-5)
    assert list(curves[2].values()) == pytest.approx(list(curves[1].values()), rel=1e-5)
    assert list(curves[4].values()) == pytest.approx(list(curves[1].values()), rel=1e-5)


@pytest.mark.processes
def test_killed_rank_restarts_without_losing_metrics(
    installation: Installation, tmp_path: Path
) -> None:
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    uninterrupted = submit(
        installation, tmp_path / "whole", "recording:WaitingTrial", 2, wait=False
    )
    killed = submit(installation, tmp_path / "killed", "recording:WaitingTrial", 2, wait=True)
    until("the rank waits to be killed", (tmp_path / "killed" / "waited").exists)
    (trial,) = installation.client.trials(killed)
    os.kill(installation.rank_pid(trial["run_id"], 1), signal.SIGKILL)

    for experiment_id in (uninterrupted, killed):
        experiment = installation.wait_for(experiment_id)
        assert experiment["state"] == "COMPLETED", installation.lines(experiment_id)[-30:]
    (trial,) = installation.client.trials(killed)
    assert trial["restarts"] == 1
    for group, name in (("training", "loss"), ("validation", "accuracy")):
        expected, actual = (curve(installation, e, group, name) for e in (uninterrupted, killed))
        assert expected == actual  # each batch once, bitwise equal
    assert list(curve(installation, killed, "training", "loss")) == list(range(1, BATCHES + 1))
