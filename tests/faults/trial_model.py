"""Trial class with a fault that its hyperparameters select."""

import contextlib
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn

import zerotrial
from zerotrial.extensions.shared_memory import peer_sockets


def fill(file):
    """Fill the file system of a file."""
    with contextlib.suppress(OSError), file.open("wb", buffering=0) as content:
        while content.write(b"x" * 4096):
            pass


def shorten_timeout(hangs):
    """Reduce the timeout to 2 s once a rank hangs.

    A short timeout from the start would fail on a slow machine before the fault.
    """
    while not hangs.exists():
        time.sleep(0.01)
    assert peer_sockets._OPEN_SOCKETS
    for peer in peer_sockets._OPEN_SOCKETS:
        assert peer._timeout_s in (1234, 2), peer._timeout_s  # 2: called once a micro-batch
        peer._timeout_s = 2.0


class FaultyTrial(zerotrial.ZeroTrial):
    """Trial that fits a line with dropout, with two micro-batches per batch."""

    def __init__(self, context):
        self.context = context
        self.hparams = context.get_hparams()
        self.micro_batches = 0
        model = nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.2), nn.Linear(8, 1))
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 1},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        }
        self.engine = context.wrap_model_engine(zerotrial.initialize(model=model, config=config)[0])

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        self.micro_batches += 1
        if self.context.distributed.rank == 1:
            self.fault(batch_idx)
        elif self.hparams["fault"] == "hang" and batch_idx == self.hparams["at_batch"]:
            shorten_timeout(Path(self.hparams["file"]))
        x = next(dataloader_iter)
        loss = (self.engine(x) - 3 * x.to(torch.bfloat16)).float().square().mean()
        self.engine.backward(loss)
        self.engine.step()
        return {"loss": loss, "first": x[0, 0]}

    def fault(self, batch_idx):
        if batch_idx == self.hparams["at_batch"]:
            if self.hparams["fault"] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.hparams["fault"] == "hang":
                Path(self.hparams["file"]).touch()
                while True:
                    time.sleep(3600)
            if self.hparams["fault"] == "fill":
                fill(Path(self.hparams["file"]))
            if self.hparams["fault"] == "signal_ready":
                Path(self.hparams["file"]).touch()

    def evaluate_batch(self, dataloader_iter):
        x = next(dataloader_iter)
        return {"validation_loss": (self.engine(x) - 3 * x).float().square().mean()}

    def build_training_data_loader(self):
        data = torch.arange(22.0).reshape(22, 1) / 22
        return zerotrial.DataLoader(data, batch_size=2, shuffle=True)

    def build_validation_data_loader(self):
        return zerotrial.DataLoader(torch.arange(6.0).reshape(6, 1), batch_size=2)
