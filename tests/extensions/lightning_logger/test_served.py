"""The real Lightning as a served script on two ranks: metrics, checkpoints, pause and resume."""

from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.installation import Installation
from tests.waiting import until

pytest.importorskip("lightning")
pytestmark = [pytest.mark.processes, pytest.mark.slow]

SCRIPT = """
import time
import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from zerotrial.extensions.lightning_logger import ZerolabCallback, ZerolabLogger


class Net(lightning.LightningModule):
    def __init__(self, lr):
        super().__init__()
        torch.manual_seed(1)
        self.save_hyperparameters()
        self.model = nn.Linear(4, 1)

    def training_step(self, batch, index):
        x, y = batch
        loss = nn.functional.mse_loss(self.model(x), y)
        self.log("loss", loss)
        if self.current_epoch == 2 and not RESUME:
            time.sleep(0.5)  # paused here by the test
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self.model(x), y), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


logger = ZerolabLogger()
callback = ZerolabCallback()
hparams = logger.experiment.train.get_hparams()
RESUME = callback.latest_checkpoint()
x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
data = TensorDataset(x, x.sum(1, keepdim=True))
trainer = lightning.Trainer(
    max_epochs=4, accelerator="cpu", devices=2, logger=logger,
    callbacks=[callback],
    log_every_n_steps=1, enable_checkpointing=False, enable_progress_bar=False,
)
trainer.fit(Net(hparams["lr"]), DataLoader(data, 4), DataLoader(data, 8), ckpt_path=RESUME)
print("trained", trainer.global_step, "resumed", RESUME is not None)
"""

CONFIG = {
    "name": "lightning",
    "entrypoint": "python -W ignore train.py",
    "hyperparameters": {"lr": 0.05},
    "searcher": {"name": "single", "metric": "val_loss"},
    "resources": {"slots_per_trial": 2},
}


def test_paused_trainer_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    with Installation.running(tmp_path / "home", slots=2) as installation:
        client = installation.client
        number = installation.submit(tmp_path / "model", CONFIG, {"train.py": SCRIPT})
        (trial,) = client.trials(number)

        def read_trial() -> dict[str, Any]:
            return client.trial(trial["id"])

        until("the third epoch", read_trial, lambda seen: seen["steps_completed"] >= 17)
        client.experiment_action(number, "pause")
        paused = until("it is paused", read_trial, lambda seen: seen["state"] == "PAUSED")
        assert paused["restarts"] == 0
        steps = [item["steps_completed"] for item in client.trial_checkpoints(trial["id"])]
        assert {8, 16} < set(steps)
        assert 16 < max(steps) < 24

        client.experiment_action(number, "activate")
        ended = installation.wait_for(number)
        lines = installation.lines(number)
        assert ended["state"] == "COMPLETED", lines[-30:]
        assert sum("trained 32 resumed True" in line for line in lines) == 2
        curves = {c["name"]: c["points"] for c in client.metrics(trial["id"], "validation")}
        assert [step for step, _ in curves["val_loss"]] == [8, 16, 24, 32]
        assert [value for _, value in curves["epochs"]] == [1, 2, 3, 4]
        assert curves["val_loss"][-1][1] < curves["val_loss"][0][1]
        training = {c["name"]: c["points"] for c in client.metrics(trial["id"], "training")}
        assert [step for step, _ in training["loss"]] == list(range(1, 33))
        assert ended["best_validation"] == min(value for _, value in curves["val_loss"])
